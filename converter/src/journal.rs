//! The journal of an unfinished conversion: which tensors are on the disk, and of which conversion.
//!
//! One JSON object a line. The first line binds the journal to the plan, the options and the hash of every source
//! file; each further line is one finished tensor, written only after its bytes were synced. A line cut by a power
//! cut or a kill is no line. Resuming with anything changed is refused with the reason.
//!
//! The journal's file is also the lock on the output: it is there before the unfinished file and goes after that has
//! its final name, and the system drops the lock of a process that was killed.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::options::BoundOptions;
use crate::ternary::Counts;

/// Version of the journal's own form.
const VERSION: u32 = 1;

/// How every journal begins; the first field of [`Binding`].
const START: &[u8] = br#"{"samara_journal":"#;
/// How often a journal that was just removed by its owner is looked for again.
const ATTEMPTS: usize = 16;

/// What a journal binds to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Binding {
    samara_journal: u32,
    /// Digest of the planned file.
    plan: String,
    options: BoundOptions,
    sources: Vec<SourceHash>,
}

/// One source file's name and xxh3-128, hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SourceHash {
    name: String,
    hash: String,
}

/// One tensor that is on the disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) tensor: String,
    /// xxh3-128 of its bytes, hexadecimal.
    hash: String,
    pub(crate) counts: Counts,
}

impl Entry {
    pub(crate) fn new(tensor: &str, hash: u128, counts: Counts) -> Self {
        Self { tensor: tensor.to_owned(), hash: format!("{hash:032x}"), counts }
    }

    /// The hash, if it is one.
    pub(crate) fn hash(&self) -> Option<u128> {
        u128::from_str_radix(&self.hash, 16).ok()
    }
}

impl Binding {
    pub(crate) fn new<'a>(
        plan: u128,
        options: &BoundOptions,
        sources: impl Iterator<Item = (&'a str, u128)>,
    ) -> Self {
        let sources =
            sources.map(|(name, hash)| SourceHash { name: name.to_owned(), hash: format!("{hash:032x}") });
        Self {
            samara_journal: VERSION,
            plan: format!("{plan:032x}"),
            options: options.clone(),
            sources: sources.collect(),
        }
    }

    /// Why a journal bound to `self` cannot continue under `now`; `None` if it can.
    fn stale(&self, now: &Self) -> Option<String> {
        let changed = |(old, new): (&SourceHash, &SourceHash)| (old != new).then(|| new.name.clone());
        let changed: Vec<String> = self.sources.iter().zip(&now.sources).filter_map(changed).collect();
        let options = self.options.differences(&now.options);
        if self.samara_journal != now.samara_journal {
            Some("it was begun by another version of samara".to_owned())
        } else if !changed.is_empty() {
            Some(format!("the source changed since it was begun: {}", changed.join(", ")))
        } else if self.sources.len() != now.sources.len() {
            Some("the source has other files than when it was begun".to_owned())
        } else if !options.is_empty() {
            Some(format!("it was begun with another {}", options.join(", ")))
        } else {
            (self.plan != now.plan)
                .then(|| "its plan is another one, perhaps of another version of samara".to_owned())
        }
    }
}

/// An open journal, locked by this process. One that is still empty when it is dropped is removed.
#[derive(Debug)]
pub(crate) struct Journal {
    part: PathBuf,
    path: PathBuf,
    file: File,
}

/// The journal's path beside the unfinished file `part`.
pub(crate) fn journal_path(part: &Path) -> PathBuf {
    let mut name = part.as_os_str().to_owned();
    name.push(".journal");
    name.into()
}

impl Journal {
    /// Opens the journal of `part`, a new one if there is none, and locks it.
    ///
    /// # Errors
    /// [`Error::Busy`] when another conversion holds the lock, [`Error::ForeignJournal`] when the file is no journal.
    pub(crate) fn lock(part: &Path) -> Result<Self, Error> {
        for _ in 0..ATTEMPTS {
            if let Some(journal) = Self::open(part, true)? {
                return Ok(journal);
            }
        }
        Err(Error::Busy { path: part.to_owned() })
    }

    /// The journal of `part`, locked, if there is one. Errors as from [`Self::lock`].
    pub(crate) fn find(part: &Path) -> Result<Option<Self>, Error> {
        Self::open(part, false)
    }

    /// `None` if there is no journal (any more).
    fn open(part: &Path, create: bool) -> Result<Option<Self>, Error> {
        let path = journal_path(part);
        match path.symlink_metadata() {
            Ok(meta) if !meta.is_file() => return Err(Error::ForeignJournal { path }),
            Err(error) if error.kind() == ErrorKind::NotFound && !create => return Ok(None),
            _ => {}
        }
        let opened = OpenOptions::new().read(true).write(true).create(create).truncate(false).open(&path);
        let file = match opened {
            Err(error) if error.kind() == ErrorKind::NotFound && !create => return Ok(None),
            opened => opened.map_err(Error::io("open", &path))?,
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(Error::Busy { path: part.to_owned() }),
            // Some network file systems have no locks; a conversion is possible there, only not protected.
            Err(TryLockError::Error(error)) if no_locks(&error) => {}
            Err(TryLockError::Error(error)) => return Err(Error::io("lock", &path)(error)),
        }
        if !is_at(&file, &path).map_err(Error::io("look at", &path))? {
            return Ok(None);
        }
        let mut journal = Self { part: part.to_owned(), path, file };
        let text = journal.text()?;
        let start = &text[..text.len().min(START.len())];
        if START.starts_with(start) {
            Ok(Some(journal))
        } else {
            Err(Error::ForeignJournal { path: journal.path.clone() })
        }
    }

