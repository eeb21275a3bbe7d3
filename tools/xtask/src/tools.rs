//! The programs that checks and builds need and that are not part of a Rust toolchain. Each is the one on the PATH or a pinned
//! version put under `target/tools`; nothing else of the machine is changed.

use crate::process::{answers, cargo, root, succeed};
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::process::Command;

/// Unoptimised, because building it is most of what the step costs.
const CARGO_DENY: &str = "0.20.2";

/// Ready binaries from PyPI. The linker's version decides the bytes of a release, so these are always the pinned ones.
const PYTHON: [&str; 3] = ["cargo-zigbuild==0.24.1", "ziglang==0.17.1", "typos==1.52.0"];

pub(crate) fn folder() -> PathBuf {
    root().join("target").join("tools")
}

/// The cargo-deny on the PATH, or one that is built on first use.
pub(crate) fn cargo_deny() -> Result<PathBuf> {
    if answers("cargo-deny") {
        return Ok("cargo-deny".into());
    }
    let binary = folder().join("bin").join(format!("cargo-deny{}", std::env::consts::EXE_SUFFIX));
    if !binary.exists() {
        println!("installing cargo-deny {CARGO_DENY} into target/tools");
        let mut command =
            cargo(&["install", "cargo-deny", "--locked", "--debug", "--version", CARGO_DENY, "--root"]);
        command.arg(folder()).env("CARGO_PROFILE_DEV_DEBUG", "0");
        succeed(command).context("cargo-deny is not installed and could not be")?;
    }
    Ok(binary)
}

/// A program of one of the pinned Python packages, such as `bin/typos`.
///
/// # Errors
/// If it is not there and pip cannot install it.
pub(crate) fn python(program: &str) -> Result<PathBuf> {
    let folder = folder().join("python");
    let installed = folder.join("installed");
    if std::fs::read_to_string(&installed).is_ok_and(|list| list == PYTHON.join("\n")) {
        return Ok(folder.join(program));
    }
    println!("installing {} into target/tools/python", PYTHON.join(", "));
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", "--target"]);
    pip.arg(&folder).args(PYTHON);
    succeed(pip)
        .context("python3 with pip, which brings the linker of release builds and the spelling check")?;
    std::fs::write(&installed, PYTHON.join("\n"))?;
    let path = folder.join(program);
    ensure!(path.exists(), "{} is missing though pip installed its package", path.display());
    Ok(path)
}
