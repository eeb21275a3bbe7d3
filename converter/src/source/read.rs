//! Positioned reads from source files.
//!
//! Sources are read, never mapped: a file cut short while it is read gives an error instead of a signal, and the
//! memory in use is the buffers' and nothing else. One handle serves all threads, because the position is an
//! argument.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::time::SystemTime;

use xxhash_rust::xxh3::Xxh3Default;

use crate::error::Error;

/// Bytes per read while hashing.
const HASH_CHUNK: usize = 4 << 20;

/// One file of a checkpoint, open for positioned reads.
#[derive(Debug)]
pub(crate) struct SourceFile {
    /// Plain name inside the checkpoint folder.
    pub(crate) name: String,
    /// Length in bytes when it was opened.
    pub(crate) len: u64,
    path: PathBuf,
    modified: Option<SystemTime>,
    file: File,
}

impl SourceFile {
    /// Opens a file; a symbolic link is followed, because download caches are made of them.
    pub(crate) fn open(path: PathBuf) -> Result<Self, Error> {
        let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let file = File::open(&path).map_err(Error::io("open", &path))?;
        let metadata = file.metadata().map_err(Error::io("look at", &path))?;
        Ok(Self { name, len: metadata.len(), modified: metadata.modified().ok(), path, file })
    }

    /// Fills `buffer` from byte `offset` on.
    pub(crate) fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), Error> {
        let mut done = 0;
        while done < buffer.len() {
            match read_at(&self.file, &mut buffer[done..], offset + done as u64) {
                Ok(0) => {
                    let expected = offset + buffer.len() as u64;
                    return Err(Error::Truncated {
                        file: self.name.clone(),
                        found: offset + done as u64,
                        expected,
                    });
                }
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::io("read", &self.path)(error)),
            }
        }
        Ok(())
    }

    /// xxh3-128 of the whole file. `step` is called with the bytes of each read, and may stop it.
    pub(crate) fn hash(&self, step: &dyn Fn(u64) -> Result<(), Error>) -> Result<u128, Error> {
        self.hash_range(0, self.len, step)
    }

    /// xxh3-128 of `len` bytes from `offset` on.
    pub(crate) fn hash_range(
        &self,
        offset: u64,
        len: u64,
        step: &dyn Fn(u64) -> Result<(), Error>,
    ) -> Result<u128, Error> {
        let mut hash = Xxh3Default::new();
        let mut buffer = vec![0; HASH_CHUNK.min(usize::try_from(len).unwrap_or(HASH_CHUNK))];
        let mut done = 0;
        while done < len {
            let n = usize::try_from(len - done).unwrap_or(usize::MAX).min(buffer.len());
            self.read_exact_at(&mut buffer[..n], offset + done)?;
            hash.update(&buffer[..n]);
            done += n as u64;
            step(n as u64)?;
        }
        Ok(hash.digest128())
    }

    /// Fails if the file's length or modification time is no longer what it was when opened.
    pub(crate) fn check_unchanged(&self) -> Result<(), Error> {
        let metadata = std::fs::metadata(&self.path).map_err(Error::io("look at", &self.path))?;
        if metadata.len() == self.len && metadata.modified().ok() == self.modified {
            return Ok(());
        }
        Err(Error::SourceChanged { file: self.name.clone() })
    }
}

#[cfg(unix)]
fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, buffer, offset)
}

#[cfg(windows)]
fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, buffer, offset)
}
