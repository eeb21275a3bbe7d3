//! Running other programs from the workspace's root.

use anyhow::{Context, Result, ensure};
use std::ffi::OsStr;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

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

/// Runs `command` with nothing to read, and returns how it ended and what it wrote to standard output. If that takes longer than `limit`
/// it is killed, with all that it started: `None`, and what it had written.
///
/// # Errors
/// If it cannot be started.
pub(crate) fn finished(command: &mut Command, limit: Duration) -> io::Result<(Option<ExitStatus>, Vec<u8>)> {
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command, 0);
    let started = Instant::now();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let (sender, receiver) = mpsc::channel();
    let mut stdout = child.stdout.take();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Some(n @ 1..) = stdout.as_mut().and_then(|pipe| pipe.read(&mut buffer).ok()) {
            // Nobody listens when it is over.
            let _ = sender.send(buffer[..n].to_vec());
        }
    });
    let mut written = Vec::new();
    // The pipe is closed when all have ended that could write to it.
    let in_time = loop {
        match receiver.recv_timeout(limit.saturating_sub(started.elapsed())) {
            Ok(bytes) => written.extend(bytes),
            Err(RecvTimeoutError::Disconnected) => break true,
            Err(RecvTimeoutError::Timeout) => break false,
        }
    };
    if !in_time {
        kill(&mut child)?;
    }
    let status = child.wait()?;
    // What has left the group may still hold the pipe.
    while let Ok(bytes) = receiver.recv_timeout(Duration::from_secs(1)) {
        written.extend(bytes);
    }
    Ok((in_time.then_some(status), written))
}

/// Kills `child`, where there are groups of processes with all that it started.
fn kill(child: &mut Child) -> io::Result<()> {
    if cfg!(unix) {
        Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]).status().map(drop)
    } else {
        child.kill()
    }
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

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_end_is_killed_with_what_it_started() {
        let finished =
            |script: &str, limit| finished(Command::new("sh").args(["-c", script]), limit).unwrap();
        let (status, written) = finished("printf a; sleep 0.1; printf b; exit 3", Duration::from_secs(60));
        assert_eq!((status.and_then(|s| s.code()), &written[..]), (Some(3), &b"ab"[..]));
        let started = Instant::now();
        let (status, written) = finished("printf a; setsid sleep 40 & sleep 50", Duration::from_millis(300));
        assert_eq!((status, &written[..]), (None, &b"a"[..]));
        assert!(started.elapsed() < Duration::from_secs(25));
    }
}
