//! The platforms, and how to build for one of them from Linux so that the bytes depend on the source alone.
//!
//! Linux binaries are linked by zig against the symbols of glibc 2.28, whatever this machine's glibc is, and dynamically: a static
//! binary could not load a Vulkan driver. Windows binaries are linked by mingw.

use crate::process::{answers, cargo, cargo_home, root};
use crate::sysroot;
use crate::tools::{self, ZIGBUILD};
use anyhow::{Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest C library that Linux releases run on: that of Debian 10, Ubuntu 18.10 and RHEL 8.
pub(crate) const GLIBC: &str = "2.28";

/// How code becomes a program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Link {
    /// By zig, against an old glibc.
    Zig,
    Mingw,
    /// Not at all: there is no linker for it here, so the code is only checked.
    No,
}

/// A platform that something is known about.
pub(crate) struct Target {
    /// As in README's table and in the names of archives.
    pub(crate) name: &'static str,
    pub(crate) triple: &'static str,
    pub(crate) link: Link,
}

pub(crate) const LINUX_X86_64: Target =
    Target { name: "linux-x86_64", triple: "x86_64-unknown-linux-gnu", link: Link::Zig };
pub(crate) const LINUX_AARCH64: Target =
    Target { name: "linux-aarch64", triple: "aarch64-unknown-linux-gnu", link: Link::Zig };
pub(crate) const WINDOWS_X86_64: Target =
    Target { name: "windows-x86_64", triple: "x86_64-pc-windows-gnu", link: Link::Mingw };
pub(crate) const MACOS_AARCH64: Target =
    Target { name: "macos-aarch64", triple: "aarch64-apple-darwin", link: Link::No };

/// Those that releases are made for.
pub(crate) const SHIPPED: [&Target; 3] = [&LINUX_X86_64, &LINUX_AARCH64, &WINDOWS_X86_64];

/// This machine, named as a platform is.
pub(crate) fn here() -> String {
    format!("{}-{}", std::env::consts::OS, std::env::consts::ARCH)
}

/// A tree to build and where to put what is built.
pub(crate) struct Place {
    pub(crate) root: PathBuf,
    pub(crate) target_dir: PathBuf,
}

impl Place {
    /// This tree, and `target` in it.
    pub(crate) fn here() -> Place {
        Place { root: root(), target_dir: root().join("target") }
    }
}

impl Target {
    /// `cargo SUBCOMMAND` for this target in the release profile, to which the caller adds arguments. Build scripts and macros are this
    /// machine's and built once for all targets.
    ///
    /// # Errors
    /// If the linker or the target's standard library is not here and cannot be had; says what to install.
    pub(crate) fn cargo(&self, subcommand: &str, place: &Place) -> Result<Command> {
        let sysroot = sysroot::find_or_make(self)?;
        let mut command = match self.link {
            Link::Zig if self.name == here() => self.zig_here(subcommand)?,
            Link::Zig => zigbuild(subcommand, &format!("{}.{GLIBC}", self.triple))?,
            // To check code nothing of C is needed, but it would be compiled: by programs that do nothing, in no SDK.
            Link::No => {
                ensure!(answers("true"), "there is no program called true");
                let mut command = cargo(&[subcommand, "--target", self.triple]);
                for tool in ["CC", "AR"] {
                    command.env(format!("{tool}_{}", self.triple.replace('-', "_")), "true");
                }
                command.env("SDKROOT", "/");
                command
            }
            Link::Mingw => {
                const LINKER: &str = "x86_64-w64-mingw32-gcc";
                ensure!(
                    answers(LINKER),
                    "{LINKER} is not installed (on Debian: apt install gcc-mingw-w64-x86-64-win32)"
                );
                let mut command = cargo(&[subcommand, "--target", self.triple]);
                command.env("CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER", LINKER);
                command
            }
        };
        let flags = self.flags(place, sysroot.as_deref())?.join("\u{1f}");
        // What these say would get into the C code of a release, or around its flags.
        for name in
            ["CFLAGS", "CPPFLAGS", "TARGET_CFLAGS", "RUSTFLAGS", "RUSTC_WRAPPER", "ZSTD_SYS_USE_PKG_CONFIG"]
        {
            command.env_remove(name);
        }
        command
            .args(["--release", "--locked"])
            .current_dir(&place.root)
            .env("CARGO_TARGET_DIR", &place.target_dir)
            .env("CARGO_ENCODED_RUSTFLAGS", flags)
            .env("CARGO_INCREMENTAL", "0")
            // Names of functions are an eighth of the file. Whoever builds for profiling, without xtask, keeps them.
            .env("CARGO_PROFILE_RELEASE_STRIP", "symbols");
        Ok(command)
    }

