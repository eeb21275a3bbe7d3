//! The standard library of a target other than this machine's.
//!
//! rustup has it for whoever reaches its server. Elsewhere it is built from its sources, which Debian packages: the same sources of
//! the same version, laid out under `target/sysroot` for rustc's `--sysroot`.

use crate::debian::Debian;
use crate::process::{answers, cargo, output, root, succeed};
use crate::target::{Link, Target};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The `--sysroot` to compile for `target` with, or `None` if the toolchain's own will do.
///
/// # Errors
/// If the library is neither installed nor can be fetched or built.
pub(crate) fn find_or_make(target: &Target) -> Result<Option<PathBuf>> {
    let toolchain = toolchain()?;
    let library = |sysroot: &Path| sysroot.join("lib/rustlib").join(target.triple).join("lib");
    if library(&toolchain).exists() {
        return Ok(None);
    }
    let made = root().join("target/sysroot").join(version()?);
    if library(&made).exists() {
        return Ok(Some(made));
    }
    if answers("rustup") {
        println!("rustup target add {}", target.triple);
        let mut rustup = Command::new("rustup");
        rustup.args(["target", "add", target.triple]);
        if succeed(rustup).is_ok() {
            return Ok(None);
        }
    }
    fs::create_dir_all(&made)?;
    let source = source(&toolchain, &made)?;
    println!("building the standard library of {} from {}", target.triple, source.display());
    let folder = tempfile::tempdir_in(&made)?;
    build(target, &source, folder.path(), &library(&made))
        .with_context(|| format!("the standard library of {}: try rustup target add", target.triple))?;
    Ok(Some(made))
}

/// The folder of the toolchain that builds.
///
/// # Errors
/// If rustc does not say.
pub(crate) fn toolchain() -> Result<PathBuf> {
    Ok(PathBuf::from(output(rustc(&["--print", "sysroot"]))?.trim_end()))
}

fn rustc(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    command.args(args);
    command
}

/// The compiler's version, such as `1.95.0`.
fn version() -> Result<String> {
    fact("release")
}

/// What `rustc -vV` says of `name`.
fn fact(name: &str) -> Result<String> {
    let text = output(rustc(&["-vV"]))?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
    Ok(value.with_context(|| format!("rustc -vV does not say its {name}"))?.to_owned())
}

/// Where rustc finds the sources of its library if the component rust-src is installed, and what it calls that place if not.
///
/// # Errors
/// If rustc does not say.
pub(crate) fn source_names() -> Result<(PathBuf, String)> {
    Ok((toolchain()?.join("lib/rustlib/src/rust"), format!("/rustc/{}", fact("commit-hash")?)))
}

/// The folder `library` of Rust's sources: the component rust-src, or Debian's package.
fn source(toolchain: &Path, made: &Path) -> Result<PathBuf> {
    let component = toolchain.join("lib/rustlib/src/rust/library");
    let fetched = made.join("source/library");
    if component.exists() {
        return Ok(component);
    }
    if !fetched.exists() {
        fetch_source(&version()?, made)?;
    }
    Ok(fetched)
}

/// Takes the sources out of Debian's package.
fn fetch_source(version: &str, made: &Path) -> Result<()> {
    const SUITES: [&str; 3] = ["trixie-backports", "testing", "unstable"];
    let debian = Debian::new(made, "amd64", &SUITES).context("rust-src, from rustup or from Debian")?;
    let versions = debian.versions("rust-src")?;
    let wanted = versions.iter().find(|v| v.starts_with(&format!("{version}+"))).with_context(|| {
        format!("Debian has no rust-src {version} in {}, only {}", SUITES.join(", "), versions.join(", "))
    })?;
    let unpacked = tempfile::tempdir_in(made)?;
    debian.unpack(&[&format!("rust-src={wanted}")], unpacked.path())?;
    let library = unpacked.path().join("usr/src").join(format!("rustc-{version}/library"));
    fs::create_dir_all(made.join("source"))?;
    fs::rename(&library, made.join("source/library"))
        .with_context(|| format!("{} is not in the package", library.display()))
}

/// Builds the library as a dependency of an empty crate in `folder`, each crate as one unit, as those that rustup has, then moves it
/// under its final name `library`.
fn build(target: &Target, source: &Path, folder: &Path, library: &Path) -> Result<()> {
    fs::write(
        folder.join("Cargo.toml"),
        "[package]\nname = \"empty\"\nedition = \"2024\"\n[lib]\npath = \"lib.rs\"\n[workspace]\n[profile.release]\ndebug = 0\ncodegen-units = 1\n",
    )?;
    fs::write(folder.join("lib.rs"), "")?;
    // As in the library that rustup has.
    let remap = format!("--remap-path-prefix={}={}/library", source.display(), source_names()?.1);
    // To check code, metadata are enough.
    let (what, extension) = if target.link == Link::No { ("check", "rmeta") } else { ("build", "rlib") };
    let mut cargo = cargo(&[what, "--quiet", "--release", "--target", target.triple]);
    cargo
        .args(["-Zbuild-std=std,panic_unwind,proc_macro,test", "-Zbuild-std-features=panic-unwind,backtrace"])
        .current_dir(folder)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("__CARGO_TESTS_ONLY_SRC_ROOT", source)
        .env("CARGO_TARGET_DIR", folder.join("target"))
        .env("CARGO_ENCODED_RUSTFLAGS", ["-Cforce-unwind-tables=yes", &remap].join("\u{1f}"));
    succeed(cargo)?;
    let made = folder.join("lib");
    fs::create_dir(&made)?;
    for entry in fs::read_dir(folder.join("target").join(target.triple).join("release/deps"))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default();
        if path.extension().is_some_and(|e| e == extension)
            && !name.to_string_lossy().starts_with("libempty-")
        {
            fs::copy(&path, made.join(name))?;
        }
    }
    if target.link == Link::Mingw {
        for object in ["rsbegin", "rsend"] {
            let mut rustc = rustc(&["--target", target.triple, "--emit=obj", "-o"]);
            rustc.arg(made.join(format!("{object}.o"))).env("RUSTC_BOOTSTRAP", "1");
            rustc.arg(source.join("rtstartup").join(format!("{object}.rs")));
            succeed(rustc)?;
        }
    }
    ensure!(fs::read_dir(&made)?.next().is_some(), "the build left nothing in {}", made.display());
    fs::create_dir_all(library.parent().context("no folder for the library")?)?;
    Ok(fs::rename(&made, library)?)
}
