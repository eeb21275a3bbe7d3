//! What may stand where a file is to be written.
//!
//! A finished file takes its final name by renaming, which would put aside whatever bears that name, and a new `.part`
//! file takes the place of an old one. So both places are looked at first: nothing but a regular file is replaced, and
//! nothing but the unfinished file of a writer is discarded.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

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
    if let Some(found) = unusable_name(final_path, cfg!(windows)) {
        return Err(Error::NotReplaceable { path: path(), found });
    }
    let Some(meta) = look_at(final_path)? else { return Ok(()) };
    match other_than_file(&meta) {
        Some(found) => Err(Error::NotReplaceable { path: path(), found }),
        None if !overwrite => Err(Error::Exists { path: path() }),
        // Elsewhere the rights of the folder decide, and those of the file do not matter.
        None if cfg!(windows) && meta.permissions().readonly() => {
            Err(Error::NotReplaceable { path: path(), found: "a file that may only be read" })
        }
        None => Ok(()),
    }
}

/// Why no file can be written under this name; `None` where one can.
///
/// Windows has names of its own making: those of devices in every folder, with any extension; a dot or a space at the
/// end, which it drops; and a colon, behind which it hides a second content of the file before it.
fn unusable_name(path: &Path, windows: bool) -> Option<&'static str> {
    let Some(name) = path.file_name() else { return Some("no name of a file") };
    if path.as_os_str().as_encoded_bytes().last().is_some_and(|&byte| std::path::is_separator(byte.into())) {
        return Some("the name of a folder");
    }
    let verbatim =
        matches!(path.components().next(), Some(Component::Prefix(prefix)) if prefix.kind().is_verbatim());
    if !windows || verbatim {
        return None;
    }
    let name = name.to_string_lossy();
    if is_device(&name) {
        Some(DEVICE)
    } else if name.contains(':') {
        Some("a name with a colon, which Windows does not give to a file")
    } else if name.ends_with(['.', ' ']) {
        Some("a name with a dot or a space at its end, which Windows drops")
    } else {
        None
    }
}

/// What a name of [`is_device`] stands for.
const DEVICE: &str = "the name of a device of Windows";

/// `NUL`, `con.txt`, `COM1`: names that mean a device in every folder.
fn is_device(name: &str) -> bool {
    let stem = name.split(['.', ':']).next().unwrap_or(name).trim_end().to_ascii_uppercase();
    match stem.as_str() {
        "CON" | "PRN" | "AUX" | "NUL" | "CONIN$" | "CONOUT$" => true,
        _ => stem.strip_prefix("COM").or_else(|| stem.strip_prefix("LPT")).is_some_and(|port| {
            matches!(port, "¹" | "²" | "³") || (port.len() == 1 && port.as_bytes()[0].is_ascii_digit())
        }),
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

/// What is at `path` by its name alone, where Windows has a device of that name.
pub(crate) fn device_at(path: &Path) -> Option<&'static str> {
    let name = path.file_name().filter(|_| cfg!(windows))?.to_string_lossy();
    (is_device(&name) && !path.is_file()).then_some(DEVICE)
}

/// Renames the finished `part` to `path`. Programs that look at every new file keep it from being renamed for a
/// moment on Windows, so that a refusal is only believed when it lasts.
///
/// # Errors
/// [`Error::InUse`] when another program holds one of the two; [`Error::Io`].
pub(crate) fn rename(part: &Path, path: &Path) -> Result<(), Error> {
    const PAUSE: Duration = Duration::from_millis(100);
    let mut attempts = if cfg!(windows) { 15 } else { 1 };
    loop {
        let Err(cause) = std::fs::rename(part, path) else { return Ok(()) };
        attempts -= 1;
        if !is_held(&cause) {
            return Err(Error::io("rename the .part file to", path)(cause));
        }
        if attempts == 0 {
            return Err(Error::InUse { path: path.to_owned(), part: part.to_owned(), cause });
        }
        std::thread::sleep(PAUSE);
    }
}

/// Whether an error of Windows says that someone has the file open or mapped: access denied, a sharing violation, a
/// lock, a section that is mapped.
fn is_held(error: &std::io::Error) -> bool {
    cfg!(windows) && matches!(error.raw_os_error(), Some(5 | 32 | 33 | 1224))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_no_file_can_have() {
        let check = |name: &str, everywhere: bool, windows: bool| {
            let path = Path::new(name);
            let found = (unusable_name(path, false).is_none(), unusable_name(path, true).is_none());
            assert_eq!(found, (everywhere, windows), "{name:?}");
        };
        for name in [
            "m.samara",
            "a/модель é.samara",
            "null",
            "console.samara",
            "COM10",
            "lpt",
            ".nul",
            "a.nul",
            "COMA",
        ] {
            check(name, true, true);
        }
        for name in
            ["NUL", "nul.samara", "a/Con", "aux.tar.gz", "COM1", "lpt9.x", "com²", "NUL .txt", "CONOUT$"]
        {
            check(name, true, false);
        }
        for name in ["m.samara.", "m ", "a/b.samara:stream", "..."] {
            check(name, true, false);
        }
        for name in ["", "..", "/", "new/", "a/.."] {
            check(name, false, false);
        }
        #[cfg(windows)]
        {
            check("C:m.samara", true, true);
            check("C:", false, false);
            check("new\\", false, false);
            check("C:\\a\\NUL", true, false);
            check("\\\\server\\share\\m.samara", true, true);
            // Such a path is taken as it is.
            check("\\\\?\\C:\\a\\m.", true, true);
        }
    }
}