    /// What zigbuild would do for this machine, but that the linker is one of rustc's flags. As a setting of cargo it is one for scripts and
    /// macros too, which cargo then builds for this target and again for the others.
    fn zig_here(&self, subcommand: &str) -> Result<Command> {
        let mut command = cargo(&[subcommand, "--target", self.triple]);
        for (variable, tool) in [("CC", "cc"), ("AR", "ar")] {
            command.env(format!("{variable}_{}", self.triple.replace('-', "_")), self.zig_script(tool)?);
        }
        zig_environment(&mut command)?;
        Ok(command)
    }

    /// A script that runs zig's `cc` or `ar` for this target as zigbuild's own scripts do.
    fn zig_script(&self, tool: &str) -> Result<PathBuf> {
        let script = tools::folder().join("zig").join(format!("{tool}-{}.sh", self.name));
        let arch = self.triple.split('-').next().unwrap_or_default();
        let options = match tool {
            "cc" => format!("-g -fno-sanitize=all -target {arch}-linux-gnu.{GLIBC} "),
            _ => String::new(),
        };
        let zigbuild = ZIGBUILD.program("bin/cargo-zigbuild")?;
        let text = format!("#!/bin/sh\nexec '{}' zig {tool} -- {options}\"$@\"\n", zigbuild.display());
        if fs::read_to_string(&script).is_ok_and(|written| written == text) {
            return Ok(script);
        }
        fs::create_dir_all(script.with_file_name(""))?;
        fs::write(&script, text)?;
        #[cfg(unix)]
        fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        Ok(script)
    }

    /// What rustc is told so that no path and no time of this machine gets into the program.
    fn flags(&self, place: &Place, sysroot: Option<&Path>) -> Result<Vec<String>> {
        let home = cargo_home();
        let (library, library_name) = sysroot::source_names()?;
        // The last prefix that fits is the one that counts.
        let names: [(&Path, &str); 4] = [
            (&home, "/cargo"),
            (&library, &library_name),
            (&place.root, "/samara"),
            (&place.target_dir, "/target"),
        ];
        let remap = names.map(|(path, name)| format!("--remap-path-prefix={}={name}", path.display()));
        let mut flags = remap.to_vec();
        if let Some(sysroot) = sysroot {
            flags.push(format!("--sysroot={}", sysroot.display()));
        }
        if self.link == Link::Zig && self.name == here() {
            flags.push(format!("-Clinker={}", self.zig_script("cc")?.display()));
        }
        if self.link == Link::Mingw {
            flags.push("-Clink-arg=-Wl,--no-insert-timestamp".to_owned());
        }
        Ok(flags)
    }

    /// Where `cargo build` puts the program.
    pub(crate) fn exe(&self, place: &Place) -> PathBuf {
        let name = if self.link == Link::Mingw { "samara.exe" } else { "samara" };
        place.target_dir.join(self.triple).join("release").join(name)
    }
}

fn zigbuild(subcommand: &str, target: &str) -> Result<Command> {
    let mut command = Command::new(ZIGBUILD.program("bin/cargo-zigbuild")?);
    command.args([subcommand, "--target", target]);
    zig_environment(&mut command)?;
    Ok(command)
}

/// Where zig is, and where it and zigbuild keep what they make.
fn zig_environment(command: &mut Command) -> Result<()> {
    command.env("CARGO_ZIGBUILD_ZIG_PATH", ZIGBUILD.program("ziglang/zig")?);
    for cache in ["CARGO_ZIGBUILD_CACHE_DIR", "ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"] {
        command.env(cache, tools::folder().join("zig"));
    }
    Ok(())
}
