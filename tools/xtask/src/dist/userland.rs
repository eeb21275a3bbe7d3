//! An old Linux to run on: the C library of Debian 11 (glibc 2.31), the oldest release on its mirrors, for amd64 or
//! arm64. Only its shared libraries, in `target/userland/ARCH`: enough for `qemu -L`, or for its own dynamic loader.

use crate::debian::Debian;
use crate::process::{answers, output, root};
use crate::target::{Link, Target};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

const RELEASE: &str = "bullseye";
/// What a program may ask the system for, see `linkage`, and what these packages need themselves.
const PACKAGES: [&str; 3] = ["libc6", "libcrypt1", "libgcc-s1"];

/// What `samara demo` answers when nothing is asked.
const SUM: &str = "982";

/// The folder with the libraries for `arch`, `amd64` or `arm64`; fetches them the first time.
///
/// # Errors
/// If they are not here and this is no Debian-like machine that reaches a mirror.
pub(crate) fn userland(arch: &'static str) -> Result<PathBuf> {
    let folder = root().join("target/userland");
    let done = folder.join(arch);
    if done.is_dir() {
        return Ok(done);
    }
    println!("fetching {} of Debian {RELEASE} for {arch}", PACKAGES.join(", "));
    let debian = Debian::new(&folder, arch, &[RELEASE])?;
    let unpacked = tempfile::Builder::new().prefix(arch).tempdir_in(&folder)?;
    debian.unpack(&PACKAGES, unpacked.path())?;
    // A name that is there means that all of it is there.
    std::fs::rename(unpacked.keep(), &done).with_context(|| format!("cannot make {}", done.display()))?;
    Ok(done)
}

/// Runs the demo of a Linux program on the old C library.
///
/// # Errors
/// If it does not run there, or answers wrongly.
pub(super) fn demo(target: &Target, exe: &Path) -> Result<()> {
    ensure!(target.link == Link::Zig, "{} has no old C library to run on", target.name);
    let arch = target.triple.split('-').next().unwrap_or_default();
    let userland = userland(if arch == "aarch64" { "arm64" } else { "amd64" })?;
    let mut command = if arch == std::env::consts::ARCH {
        let loader = loader(&userland, arch);
        only_from(&userland, &output(with(&loader, exe, "--list"))?)?;
        with(&loader, exe, "--inhibit-cache")
    } else {
        let qemu = format!("qemu-{arch}-static");
        ensure!(answers(&qemu), "{qemu} is not installed (on Debian: apt install qemu-user-static)");
        let mut command = Command::new(qemu);
        command.args(["-cpu", "max", "-L"]).arg(&userland).arg(exe);
        // Without a folder of that name the program starts itself again, and that would leave the emulator.
        command.env("XDG_RUNTIME_DIR", "/nonexistent");
        command
    };
    command.arg("demo");
    let answer = output(command).and_then(|answer| right(&answer));
    answer.with_context(|| format!("{} on Debian {RELEASE}", target.name))
}

fn right(answer: &str) -> Result<()> {
    let mut numbers = answer.split(|c: char| !c.is_ascii_digit());
    ensure!(numbers.any(|number| number == SUM), "the demo answers {answer:?}, not {SUM}");
    Ok(())
}

fn loader(userland: &Path, arch: &str) -> PathBuf {
    let name = if arch == "aarch64" { "ld-linux-aarch64.so.1" } else { "ld-linux-x86-64.so.2" };
    userland.join(format!("lib/{arch}-linux-gnu")).join(name)
}

/// `exe` started by `loader`, with the libraries beside it.
fn with(loader: &Path, exe: &Path, option: &str) -> Command {
    let mut command = Command::new(loader);
    command.arg(option).arg("--library-path").arg(loader.with_file_name("")).arg(exe);
    command
}

/// Checks a list of libraries as `ldd` prints it: a program that takes one from this machine proves nothing.
fn only_from(userland: &Path, list: &str) -> Result<()> {
    let found = list.lines().filter_map(|line| line.split("=> ").nth(1));
    ensure!(list.contains("libc.so.6 => "), "it does not say where libc.so.6 is from:\n{list}");
    let foreign: Vec<_> = found.filter(|path| !Path::new(path).starts_with(userland)).collect();
    ensure!(foreign.is_empty(), "not from {}: {}", userland.display(), foreign.join(", "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_answer_is_seen() {
        right("462 + 520: the sum is 982.\n").unwrap();
        for wrong in ["462 + 520 = 983", "9982", ""] {
            assert!(right(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_library_of_this_machine_is_seen() {
        let check = |list: &str| only_from(Path::new("/old"), list);
        assert!(check("").is_err());
        check(
            "\tlinux-vdso.so.1 (0x7f)\n\tlibc.so.6 => /old/lib/libc.so.6 (0x7f)\n\t/old/lib/ld.so (0x7f)\n",
        )
        .unwrap();
        let e = check(
            "\tlibc.so.6 => /old/libc.so.6\n\tlibm.so.6 => /lib/libm.so.6 (0x7f)\n\tlibz.so.1 => not found\n",
        )
        .unwrap_err()
        .to_string();
        assert_eq!(e, "not from /old: /lib/libm.so.6 (0x7f), not found");
    }
}
