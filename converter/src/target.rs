//! Where the output goes: what may be written over, and whether there is room for it.
//!
//! All of this is looked at before the sources are hashed, which takes minutes for a large checkpoint. Nothing is
//! replaced but a regular file that is no part of the source, and nothing is discarded but what a conversion left.

use std::fs::Metadata;
use std::path::{Path, PathBuf};

use samara_format::{check_output, check_part, part_path};

use crate::error::Error;
use crate::journal::{Journal, journal_path};
use crate::options::Options;
use crate::plan::Plan;
use crate::source::SIDE_FILES;

/// Checks whether [`crate::convert()`] could write `out`, without writing anything.
///
/// # Errors
/// What is in the way and may not be replaced, a folder that is not there, too little free space, or
/// [`Error::Busy`] when another conversion is writing `out`.
pub fn check_target(plan: &Plan, out: &Path, options: &Options) -> Result<(), Error> {
    check_name(plan, out, options)?;
    Journal::find(&part_path(out))?;
    check_leftovers(out, options)?;
    check_room(out, plan.summary().output_bytes)
}

/// Refuses an output that would replace what is not to be replaced.
fn check_name(plan: &Plan, out: &Path, options: &Options) -> Result<(), Error> {
    let part = part_path(out);
    let names = [out, &part, &journal_path(&part)].map(|path| (path.to_owned(), real(path)));
    for file in plan.source_names().chain(SIDE_FILES) {
        let Some(real) = real(&plan.summary().source.join(file)) else { continue };
        if let Some((path, _)) = names.iter().find(|(_, name)| name.as_ref() == Some(&real)) {
            return Err(Error::OutputIsSource { path: path.clone(), file: file.to_owned() });
        }
    }
    let folder = folder_of(out);
    if !folder.is_dir() {
        return Err(Error::NoOutputFolder { path: folder.to_owned() });
    }
    Ok(check_output(out, options.force)?)
}

/// The one path of what is at `path`, if something is. Some drives of Windows cannot tell it (those in memory or on a
/// network); there the absolute path is the best there is.
fn real(path: &Path) -> Option<PathBuf> {
    path.canonicalize()
        .or_else(|error| if path.exists() { std::path::absolute(path) } else { Err(error) })
        .ok()
}

/// Refuses to discard what another conversion left, unless the options say what to do with it.
pub(crate) fn check_leftovers(out: &Path, options: &Options) -> Result<(), Error> {
    check_output(out, options.force)?;
    if check_part(out)?.is_some() && !options.resume && !options.force {
        return Err(Error::UnfinishedExists { path: part_path(out) });
    }
    Ok(())
}

/// Compares the free space with what is still missing of a file of `len` bytes.
pub(crate) fn check_room(out: &Path, len: u64) -> Result<(), Error> {
    let there = check_part(out)?.map_or(0, |meta| allocated(&meta));
    check_space(out, folder_of(out), len.saturating_sub(there))
}

/// Compares the free space of `folder` with `needed` bytes for `what`. Not every network drive can tell its free
/// space, and that is no reason to refuse.
pub(crate) fn check_space(what: &Path, folder: &Path, needed: u64) -> Result<(), Error> {
    // The canonical form of a path has no limit of length on Windows.
    let canonical = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let Ok(available) = fs4::available_space(canonical) else { return Ok(()) };
    if available < needed {
        return Err(Error::DiskSpace { path: what.to_owned(), needed, available });
    }
    Ok(())
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Bytes of disk that a file takes: an unfinished one has its full length from the start, but not on the disk.
#[cfg(unix)]
fn allocated(meta: &Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(meta).saturating_mul(512)
}

/// Windows gives a file its disk space when it gets its length.
#[cfg(not(unix))]
fn allocated(meta: &Metadata) -> u64 {
    meta.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_space_is_refused_with_both_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("m.samara");
        check_room(&out, 1).unwrap();
        check_room(Path::new("m.samara"), 1).unwrap();
        let error = check_room(&out, u64::MAX).unwrap_err();
        let Error::DiskSpace { needed: u64::MAX, available, .. } = error else { panic!("{error}") };
        assert!(error.to_string().contains(&format!("{} bytes, {available} are free", u64::MAX)), "{error}");
    }

    #[test]
    fn what_is_on_the_disk_already_is_not_asked_for_again() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("m.samara");
        let needed = || match check_room(&out, u64::MAX).unwrap_err() {
            Error::DiskSpace { needed, .. } => u64::MAX - needed,
            error => panic!("{error}"),
        };
        assert_eq!(needed(), 0);
        std::fs::write(part_path(&out), vec![0; 1 << 20]).unwrap();
        // Windows syncs only what it may write.
        let part = std::fs::File::options().write(true).open(part_path(&out)).unwrap();
        part.sync_all().unwrap();
        assert!((1 << 20..2 << 20).contains(&needed()), "{}", needed());
    }
}
