//! Running other programs from the workspace's root.

use anyhow::{Context, Result, ensure};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The workspace's root.
pub(crate) fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    root.expect("xtask lies two folders below the workspace's root").to_owned()
}

/// The cargo that runs this program, at the workspace's root.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(root());
    command
}

/// Where cargo keeps the sources of crates.
pub(crate) fn cargo_home() -> PathBuf {
    let home = || std::env::home_dir().unwrap_or_default().join(".cargo");
    std::env::var_os("CARGO_HOME").map_or_else(home, PathBuf::from)
}

/// Runs `command`, whose output goes where this program's goes.
///
/// # Errors
/// If it cannot be started or ends with anything but success.
pub(crate) fn succeed(mut command: Command) -> Result<()> {
    let status = command.status().with_context(|| shown(&command))?;
    ensure!(status.success(), "{} ended with {status}", shown(&command));
    Ok(())
}

/// Runs `command` and returns what it wrote to standard output.
///
/// # Errors
/// If it cannot be started, ends with anything but success, or wrote something that is not text.
pub(crate) fn output(mut command: Command) -> Result<String> {
    let output = command.stderr(Stdio::inherit()).output().with_context(|| shown(&command))?;
    ensure!(output.status.success(), "{} ended with {}", shown(&command), output.status);
    String::from_utf8(output.stdout)
        .with_context(|| format!("{} wrote something that is not text", shown(&command)))
}

/// Whether `program --version` can be run.
pub(crate) fn answers(program: impl AsRef<OsStr>) -> bool {
    let quiet = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet.is_ok_and(|status| status.success())
}

/// The program's file name and its arguments, for messages.
pub(crate) fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let args = command.get_args().map(|a| a.to_string_lossy().into_owned());
    std::iter::once(program.to_string_lossy().into_owned()).chain(args).collect::<Vec<_>>().join(" ")
}
