//! An open file: a valid index, and the bytes of its tensors, mapped or read.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use xxhash_rust::xxh3::xxh3_128;

use crate::error::Error;
use crate::header::Header;
use crate::index::Index;
use crate::output::{device_at, other_than_file};
use crate::tensor::Tensor;

/// Alignment of the bytes of a file that was read.
const HEAP_ALIGN: usize = 64;

/// How the bytes of a file are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Mapped: pages come in when they are used and are shared between processes. The file must not be cut short
    /// while it is open: touching a page that is gone ends the process on most systems.
    Mmap,
    /// Read whole into memory, after which the file may change or vanish.
    Read,
}

/// The bytes of the whole file.
enum Bytes {
    Mapped(Mmap),
    /// The file starts at the given index, which is aligned to 64.
    Heap(Vec<u8>, usize),
}

impl Bytes {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Heap(bytes, start) => &bytes[*start..],
        }
    }
}

/// An open `.samara` file.
pub struct SamaraFile {
    path: PathBuf,
    index: Index,
    bytes: Bytes,
}

impl std::fmt::Debug for SamaraFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SamaraFile")
            .field("path", &self.path)
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}

impl SamaraFile {
    /// Opens a file and validates its index; tensors' hashes are left to [`SamaraFile::verify`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Unmappable`], [`Error::NotAFile`], [`Error::CheckpointFolder`], or [`Error::InFile`] with the
    /// file's defect.
    pub fn open(path: impl AsRef<Path>, access: Access) -> Result<Self, Error> {
        let path = path.as_ref();
        if let Some(found) = device_at(path) {
            return Err(Error::NotAFile { path: path.to_owned(), found });
        }
        let meta = path.metadata().map_err(Error::io("open", path))?;
        if let Some(found) = other_than_file(&meta) {
            let checkpoint = path.join("config.json").is_file();
            let path = path.to_owned();
            return Err(if checkpoint {
                Error::CheckpointFolder { path }
            } else {
                Error::NotAFile { path, found }
            });
        }
        let mut file = File::open(path).map_err(Error::io("open", path))?;
        let index = read_index(&mut file, path)?;
        let bytes = match access {
            Access::Mmap => {
                Bytes::Mapped(map(&file).map_err(|cause| Error::Unmappable { path: path.to_owned(), cause })?)
            }
            Access::Read => read_aligned(&file, path, index.file_len())?,
        };
        let actual = bytes.as_slice().len() as u64;
        if actual < index.file_len() {
            return Err(Error::Truncated { actual, expected: index.file_len() }.in_file(path));
        }
        Ok(Self { path: path.to_owned(), index, bytes })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How its bytes are reached.
    pub fn access(&self) -> Access {
        match self.bytes {
            Bytes::Mapped(_) => Access::Mmap,
            Bytes::Heap(..) => Access::Read,
        }
    }

    /// The index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// All bytes of a tensor of this file.
    ///
    /// # Panics
    /// When the tensor lies outside this file, because it belongs to another one.
    pub fn bytes(&self, tensor: &Tensor) -> &[u8] {
        &self.bytes.as_slice()[tensor.offset as usize..][..tensor.len as usize]
    }

    /// One part of one block of a tensor of this file, without padding. Starts at a multiple of 64 in memory.
    ///
    /// # Panics
    /// When there is no such block or part, or the tensor belongs to another file.
    pub fn part(&self, tensor: &Tensor, block: usize, part: usize) -> &[u8] {
        let block = block as u64;
        assert!(block < tensor.n_blocks, "block {block} of {} in {}", tensor.n_blocks, tensor.name);
        let place = &tensor.parts[part];
        let start = block * tensor.block_stride + place.offset;
        &self.bytes(tensor)[start as usize..][..place.len as usize]
    }

    /// Compares a tensor's bytes with its hash, and the padding after it with zeros.
    ///
    /// # Errors
    /// [`Error::InFile`] with [`Error::TensorHash`] or [`Error::TensorPadding`].
    pub fn verify(&self, tensor: &Tensor) -> Result<(), Error> {
        let found = xxh3_128(self.bytes(tensor));
        if found != tensor.hash {
            let name = tensor.name.clone();
            return Err(Error::TensorHash { tensor: name, found, expected: tensor.hash }.in_file(&self.path));
        }
        let (end, next) = ((tensor.offset + tensor.len) as usize, tensor.padded_end() as usize);
        if let Some(i) = self.bytes.as_slice()[end..next].iter().position(|&b| b != 0) {
            let offset = (end + i) as u64;
            return Err(Error::TensorPadding { tensor: tensor.name.clone(), offset }.in_file(&self.path));
        }
        Ok(())
    }
}

/// Reads and parses the index, and nothing of the data.
fn read_index(file: &mut File, path: &Path) -> Result<Index, Error> {
    let actual = file.metadata().map_err(Error::io("read the size of", path))?.len();
    let mut head = Vec::new();
    file.take(Header::LEN as u64).read_to_end(&mut head).map_err(Error::io("read", path))?;
    let header = Header::parse(&head, actual).map_err(|defect| defect.in_file(path))?;
    let rest = header.data_offset - head.len() as u64;
    file.take(rest).read_to_end(&mut head).map_err(Error::io("read", path))?;
    Index::parse(&head, actual).map_err(|defect| defect.in_file(path))
}

#[expect(unsafe_code, reason = "mapping a file is the one thing here that safe Rust cannot express")]
fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the map is private to this crate and read-only. Rust wants its bytes not to change while borrowed;
    // no one but another process can change them, and no invariant of this crate rests on tensor bytes: the index is
    // parsed from a copy. `Access::Mmap` documents the remaining duty, not to cut the file while it is open.
    unsafe { Mmap::map(file) }
}

/// Reads `len` bytes, which the file is known to have, to a place in memory that is aligned to 64.
fn read_aligned(mut file: &File, path: &Path, len: u64) -> Result<Bytes, Error> {
    use std::io::{Error as IoError, ErrorKind, Seek};
    let out_of_memory = || Error::io("hold in memory", path)(IoError::from(ErrorKind::OutOfMemory));
    let size =
        usize::try_from(len).ok().and_then(|n| n.checked_add(2 * HEAP_ALIGN)).ok_or_else(out_of_memory)?;
    let mut bytes = Vec::<u8>::new();
    bytes.try_reserve_exact(size).map_err(|_| out_of_memory())?;
    let start = bytes.as_ptr().align_offset(HEAP_ALIGN);
    bytes.resize(start, 0);
    file.rewind().and_then(|()| file.take(len).read_to_end(&mut bytes)).map_err(Error::io("read", path))?;
    assert_eq!(bytes.as_ptr().align_offset(HEAP_ALIGN), start, "the reserved memory was enough");
    Ok(Bytes::Heap(bytes, start))
}
