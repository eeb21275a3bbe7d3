//! Packages of a Debian release that is not this machine's, or for another processor: fetched and checked by apt, with sources, lists
//! and a cache of their own, and unpacked into a folder. The machine's own packages and settings stay as they are.

use crate::process::{answers, output, succeed};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const MIRROR: &str = "http://deb.debian.org/debian";

pub(crate) struct Debian {
    folder: TempDir,
    arch: &'static str,
}

impl Debian {
    /// Reads the lists of `suites` for `arch` (Debian's name, or `all`), in a temporary folder inside `folder`.
    ///
    /// # Errors
    /// If this is no Debian-like machine or the mirror cannot be reached.
    pub(crate) fn new(folder: &Path, arch: &'static str, suites: &[&str]) -> Result<Debian> {
        ensure!(answers("apt-get") && answers("dpkg-deb"), "this needs apt and dpkg, of Debian and its kin");
        ensure!(
            Path::new(KEYRING).exists(),
            "the keys of Debian's packages are not at {KEYRING} (apt install debian-archive-keyring)"
        );
        fs::create_dir_all(folder)?;
        let folder = tempfile::Builder::new().prefix("apt").tempdir_in(folder)?;
        for name in ["lists/partial", "cache/archives/partial", "state", "parts", "packages"] {
            fs::create_dir_all(folder.path().join(name))?;
        }
        fs::write(folder.path().join("status"), "")?;
        let line = |suite: &&str| format!("deb [signed-by={KEYRING}] {MIRROR} {suite} main\n");
        fs::write(folder.path().join("sources.list"), suites.iter().map(line).collect::<String>())?;
        let debian = Debian { folder, arch };
        succeed(debian.apt("apt-get", &["update", "-qq"]))
            .with_context(|| format!("reading Debian's {} from {MIRROR}", suites.join(", ")))?;
        Ok(debian)
    }

    /// The versions of `package` that the suites have, newest first.
    ///
    /// # Errors
    /// If apt fails.
    pub(crate) fn versions(&self, package: &str) -> Result<Vec<String>> {
        let table = output(self.apt("apt-cache", &["madison", package]))?;
        Ok(table.lines().filter_map(|line| Some(line.split('|').nth(1)?.trim().to_owned())).collect())
    }

    /// Unpacks `packages`, each a name or `name=version`, into `into`, without what they depend on.
    ///
    /// # Errors
    /// If a package cannot be fetched or unpacked.
    pub(crate) fn unpack(&self, packages: &[&str], into: &Path) -> Result<()> {
        let mut download = self.apt("apt-get", &["download", "-qq"]);
        download.args(packages);
        succeed(download)?;
        let mut unpacked = 0;
        for entry in fs::read_dir(self.packages())? {
            let mut unpack = Command::new("dpkg-deb");
            unpack.arg("--extract").arg(entry?.path()).arg(into);
            succeed(unpack)?;
            unpacked += 1;
        }
        ensure!(unpacked == packages.len(), "apt-get fetched {unpacked} of {}", packages.join(", "));
        Ok(())
    }

    fn packages(&self) -> PathBuf {
        self.folder.path().join("packages")
    }

    fn apt(&self, program: &str, args: &[&str]) -> Command {
        let at = |what: &str, name: &str| format!("Dir::{what}={}", self.folder.path().join(name).display());
        let options = [
            at("Etc::SourceList", "sources.list"),
            at("Etc::SourceParts", "parts"),
            at("State", "state"),
            at("State::Lists", "lists"),
            at("State::status", "status"),
            at("Cache", "cache"),
            format!("APT::Architecture={}", self.arch),
            format!("APT::Architectures={}", self.arch),
            // Root may write here; the user that apt would change to may not.
            "APT::Sandbox::User=root".to_owned(),
            "APT::Update::Error-Mode=any".to_owned(),
            "Acquire::Languages=none".to_owned(),
        ];
        let mut command = Command::new(program);
        command.args(options.iter().flat_map(|o| ["-o", o])).args(args).current_dir(self.packages());
        command
    }
}
