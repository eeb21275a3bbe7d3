//! Running the program and looking at what came of it.

use std::{
    ffi::OsStr,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::OnceLock,
};

use serde_json::Value;

/// What starts the program, word by word. `SAMARA_EXE` names another build of it to test, and `SAMARA_RUNNER` what
/// runs that: an emulator and its arguments, split at spaces.
pub(crate) fn program() -> Vec<String> {
    let runner = std::env::var("SAMARA_RUNNER").unwrap_or_default();
    let exe = std::env::var("SAMARA_EXE").unwrap_or_else(|_| env!("CARGO_BIN_EXE_samara").to_owned());
    runner.split_whitespace().map(str::to_owned).chain([exe]).collect()
}

/// Whether something emulates the program's machine.
pub(crate) fn emulated() -> bool {
    program().len() > 1
}

/// The program, in an environment that does not depend on who runs the tests.
pub(crate) fn samara() -> Command {
    let words = program();
    let mut command = Command::new(&words[0]);
    clean(&mut command).args(&words[1..]).stdin(Stdio::null());
    command
}

/// The variable that says where caches are.
pub(crate) const CACHES: &str = if cfg!(windows) { "LOCALAPPDATA" } else { "XDG_CACHE_HOME" };

/// The variables that tell the loader of Vulkan where drivers are, the newer and the older one.
pub(crate) const DRIVERS: [&str; 2] = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"];

/// Takes away what changes the program's words or colours, or how it runs.
pub(crate) fn clean(command: &mut Command) -> &mut Command {
    for name in [
        "CI",
        "CLICOLOR",
        "CLICOLOR_FORCE",
        "COLORTERM",
        "COLUMNS",
        "LINES",
        "NO_COLOR",
        "RAYON_NUM_THREADS",
        "RUST_BACKTRACE",
        "RUST_MIN_STACK",
        "TERM",
        "XDG_CACHE_HOME",
        "XDG_RUNTIME_DIR",
        "XDG_STATE_HOME",
    ] {
        command.env_remove(name);
    }
    // No GPU of this machine takes part, unless a test says so.
    for name in DRIVERS {
        command.env(name, "/nonexistent");
    }
    // Nothing is kept between tests: nobody can make a folder there. But an emulated machine takes seconds to find the fastest kernels.
    if cfg!(windows) {
        command.env_remove(CACHES);
    } else if emulated() {
        command.env(CACHES, concat!(env!("CARGO_TARGET_TMPDIR"), "/caches"));
    } else {
        command.env(CACHES, "/dev/null");
    }
    if emulated() {
        // Without one the program starts itself again, and that would leave the emulator.
        command.env("XDG_RUNTIME_DIR", "/nonexistent");
    }
    command
}

/// The program as a shell's word list.
#[cfg(unix)]
pub(crate) fn quoted() -> String {
    let words: Vec<String> = program().iter().map(|word| format!("'{word}'")).collect();
    words.join(" ")
}

/// Has a shell run a script in which `samara` is the program.
#[cfg(unix)]
pub(crate) fn shell(script: &str) -> Ran {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("samara() {{ {} \"$@\"; }}\n{script}", quoted())]);
    clean(&mut command).stdin(Stdio::null()).output().expect("a shell").into()
}

/// Runs a script in which `samara` is the program, in a mount namespace with a small file system at `$DISK`; `None`
/// where that is not allowed.
#[cfg(target_os = "linux")]
pub(crate) fn on_small_disk(megabytes: u32, script: &str) -> Option<Ran> {
    let dir = folder();
    let script = format!(
        "samara() {{ {} \"$@\"; }}\nmount -t tmpfs -o size={megabytes}m tmpfs \"$DISK\" || exit 99\n\
         echo mounted\n{script}",
        quoted()
    );
    for isolate in [["--map-root-user", "--mount"].as_slice(), &["--mount"]] {
        let mut command = Command::new("unshare");
        command.args(isolate).args(["sh", "-c", &script]);
        clean(&mut command).env("DISK", dir.path());
        let Ok(output) = command.output() else { continue };
        let ran = Ran::from(output);
        if ran.out.starts_with("mounted") {
            return Some(ran);
        }
    }
    skip("a small file system cannot be mounted here");
    None
}

