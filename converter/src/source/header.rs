//! The header of one safetensors shard, checked in full before anything in it is believed.
//!
//! Only the header's bytes are read. Every tensor must lie inside the file, follow the one before it without a gap
//! or an overlap, and be exactly as long as its shape and dtype say; the last one must end where the file ends.

use std::cmp::Ordering;
use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};

use super::read::SourceFile;
use crate::error::Error;
use crate::json::{self, UniqueMap};

/// Longest header accepted, bytes: the limit of the safetensors format.
pub(crate) const MAX_HEADER_LEN: u64 = 100_000_000;

/// Largest file that is looked at for being a Git LFS pointer, bytes; real pointers have about 130.
const MAX_POINTER_LEN: u64 = 1024;

const POINTER_START: &[u8] = b"version https://git-lfs.github.com/spec/";

/// One tensor of a shard.
#[derive(Debug, Clone)]
pub(crate) struct ShardTensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    /// Absolute byte offset in the file.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: u64,
}

/// Reads and checks the header of `file`; tensors come in file order.
pub(crate) fn read_header(file: &SourceFile) -> Result<Vec<ShardTensor>, Error> {
    refuse_pointer(file)?;
    let truncated = |expected| Error::Truncated { file: file.name.clone(), found: file.len, expected };
    if file.len < 8 {
        return Err(truncated(8));
    }
    let mut prefix = [0; 8];
    file.read_exact_at(&mut prefix, 0)?;
    let header_len = u64::from_le_bytes(prefix);
    if header_len > MAX_HEADER_LEN {
        return Err(Error::HeaderTooLong {
            file: file.name.clone(),
            found: header_len,
            limit: MAX_HEADER_LEN,
        });
    }
    let data_start = 8 + header_len;
    if data_start > file.len {
        return Err(truncated(data_start));
    }
    let mut bytes = vec![0; usize::try_from(header_len).expect("at most 100 MB")];
    file.read_exact_at(&mut bytes, 8)?;
    let header: Header = json::parse(&file.name, &bytes)?;
    place(file, header.tensors, data_start)
}

/// Refuses a Git LFS pointer by what it says it is.
pub(crate) fn refuse_pointer(file: &SourceFile) -> Result<(), Error> {
    if file.len > MAX_POINTER_LEN || file.len < POINTER_START.len() as u64 {
        return Ok(());
    }
    let mut start = [0; POINTER_START.len()];
    file.read_exact_at(&mut start, 0)?;
    if start == POINTER_START {
        return Err(Error::LfsPointer { file: file.name.clone(), len: file.len });
    }
    Ok(())
}

/// A shard's file name that stays inside the checkpoint folder on every system.
pub(crate) fn plain_file_name(name: &str) -> Result<&str, Error> {
    let plain = !name.is_empty()
        && name != "."
        && name != ".."
        && !name.contains(['/', '\\', ':', '\0'])
        && Path::new(name).extension().is_some_and(|extension| extension == "safetensors");
    if plain { Ok(name) } else { Err(Error::UnsafeFileName { name: name.to_owned() }) }
}

/// Checks every range against its neighbours, its shape and the file's length.
fn place(
    file: &SourceFile,
    mut tensors: Vec<(String, TensorInfo)>,
    data_start: u64,
) -> Result<Vec<ShardTensor>, Error> {
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let mut end = 0_u64;
    let mut placed = Vec::with_capacity(tensors.len());
    for (name, info) in tensors {
        match range(&info, end, data_start) {
            Ok((offset, len)) => {
                let shape = info.shape.iter().map(|&dim| dim as u64).collect();
                placed.push(ShardTensor { name, dtype: info.dtype, shape, offset, len });
                end += len;
            }
            Err(reason) => {
                return Err(Error::BadTensorRange { file: file.name.clone(), tensor: name, reason });
            }
        }
    }
    let expected = data_start.saturating_add(end);
    match expected.cmp(&file.len) {
        Ordering::Greater => Err(Error::Truncated { file: file.name.clone(), found: file.len, expected }),
        Ordering::Less => Err(Error::TrailingBytes { file: file.name.clone(), found: file.len, expected }),
        Ordering::Equal => Ok(placed),
    }
}

/// Absolute offset and length of a tensor that must follow `end`, or what is wrong with its range.
fn range(info: &TensorInfo, end: u64, data_start: u64) -> Result<(u64, u64), String> {
    let (from, to) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
    if from > to {
        return Err(format!("begins at byte {from}, after its end {to}"));
    }
    if from != end {
        let what = if from < end { "overlaps the tensor before it" } else { "leaves a gap before it" };
        return Err(format!("begins at byte {from} and {what}, which ends at {end}"));
    }
    let needed = byte_len(info).ok_or_else(|| format!("shape {:?} overflows", info.shape))?;
    if to - from != needed {
        return Err(format!(
            "holds {} bytes, shape {:?} of {} needs {needed}",
            to - from,
            info.shape,
            info.dtype
        ));
    }
    let offset = data_start.checked_add(from).ok_or("its offset overflows")?;
    Ok((offset, needed))
}

fn byte_len(info: &TensorInfo) -> Option<u64> {
    let bits = info.dtype.bitsize() as u64;
    let n = info.shape.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim as u64))?;
    let total = n.checked_mul(bits)?;
    total.is_multiple_of(8).then_some(total / 8)
}

struct Header {
    tensors: Vec<(String, TensorInfo)>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a safetensors header")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Header, A::Error> {
        let mut seen = HashSet::new();
        let mut tensors = Vec::new();
        while let Some(key) = access.next_key::<String>()? {
            if !seen.insert(key.clone()) {
                return Err(de::Error::custom(json::duplicate(&key)));
            }
            if key == "__metadata__" {
                access.next_value::<UniqueMap<String>>()?;
            } else {
                tensors.push((key, access.next_value()?));
            }
        }
        Ok(Header { tensors })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(bytes: &[u8]) -> Result<Vec<ShardTensor>, Error> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        std::fs::write(&path, bytes).unwrap();
        read_header(&SourceFile::open(path).unwrap())
    }

    fn shard(header: &[u8], data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    const HEADER: &str = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},"b":{"dtype":"U32","shape":[],"data_offsets":[12,16]}}"#;

    #[test]
    fn a_valid_header_gives_absolute_places() {
        let tensors = read(&shard(HEADER.as_bytes(), 16)).unwrap();
        let start = 8 + HEADER.len() as u64;
        let places: Vec<_> =
            tensors.iter().map(|t| (t.name.as_str(), t.shape.len(), t.offset - start, t.len)).collect();
        assert_eq!(places, [("a", 2, 0, 12), ("b", 0, 12, 4)]);
        assert!(read(&shard(b"{}", 0)).unwrap().is_empty());
    }

    proptest! {
        /// Whatever is damaged, the answer is tensors inside the file or an error, never a panic.
        #[test]
        fn damage_is_an_error_or_harmless(at in 0..HEADER.len(), byte: u8, cut in 0..200_usize) {
            let mut bytes = shard(HEADER.as_bytes(), 16);
            bytes[8 + at] = byte;
            bytes.truncate(bytes.len() - cut.min(bytes.len()));
            if let Ok(tensors) = read(&bytes) {
                prop_assert!(tensors.iter().all(|tensor| tensor.offset + tensor.len <= bytes.len() as u64));
            }
        }

        #[test]
        fn noise_is_an_error(noise in prop::collection::vec(any::<u8>(), 8..64)) {
            prop_assert!(read(&shard(&noise, 0)).is_err());
        }
    }
}
