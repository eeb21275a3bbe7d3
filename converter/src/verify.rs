//! Reading a complete file back before it gets its name: what lies on the disk must be what was written.
//!
//! Buffered reads, not a map, so that a check of a large file does not count as its size in memory.

use std::path::Path;

use rayon::prelude::*;
use samara_format::{Index, Tensor};

use crate::error::Error;
use crate::source::SourceFile;

/// What was written.
#[derive(Debug)]
pub(crate) struct Written {
    /// Tensors with their hashes, in file order.
    pub(crate) tensors: Vec<Tensor>,
    /// Where the data start.
    pub(crate) data_offset: u64,
}

/// Parses the index of `part` and hashes every tensor. Returns the hash in the header.
///
/// `step` is called with the bytes of each read, and may stop it.
pub(crate) fn verify(
    part: &Path,
    written: &Written,
    step: &(dyn Fn(u64) -> Result<(), Error> + Sync),
) -> Result<u128, Error> {
    check(part, written, step).map_err(|error| match error {
        Error::Cancelled { .. } => error,
        _ => Error::VerifyFailed { part: part.to_owned(), reason: error.to_string() },
    })
}

fn check(
    path: &Path,
    written: &Written,
    step: &(dyn Fn(u64) -> Result<(), Error> + Sync),
) -> Result<u128, Error> {
    let file = SourceFile::open(path.to_owned())?;
    let mut head = vec![0; usize::try_from(written.data_offset.min(file.len)).expect("64-bit target")];
    file.read_exact_at(&mut head, 0)?;
    let index = Index::parse(&head, file.len)?;
    let pairs = written.tensors.par_iter().zip(index.tensors().par_iter());
    let differs = |(written, found): (&Tensor, &Tensor)| {
        let whole = written == found && file.hash_range(written.offset, written.len, step)? == written.hash;
        Ok((!whole).then(|| written.name.clone()))
    };
    let differing: Vec<Result<Option<String>, Error>> = pairs.map(differs).collect();
    let tensors: Vec<String> =
        differing.into_iter().filter_map(Result::transpose).collect::<Result<_, Error>>()?;
    if !tensors.is_empty() || index.tensors().len() != written.tensors.len() {
        return Err(Error::ReadBack { tensors });
    }
    Ok(index.digest())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use samara_format::{Dtype, FileLayout, Metadata, TensorSpec, Writer};

    use super::*;

    /// A finished file of two tensors of 3 and 5 numbers.
    fn written(path: &Path) -> Written {
        let specs =
            vec![TensorSpec::single("a", Dtype::U32, 1, 3), TensorSpec::single("b", Dtype::U32, 1, 5)];
        let layout = FileLayout::new(Metadata::new(), specs, 0).unwrap();
        let (mut tensors, data_offset) = (layout.tensors().to_vec(), layout.data_offset());
        let mut writer = Writer::create(path, layout, false).unwrap();
        for (tensor, bytes) in tensors.iter_mut().zip([12, 20]) {
            let mut body = writer.tensor().unwrap();
            body.write_all(&vec![7; bytes]).unwrap();
            tensor.hash = body.finish().unwrap();
        }
        writer.finish().unwrap();
        Written { tensors, data_offset }
    }

    #[test]
    fn a_changed_byte_is_found_by_tensor() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.samara");
        let written = written(&path);
        verify(&path, &written, &|_| Ok(())).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let flip = |at: u64, wanted: &str| {
            let mut bytes = whole.clone();
            bytes[usize::try_from(at).unwrap()] ^= 1;
            std::fs::write(&path, bytes).unwrap();
            let error = verify(&path, &written, &|_| Ok(())).unwrap_err();
            let Error::VerifyFailed { part, reason } = &error else { panic!("{error}") };
            assert!(reason.contains(wanted) && *part == path, "{error}");
        };
        flip(written.tensors[0].offset + 2, "read back wrong: a");
        flip(written.tensors[1].offset + 19, "read back wrong: b");
        flip(70, "hash");
    }
}
