//! An open file: a valid index, and the bytes of its tensors, mapped or read.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use memmap2::{Mmap, MmapMut};
use xxhash_rust::xxh3::xxh3_128;

use crate::error::Error;
use crate::header::Header;
use crate::index::Index;
use crate::output::{device_at, other_than_file};
use crate::tensor::Tensor;

/// How the bytes of a file are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Mapped: pages come in when they are used and are shared between processes. The file must not be cut short
    /// while it is open: touching a page that is gone ends the process on most systems.
    Mmap,
    /// Read whole into memory, in large pages where the system has them, after which the file may change or vanish.
    Read,
}

/// The bytes of the whole file.
enum Bytes {
    Mapped(Mmap),
    /// Memory of our own.
    Read(Mmap),
}

impl Bytes {
    fn map(&self) -> &Mmap {
        match self {
            Self::Mapped(map) | Self::Read(map) => map,
        }
    }

    fn as_slice(&self) -> &[u8] {
        self.map()
    }
}

/// An open `.samara` file.
pub struct SamaraFile {
    path: PathBuf,
    index: Index,
    bytes: Bytes,
    /// A mapped file was asked for in large pages.
    large_pages: AtomicBool,
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
            Access::Read => Bytes::Read(read(&file, path, index.file_len())?),
        };
        let actual = bytes.as_slice().len() as u64;
        if actual < index.file_len() {
            return Err(Error::Truncated { actual, expected: index.file_len() }.in_file(path));
        }
        Ok(Self { path: path.to_owned(), index, bytes, large_pages: AtomicBool::new(false) })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How its bytes are reached.
    pub fn access(&self) -> Access {
        match self.bytes {
            Bytes::Mapped(_) => Access::Mmap,
            Bytes::Read(_) => Access::Read,
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

    /// Asks for a mapped file in pages of 2 MiB, for a file that memory has room for. Weights are gigabytes, and with small
    /// pages a third of the time goes into finding them; but what is read from the disk is then 2 MiB at a time, wanted
    /// or not. Linux does that from 5.18 on, where the file system can, with what it has not read yet.
    pub fn large_pages(&self) {
        if let Bytes::Mapped(map) = &self.bytes {
            self.large_pages.store(ask_for_large_pages(map), Relaxed);
        }
    }

    /// Says that one block of a tensor is going to be used: a mapped file is read from the disk without waiting for it. A
    /// hint; nothing is done where the file comes in in large pages, since what is read ahead would be small
    /// ones.
    ///
    /// # Panics
    /// When there is no such block, or the tensor belongs to another file.
    pub fn will_need(&self, tensor: &Tensor, block: usize) {
        assert!((block as u64) < tensor.n_blocks, "block {block} of {} in {}", tensor.n_blocks, tensor.name);
        #[cfg(unix)]
        if let (Bytes::Mapped(map), false) = (&self.bytes, self.large_pages.load(Relaxed)) {
            let start = tensor.offset + block as u64 * tensor.block_stride;
            let _ = map.advise_range(memmap2::Advice::WillNeed, start as usize, tensor.block_stride as usize);
        }
    }

    /// Keeps all bytes in memory, reading them first, until the file is closed.
    ///
    /// # Errors
    /// [`Error::Io`] where the system or its limits do not allow that.
    pub fn lock(&self) -> Result<(), Error> {
        #[cfg(unix)]
        let locked = self.bytes.map().lock();
        #[cfg(not(unix))]
        let locked = Err(std::io::ErrorKind::Unsupported.into());
        locked.map_err(Error::io("lock in memory", &self.path))
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

/// Whether the system takes the wish.
fn ask_for_large_pages(map: &Mmap) -> bool {
    #[cfg(target_os = "linux")]
    {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        // One page at a time: without the second hint each is read with the next.
        has_large_pages(&release)
            && map.advise(memmap2::Advice::HugePage).is_ok()
            && map.advise(memmap2::Advice::Random).is_ok()
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = map;
        false
    }
}

/// Whether a Linux of this release reads mapped files in large pages when asked.
#[cfg(target_os = "linux")]
fn has_large_pages(release: &str) -> bool {
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (5, 18)
}

/// Reads `len` bytes, which the file is known to have, into memory of our own. Large pages, where the system gives them when
/// asked, make the reading of weights faster: there are a million small ones in a large model.
fn read(mut file: &File, path: &Path, len: u64) -> Result<Mmap, Error> {
    use std::io::{Error as IoError, ErrorKind, Seek};
    let out_of_memory = || Error::io("hold in memory", path)(IoError::from(ErrorKind::OutOfMemory));
    let size = usize::try_from(len).map_err(|_| out_of_memory())?;
    let mut memory = MmapMut::map_anon(size).map_err(|_| out_of_memory())?;
    #[cfg(target_os = "linux")]
    let _ = memory.advise(memmap2::Advice::HugePage);
    if let Err(error) = file.rewind().and_then(|()| file.read_exact(&mut memory)) {
        let now = file.metadata().map_or(len, |meta| meta.len());
        return Err(match error.kind() {
            // It was that long when it was opened.
            ErrorKind::UnexpectedEof if now < len => {
                Error::Truncated { actual: now, expected: len }.in_file(path)
            }
            _ => Error::io("read", path)(error),
        });
    }
    memory.make_read_only().map_err(Error::io("protect the memory of", path))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn releases_with_large_pages() {
        for (release, expected) in [
            ("6.18.44-fc-v669\n", true),
            ("5.18.0", true),
            ("5.17.15-generic", false),
            ("4.19.0-27-amd64", false),
            ("10.0", true),
            ("", false),
            ("unknown", false),
        ] {
            assert_eq!(has_large_pages(release), expected, "{release:?}");
        }
    }
}