    fn text(&mut self) -> Result<Vec<u8>, Error> {
        let mut text = Vec::new();
        let read = self.file.rewind().and_then(|()| self.file.read_to_end(&mut text));
        read.map(|_| text).map_err(Error::io("read", &self.path))
    }

    /// Forgets what is in the journal.
    pub(crate) fn clear(&mut self) -> Result<(), Error> {
        let cleared = self.file.set_len(0).and_then(|()| self.file.rewind());
        cleared.map_err(Error::io("cut", &self.path))
    }

    /// Begins an empty journal.
    pub(crate) fn start(&mut self, binding: &Binding) -> Result<(), Error> {
        self.write(&[line(binding)])
    }

    /// Reads the journal to continue it. Returns the tensors that are done; `None` if it is empty or was cut before
    /// its first line ended.
    pub(crate) fn resume(&mut self, binding: &Binding) -> Result<Option<Vec<Entry>>, Error> {
        let text = self.text()?;
        let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        let mut lines =
            text[..whole].split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).enumerate();
        let Some((_, first)) = lines.next() else { return Ok(None) };
        let damaged = |line: usize, reason: String| Error::JournalDamaged {
            path: self.path.clone(),
            line: line + 1,
            reason,
        };
        let begun: Binding = serde_json::from_slice(first).map_err(|error| damaged(0, error.to_string()))?;
        if let Some(reason) = begun.stale(binding) {
            return Err(Error::StaleJournal { part: self.part.clone(), reason });
        }
        let mut entries = Vec::new();
        for (i, line) in lines {
            let entry: Entry = serde_json::from_slice(line).map_err(|error| damaged(i, error.to_string()))?;
            if entry.hash().is_none() {
                return Err(damaged(i, format!("{} is not a hash", entry.hash)));
            }
            entries.push(entry);
        }
        self.file.set_len(whole as u64).map_err(Error::io("cut", &self.path))?;
        self.file.seek(SeekFrom::End(0)).map_err(Error::io("open", &self.path))?;
        Ok(Some(entries))
    }

    /// Adds tensors whose bytes are on the disk.
    pub(crate) fn append(&mut self, entries: &[Entry]) -> Result<(), Error> {
        let lines: Vec<Vec<u8>> = entries.iter().map(line).collect();
        self.write(&lines)
    }

    fn write(&mut self, lines: &[Vec<u8>]) -> Result<(), Error> {
        let written = self.file.write_all(&lines.concat()).and_then(|()| self.file.sync_data());
        written.map_err(Error::io("write", &self.path))
    }

    /// Removes the journal: the conversion is finished.
    pub(crate) fn remove(self) -> Result<(), Error> {
        // Before the lock is gone, so that nobody begins with a journal that is about to vanish.
        std::fs::remove_file(&self.path).map_err(Error::io("remove", &self.path))
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        let empty = self.file.metadata().is_ok_and(|meta| meta.len() == 0);
        if empty && is_at(&self.file, &self.path).unwrap_or(false) {
            // An empty journal that stays does no harm.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Whether `path` still names the open `file`. Its former owner removes a journal before it gives up the lock, and
/// whoever waited for the lock then holds that of a file without a name.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> std::io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let held = file.metadata()?;
    match path.symlink_metadata() {
        Ok(named) => Ok((named.dev(), named.ino()) == (held.dev(), held.ino())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// On Windows the drive and the number of the file on it.
#[cfg(windows)]
fn is_at(file: &File, path: &Path) -> std::io::Result<bool> {
    let identity = |file: &File| {
        let found = winapi_util::file::information(file);
        found.map(|found| (found.volume_serial_number(), found.file_index()))
    };
    match File::open(path) {
        Ok(named) => Ok(identity(&named)? == identity(file)?),
        // A file that was removed while it was open keeps its name for a moment and refuses to be opened.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether an error of locking says that this file system has no locks. Windows has three ways to say so: a function
/// that is invalid, a request that is not supported, a call that is not there. A network drive of Linux has no locks left.
fn no_locks(error: &std::io::Error) -> bool {
    let code = error.raw_os_error();
    error.kind() == ErrorKind::Unsupported
        || (cfg!(windows) && matches!(code, Some(1 | 50)))
        || (cfg!(target_os = "linux") && code == Some(37))
}

fn line<T: Serialize>(value: &T) -> Vec<u8> {
    let mut line = serde_json::to_vec(value).expect("plain structs of strings and numbers");
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;

    fn binding(plan: u128, window: Option<u64>, sources: &[(&str, u128)]) -> Binding {
        let options = Options { window, ..Options::default() };
        Binding::new(plan, &(&options).into(), sources.iter().copied())
    }

    /// A journal with its first line and `entries`, given up again.
    fn begun(part: &Path, binding: &Binding, entries: &[Entry]) {
        let mut journal = Journal::lock(part).unwrap();
        journal.start(binding).unwrap();
        journal.append(entries).unwrap();
    }

    fn resume(part: &Path, binding: &Binding) -> Result<Option<Vec<Entry>>, Error> {
        Journal::lock(part).unwrap().resume(binding)
    }

    #[test]
    fn a_cut_line_is_no_line_and_whole_ones_survive() {
        let dir = tempfile::tempdir().unwrap();
        let part = dir.path().join("m.part");
        let bound = binding(1, None, &[("a", 2)]);
        let entries = [Entry::new("x", 3, Counts::default()), Entry::new("y", 4, Counts::default())];
        begun(&part, &bound, &entries);
        let path = journal_path(&part);
        let whole = std::fs::read(&path).unwrap();
        let ends: Vec<usize> = (0..whole.len()).filter(|&i| whole[i] == b'\n').map(|i| i + 1).collect();
        for cut in 0..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let done = resume(&part, &bound).unwrap();
            let n_lines = ends.iter().filter(|&&end| end <= cut).count();
            assert_eq!(done, n_lines.checked_sub(1).map(|n| entries[..n].to_vec()), "cut at {cut}");
        }
    }

    #[test]
    fn a_journal_of_something_else_says_what_changed() {
        let check = |now: Binding, wanted: Option<&str>| {
            let dir = tempfile::tempdir().unwrap();
            let part = dir.path().join("m.part");
            begun(&part, &binding(1, None, &[("a", 2), ("b", 3)]), &[]);
            match (resume(&part, &now), wanted) {
                (Ok(Some(_)), None) => {}
                (Err(Error::StaleJournal { reason, .. }), Some(wanted)) => {
                    assert!(reason.contains(wanted), "{reason}")
                }
                (other, wanted) => panic!("{other:?}, wanted {wanted:?}"),
            }
        };
        check(binding(1, None, &[("a", 2), ("b", 3)]), None);
        check(binding(1, None, &[("a", 2), ("b", 4)]), Some("changed since it was begun: b"));
        check(binding(1, None, &[("a", 2)]), Some("other files"));
        check(binding(1, Some(17), &[("a", 2), ("b", 3)]), Some("another window"));
        check(binding(2, None, &[("a", 2), ("b", 3)]), Some("plan"));
    }

    #[test]
    fn nonsense_in_the_middle_is_named_by_line() {
        let dir = tempfile::tempdir().unwrap();
        let part = dir.path().join("m.part");
        let bound = binding(1, None, &[]);
        begun(&part, &bound, &[Entry::new("x", 3, Counts::default())]);
        let path = journal_path(&part);
        let mut text = std::fs::read(&path).unwrap();
        text.extend(b"nonsense\n");
        std::fs::write(&path, text).unwrap();
        assert!(matches!(resume(&part, &bound), Err(Error::JournalDamaged { line: 3, .. })));
    }

    #[test]
    fn a_journal_has_one_owner_and_an_empty_one_goes_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let part = dir.path().join("m.part");
        assert!(Journal::find(&part).unwrap().is_none());
        let mut first = Journal::lock(&part).unwrap();
        for other in [Journal::lock(&part).map(drop), Journal::find(&part).map(drop)] {
            assert!(matches!(&other, Err(Error::Busy { path }) if *path == part), "{other:?}");
        }
        drop(first);
        assert!(!journal_path(&part).exists());
        first = Journal::lock(&part).unwrap();
        first.start(&binding(1, None, &[])).unwrap();
        drop(first);
        assert!(Journal::find(&part).unwrap().is_some() && journal_path(&part).exists());
        Journal::lock(&part).unwrap().remove().unwrap();
        assert!(!journal_path(&part).exists());
    }

    #[test]
    fn only_a_file_system_without_locks_is_done_without() {
        let raw = std::io::Error::from_raw_os_error;
        assert!(no_locks(&ErrorKind::Unsupported.into()));
        assert!(!no_locks(&ErrorKind::PermissionDenied.into()));
        for (code, windows) in [(1, true), (50, true), (120, true), (5, false), (33, false)] {
            assert!(!cfg!(windows) || no_locks(&raw(code)) == windows, "{code}");
        }
        for (code, linux) in [(37, true), (11, false), (13, false)] {
            assert!(!cfg!(target_os = "linux") || no_locks(&raw(code)) == linux, "{code}");
        }
    }

    #[test]
    fn a_journal_that_lost_its_name_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let part = dir.path().join("m.part");
        let owner = Journal::lock(&part).unwrap();
        let (path, file) = (&owner.path, &owner.file);
        assert!(is_at(file, path).unwrap());
        std::fs::rename(path, dir.path().join("elsewhere")).unwrap();
        assert!(!is_at(file, path).unwrap());
        std::fs::write(path, "").unwrap();
        assert!(!is_at(file, path).unwrap());
    }
}
