//! Archives whose bytes follow from their files alone: entries sorted by name, one owner, one time, two modes, one compressor at one
//! level. Names and bytes come in memory; nothing is taken from a file system, whose orders, owners and times differ.

use anyhow::{Context, Result};
use flate2::write::{DeflateEncoder, GzEncoder};
use flate2::{Compression, GzBuilder};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

/// What an archive holds: path below its top folder, with `/`, to content.
#[derive(Clone, Debug, Default)]
pub(super) struct Files(BTreeMap<String, File>);

#[derive(Clone, Debug)]
struct File {
    bytes: Vec<u8>,
    executable: bool,
}

impl File {
    fn mode(&self) -> u32 {
        if self.executable { 0o755 } else { 0o644 }
    }
}

impl Files {
    pub(super) fn add(&mut self, path: impl Into<String>, bytes: Vec<u8>) {
        self.0.insert(path.into(), File { bytes, executable: false });
    }

    pub(super) fn add_program(&mut self, path: impl Into<String>, bytes: Vec<u8>) {
        self.0.insert(path.into(), File { bytes, executable: true });
    }

    /// Adds every file of `folder`, not of folders below, under `prefix`.
    pub(super) fn add_folder(&mut self, prefix: &str, folder: &Path) -> Result<()> {
        for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            let name = path.file_name().context("an entry without a name")?.to_string_lossy().into_owned();
            self.add(format!("{prefix}/{name}"), read(&path)?);
        }
        Ok(())
    }

    /// Paths and bytes.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.0.iter().map(|(path, file)| (path.as_str(), file.bytes.as_slice()))
    }

    /// The bytes of a `.tar.gz` with everything in the folder `top`; `time` in seconds since 1970.
    pub(super) fn tar_gz(&self, top: &str, time: u64) -> Result<Vec<u8>> {
        let gz: GzEncoder<Vec<u8>> = GzBuilder::new().write(Vec::new(), Compression::best());
        let mut tar = tar::Builder::new(gz);
        for (path, file) in &self.0 {
            let mut header = tar::Header::new_ustar();
            header.set_size(file.bytes.len() as u64);
            header.set_mode(file.mode());
            header.set_mtime(time);
            header.set_uid(0);
            header.set_gid(0);
            tar.append_data(&mut header, format!("{top}/{path}"), file.bytes.as_slice())?;
        }
        Ok(tar.into_inner()?.finish()?)
    }

    /// The bytes of a `.zip` with everything in the folder `top`; `time` in seconds since 1970.
    pub(super) fn zip(&self, top: &str, time: u64) -> Result<Vec<u8>> {
        let time = rawzip::time::UtcDateTime::from_unix(i64::try_from(time)?);
        let mut zip = rawzip::ZipArchiveWriter::new(Vec::new());
        for (path, file) in &self.0 {
            let path = format!("{top}/{path}");
            let entry = zip.new_file(path.as_str()).compression_method(rawzip::CompressionMethod::DEFLATE);
            let (mut entry, config) = entry.last_modified(time).unix_permissions(file.mode()).start()?;
            let mut writer = config.wrap(DeflateEncoder::new(&mut entry, Compression::best()));
            writer.write_all(&file.bytes)?;
            let (deflate, descriptor) = writer.finish()?;
            deflate.finish()?;
            entry.finish(descriptor)?;
        }
        Ok(zip.finish()?)
    }
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes a file that has its name only when it is complete.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    let part = PathBuf::from(part);
    std::fs::write(&part, bytes)
        .and_then(|()| std::fs::rename(&part, path))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// A line of SHA256SUMS, as `sha256sum --check` reads it.
pub(super) fn checksum(name: &str, bytes: &[u8]) -> String {
    let digest: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{digest}  {name}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    /// 2026-01-02 03:04:06 UTC. Even, because zip counts in steps of two seconds.
    const TIME: u64 = 1_767_323_046;

    fn files(order: &[&str]) -> Files {
        let mut files = Files::default();
        for name in order {
            let bytes = name.repeat(100).into_bytes();
            if *name == "samara" { files.add_program(*name, bytes) } else { files.add(*name, bytes) }
        }
        files
    }

    #[test]
    fn the_order_of_adding_does_not_show() {
        let (one, other) =
            (files(&["samara", "man/a.1", "README.md"]), files(&["README.md", "samara", "man/a.1"]));
        assert_eq!(one.tar_gz("top", TIME).unwrap(), other.tar_gz("top", TIME).unwrap());
        assert_eq!(one.zip("top", TIME).unwrap(), other.zip("top", TIME).unwrap());
        assert_ne!(one.tar_gz("top", TIME).unwrap(), one.tar_gz("top", TIME + 2).unwrap());
        assert_ne!(one.zip("top", TIME).unwrap(), one.zip("top", TIME + 2).unwrap());
    }

    #[test]
    fn a_tar_has_one_top_folder_one_owner_and_one_time() {
        let bytes = files(&["samara", "man/a.1"]).tar_gz("top", TIME).unwrap();
        let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(bytes.as_slice()));
        let entries = tar.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            let mut content = String::new();
            entry.read_to_string(&mut content).unwrap();
            let header = entry.header();
            assert_eq!((header.uid().unwrap(), header.gid().unwrap(), header.mtime().unwrap()), (0, 0, TIME));
            (entry.path().unwrap().display().to_string(), header.mode().unwrap(), content)
        });
        let expected =
            [("top/man/a.1", 0o644, "man/a.1".repeat(100)), ("top/samara", 0o755, "samara".repeat(100))];
        assert!(entries.eq(expected.map(|(path, mode, content)| (path.to_owned(), mode, content))));
    }

    #[test]
    fn a_zip_has_one_top_folder_and_one_time() {
        let bytes = files(&["samara.exe", "man/a.1"]).zip("top", TIME).unwrap();
        let zip = rawzip::ZipArchive::from_slice(&bytes).unwrap();
        let mut names = Vec::new();
        for entry in zip.entries() {
            let entry = entry.unwrap();
            let time = entry.last_modified();
            assert_eq!((time.year(), time.month(), time.day(), time.second()), (2026, 1, 2, 6));
            let stored = zip.get_entry(entry.wayfinder()).unwrap();
            let mut reader = stored.verifying_reader(flate2::read::DeflateDecoder::new(stored.data()));
            std::io::copy(&mut reader, &mut std::io::sink()).unwrap();
            names.push(entry.file_path().try_normalize().unwrap().as_ref().to_owned());
        }
        assert_eq!(names, ["top/man/a.1", "top/samara.exe"]);
    }

    #[test]
    fn a_checksum_is_what_sha256sum_prints() {
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  abc.txt\n";
        assert_eq!(checksum("abc.txt", b"abc"), expected);
    }
}
