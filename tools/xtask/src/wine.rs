//! A wine that runs what rustc makes for Windows, with a prefix of its own under `target/wine`.

use crate::process::{root, shown, succeed};
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Rust's standard library imports `ProcessPrng` from this library, and wine has it only from version 8.10 on.
const PRNG: &str = "bcryptprimitives.dll";

const PRNG_SOURCE: &str = "\
#include <windows.h>
BOOLEAN NTAPI SystemFunction036(PVOID buffer, ULONG length);
__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE data, SIZE_T length)
{
    while (length > 0) {
        ULONG part = length < 0x40000000 ? (ULONG)length : 0x40000000;
        if (!SystemFunction036(data, part)) return FALSE;
        data += part;
        length -= part;
    }
    return TRUE;
}
";

/// A running wine server, which ends with this value.
pub(crate) struct Wine {
    pub(crate) program: PathBuf,
    server: PathBuf,
    prefix: PathBuf,
}

impl Wine {
    /// Finds wine, makes its prefix the first time, and starts its server, without which every program would start one.
    ///
    /// # Errors
    /// If no 64-bit wine is installed or its prefix cannot be made.
    pub(crate) fn start() -> Result<Wine> {
        // Debian's package puts nothing on the PATH.
        let find = |names: [&str; 3]| names.map(PathBuf::from).into_iter().find(|path| path.exists());
        let program = find(["/usr/lib/wine/wine64", "/usr/bin/wine64", "/usr/bin/wine"]);
        let server = find(["/usr/lib/wine/wineserver64", "/usr/lib/wine/wineserver", "/usr/bin/wineserver"]);
        let (Some(program), Some(server)) = (program, server) else {
            bail!("wine is not installed (on Debian: apt install wine64)");
        };
        let wine = Wine { program, server, prefix: root().join("target/wine") };
        wine.boot()?;
        Ok(wine)
    }

    /// Has `command`, which starts wine in the end, use the prefix and print no traces.
    pub(crate) fn set_up(&self, command: &mut Command) {
        command.env("WINEPREFIX", &self.prefix).env("WINEDEBUG", "-all");
        // No menus in the user's home, no questions in a window.
        command.env("WINEDLLOVERRIDES", "winemenubuilder.exe=d;mscoree,mshtml=");
        command.env_remove("DISPLAY").env_remove("WAYLAND_DISPLAY");
    }

    fn boot(&self) -> Result<()> {
        let system = self.prefix.join("drive_c/windows/system32");
        let booted = self.prefix.join("booted");
        if self.prefix.exists() && !booted.exists() {
            fs::remove_dir_all(&self.prefix)?;
        }
        fs::create_dir_all(&self.prefix)?;
        self.quietly(&self.server, "--persistent")?;
        // Makes the prefix or brings it up to date. What starts here runs on, and would keep the output of a test open. It also
        // complains about the fonts and displays that a machine for tests lacks.
        self.quietly(&self.program, "wineboot")?;
        ensure!(system.exists(), "wineboot made no {}", system.display());
        if !system.join(PRNG).exists() {
            make_prng(&system)?;
        }
        self.share("c")?;
        self.share("z")?;
        Ok(fs::write(booted, "")?)
    }

    /// Makes a drive what Windows makes of each: a share. To wine the machines of a network are folders.
    fn share(&self, drive: &str) -> Result<()> {
        let devices = self.prefix.join("dosdevices");
        let share = devices.join(format!("unc/localhost/{drive}$"));
        if !share.exists() {
            fs::create_dir_all(share.with_file_name(""))?;
            #[cfg(unix)]
            std::os::unix::fs::symlink(devices.join(format!("{drive}:")), &share)?;
        }
        Ok(())
    }

    /// Ends the server and all programs of the prefix; the next program starts a server. A desktop outlives the programs that it was
    /// made for by a second, and one made without a screen has no GPU for the next program either, whatever screen that has.
    pub(crate) fn stop(&self) -> Command {
        let mut command = Command::new(&self.server);
        command.arg("--kill");
        self.set_up(&mut command);
        command
    }

    fn quietly(&self, program: &Path, argument: &str) -> Result<()> {
        let mut command = Command::new(program);
        command.arg(argument).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.set_up(&mut command);
        command.status().with_context(|| shown(&command))?;
        Ok(())
    }
}

impl Drop for Wine {
    fn drop(&mut self) {
        // A server that is gone already is as good.
        let _ = self.stop().stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}

fn make_prng(system: &Path) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (source, library) = (folder.path().join("prng.c"), folder.path().join(PRNG));
    fs::write(&source, PRNG_SOURCE)?;
    let mut compile = Command::new("x86_64-w64-mingw32-gcc");
    compile.args(["-O2", "-s", "-shared", "-o"]).arg(&library).arg(&source).arg("-ladvapi32");
    succeed(compile)?;
    fs::copy(&library, system.join(PRNG))?;
    Ok(())
}
