//! What may stand where a file is to be written.
//!
//! A finished file takes its final name by renaming, which would put aside whatever bears that name, and a new `.part`
//! file takes the place of an old one. So both places are looked at first: nothing but a regular file is replaced, and
//! nothing but the unfinished file of a writer is discarded.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::header::{Header, MAGIC};

/// The name under which `final_path` is written until it is complete: `{final_path}.part`.
pub fn part_path(final_path: &Path) -> PathBuf {
    let mut name = OsString::from(final_path);
    name.push(".part");
    name.into()
}

/// Fails unless a file may be written to `final_path`: nothing is there, or a regular file and `overwrite` is true.
///
/// # Errors
/// [`Error::NotReplaceable`] for a folder, a link, a device and so on, whatever `overwrite` says; [`Error::Exists`];
/// [`Error::Io`].
pub fn check_output(final_path: &Path, overwrite: bool) -> Result<(), Error> {
    let path = || final_path.to_owned();
    if final_path.file_name().is_none() {
        return Err(Error::NotReplaceable { path: path(), found: "no name of a file" });
    }
    match look_at(final_path)?.map(|meta| other_than_file(&meta)) {
        None => Ok(()),
        Some(Some(found)) => Err(Error::NotReplaceable { path: path(), found }),
        Some(None) if overwrite => Ok(()),
        Some(None) => Err(Error::Exists { path: path() }),
    }
}

/// Looks at `{final_path}.part`: the unfinished file of a writer, or `None` where there is nothing.
///
/// # Errors
/// [`Error::ForeignPart`] when something else is there; [`Error::Io`].
pub fn check_part(final_path: &Path) -> Result<Option<Metadata>, Error> {
    let path = part_path(final_path);
    let Some(meta) = look_at(&path)? else { return Ok(None) };
    if let Some(found) = other_than_file(&meta) {
        return Err(Error::ForeignPart { path, found });
    }
    let mut head = Vec::new();
    File::open(&path)
        .and_then(|file| file.take(Header::LEN as u64).read_to_end(&mut head))
        .map_err(Error::io("read", &path))?;
    let start = &head[..head.len().min(MAGIC.len())];
    if head.iter().all(|&byte| byte == 0) || MAGIC.starts_with(start) {
        return Ok(Some(meta));
    }
    Err(Error::ForeignPart { path, found: "a file of something else" })
}

/// Metadata of what is at `path` itself, links not followed.
pub(crate) fn look_at(path: &Path) -> Result<Option<Metadata>, Error> {
    match path.symlink_metadata() {
        Ok(meta) => Ok(Some(meta)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("look at", path)(error)),
    }
}

/// What is there instead of a regular file; `None` for a regular file.
pub(crate) fn other_than_file(meta: &Metadata) -> Option<&'static str> {
    if meta.is_file() {
        None
    } else if meta.is_dir() {
        Some("a folder")
    } else if meta.is_symlink() {
        Some("a symbolic link")
    } else {
        Some("a device, a pipe or a socket")
    }
}

/// Makes a rename to `path` durable.
#[cfg(unix)]
pub(crate) fn sync_folder(path: &Path) -> Result<(), Error> {
    let folder = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    File::open(folder).and_then(|f| f.sync_all()).map_err(Error::io("sync the folder", folder))
}

/// Windows has no way to sync a folder; its file systems journal renames.
#[cfg(not(unix))]
pub(crate) fn sync_folder(_path: &Path) -> Result<(), Error> {
    Ok(())
}
