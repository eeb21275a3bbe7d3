//! The journal of an unfinished conversion: which tensors are on the disk, and of which conversion.
//!
//! One JSON object a line. The first line binds the journal to the plan, the options and the hash of every source
//! file; each further line is one finished tensor, written only after its bytes were synced. A line cut by a power
//! cut or a kill is no line. Resuming with anything changed is refused with the reason.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::options::BoundOptions;
use crate::ternary::Counts;

/// Version of the journal's own form.
const VERSION: u32 = 1;

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

/// An open journal, at its end.
#[derive(Debug)]
pub(crate) struct Journal {
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
    /// Starts a journal, replacing any.
    pub(crate) fn create(part: &Path, binding: &Binding) -> Result<Self, Error> {
        let path = journal_path(part);
        let file = File::create(&path).map_err(Error::io("create", &path))?;
        let mut journal = Self { path, file };
        journal.write(&[line(binding)])?;
        Ok(journal)
    }

    /// Opens the journal of `part` to continue it. Returns the tensors that are done; `None` if there is no journal
    /// or it was cut before its first line ended.
    pub(crate) fn resume(part: &Path, binding: &Binding) -> Result<Option<(Self, Vec<Entry>)>, Error> {
        let path = journal_path(part);
        if !path.is_file() {
            return Ok(None);
        }
        let text = std::fs::read(&path).map_err(Error::io("read", &path))?;
        let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        let mut lines =
            text[..whole].split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).enumerate();
        let Some((_, first)) = lines.next() else { return Ok(None) };
        let damaged = |line: usize, reason: String| Error::JournalDamaged {
            path: path.clone(),
            line: line + 1,
            reason,
        };
        let begun: Binding = serde_json::from_slice(first).map_err(|error| damaged(0, error.to_string()))?;
        if let Some(reason) = begun.stale(binding) {
            return Err(Error::StaleJournal { part: part.to_owned(), reason });
        }
        let mut entries = Vec::new();
        for (i, line) in lines {
            let entry: Entry = serde_json::from_slice(line).map_err(|error| damaged(i, error.to_string()))?;
            if entry.hash().is_none() {
                return Err(damaged(i, format!("{} is not a hash", entry.hash)));
            }
            entries.push(entry);
        }
        let mut file = OpenOptions::new().write(true).open(&path).map_err(Error::io("open", &path))?;
        file.set_len(whole as u64).map_err(Error::io("cut", &path))?;
        file.seek(SeekFrom::End(0)).map_err(Error::io("open", &path))?;
        Ok(Some((Self { path, file }, entries)))
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
        let Self { path, file } = self;
        drop(file);
        std::fs::remove_file(&path).map_err(Error::io("remove", &path))
    }
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

    #[test]
    fn a_cut_line_is_no_line_and_whole_ones_survive() {
        let dir = tempfile::tempdir().unwrap();
        let part = dir.path().join("m.part");
        let bound = binding(1, None, &[("a", 2)]);
        let entries = [Entry::new("x", 3, Counts::default()), Entry::new("y", 4, Counts::default())];
        Journal::create(&part, &bound).unwrap().append(&entries).unwrap();
        let path = journal_path(&part);
        let whole = std::fs::read(&path).unwrap();
        let ends: Vec<usize> = (0..whole.len()).filter(|&i| whole[i] == b'\n').map(|i| i + 1).collect();
        for cut in 0..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let resumed = Journal::resume(&part, &bound).unwrap();
            let n_lines = ends.iter().filter(|&&end| end <= cut).count();
            let done = resumed.map(|(_, done)| done);
            assert_eq!(done, n_lines.checked_sub(1).map(|n| entries[..n].to_vec()), "cut at {cut}");
        }
    }

    #[test]
    fn a_journal_of_something_else_says_what_changed() {
        let check = |now: Binding, wanted: Option<&str>| {
            let dir = tempfile::tempdir().unwrap();
            let part = dir.path().join("m.part");
            Journal::create(&part, &binding(1, None, &[("a", 2), ("b", 3)])).unwrap();
            match (Journal::resume(&part, &now), wanted) {
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
        Journal::create(&part, &bound).unwrap().append(&[Entry::new("x", 3, Counts::default())]).unwrap();
        let path = journal_path(&part);
        let mut text = std::fs::read(&path).unwrap();
        text.extend(b"nonsense\n");
        std::fs::write(&path, text).unwrap();
        assert!(matches!(Journal::resume(&part, &bound), Err(Error::JournalDamaged { line: 3, .. })));
    }
}