/// A path as an argument.
pub(crate) fn plain(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

/// Leaves a test out and says why. Where everything must run, `SAMARA_NO_SKIPS` makes that a failure.
#[cfg(unix)]
pub(crate) fn skip(reason: &str) {
    assert!(std::env::var_os("SAMARA_NO_SKIPS").is_none(), "cannot run: {reason}");
    println!("skipped: {reason}");
}

/// Leaves a test out that is about limits of a process: under an emulator they are the emulator's.
#[cfg(unix)]
pub(crate) fn limits_are_the_emulators() -> bool {
    if emulated() {
        println!("skipped: optional: an emulator needs the address space that this test takes away");
    }
    emulated()
}

/// A run that has ended.
#[derive(Debug)]
pub(crate) struct Ran {
    /// Exit code; `None` when a signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ran {
    /// Asserts the exit code and returns itself.
    pub(crate) fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout: {}\nstderr: {}", self.out, self.err);
        assert!(!self.err.contains("panicked"), "{}", self.err);
        self
    }

    /// Standard output as JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}", self.out))
    }

    /// The line that starts with `error: `, and what follows it.
    pub(crate) fn error(&self) -> &str {
        let at = self.err.find("error: ").unwrap_or_else(|| panic!("no error in: {}", self.err));
        &self.err[at..]
    }

    /// The command behind `label` in the error.
    pub(crate) fn hint(&self, label: &str) -> &str {
        self.error()
            .lines()
            .find_map(|line| line.strip_prefix(label))
            .unwrap_or_else(|| panic!("no {label:?} in: {}", self.err))
    }
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("output is UTF-8");
        Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

/// Has the program run to its end.
///
/// Of some thousand programs that two threads start at once, wine 8 fails to start one: then it is started again.
pub(crate) fn finish(command: &mut Command) -> Ran {
    const ERROR_INTERNAL_ERROR: i32 = 1359;
    match command.output() {
        Err(error) if cfg!(windows) && error.raw_os_error() == Some(ERROR_INTERNAL_ERROR) => command.output(),
        output => output,
    }
    .expect("the program starts")
    .into()
}

/// Runs with these arguments and nothing on standard input.
pub(crate) fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Ran {
    finish(samara().args(args))
}

/// Runs with this on standard input.
pub(crate) fn run_with_input<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>, input: &[u8]) -> Ran {
    let mut command = samara();
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    // The program may end without reading.
    let _ = stdin.write_all(input);
    drop(stdin);
    child.wait_with_output().expect("it ends").into()
}

/// Runs to a successful end; the most memory that was in use at once, bytes.
#[cfg(target_os = "linux")]
pub(crate) fn peak_memory(command: &mut Command) -> u64 {
    let mut child = command.stdout(Stdio::null()).spawn().expect("the program starts");
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    while child.try_wait().expect("its state").is_none() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        peak = peak.max(kib.unwrap_or(0) << 10);
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    assert!(child.wait().expect("it ended").success());
    peak
}

/// A file or folder of `tests/fixtures`.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

/// The tiny model, converted once.
pub(crate) fn tiny() -> &'static Path {
    static TINY: OnceLock<PathBuf> = OnceLock::new();
    TINY.get_or_init(|| {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tiny.samara");
        // The tests of another emulated machine may be about to do the same.
        let turn = std::fs::File::create(path.with_extension("lock")).expect("a file to lock");
        turn.lock().expect("a turn");
        convert(&fixture("tiny-maple-2bit"), &path, &["--force"]).expect(0);
        path
    })
}

/// Converts a checkpoint.
pub(crate) fn convert(checkpoint: &Path, out: &Path, more: &[&str]) -> Ran {
    let mut command = samara();
    finish(command.arg("convert").arg(checkpoint).arg("-o").arg(out).args(more))
}

/// A copy of a folder's files.
pub(crate) fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        std::fs::copy(entry.path(), to.join(entry.file_name())).expect("copied");
    }
}

/// The name of an unfinished file.
pub(crate) fn part_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

/// A temporary folder.
pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}
