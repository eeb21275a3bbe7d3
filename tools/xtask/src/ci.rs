//! The checks of one change, in order of cost. A failing step does not hide the later ones: all run, the failing ones are named at the
//! end, and the last line sums the tests.

use crate::tally::Tally;
use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

/// The version `deny` installs where no cargo-deny is found. Unoptimised, because building it is most of what the step costs.
const CARGO_DENY: &str = "0.20.2";

struct Step {
    name: &'static str,
    what: &'static str,
    run: fn(&mut Tally) -> Result<()>,
}

const STEPS: &[Step] = &[
    Step { name: "fmt", what: "the code is formatted", run: fmt },
    Step { name: "typos", what: "spelling, where the typos tool is installed", run: typos },
    Step { name: "clippy", what: "no warning in any target", run: clippy },
    Step { name: "doc", what: "the documentation builds without a warning", run: doc },
    Step { name: "deny", what: "licences, sources and versions of dependencies (deny.toml)", run: deny },
    Step { name: "fuzz", what: "the fuzz targets build", run: fuzz },
    Step { name: "test", what: "unit, integration and documentation tests", run: test },
];

/// One line for each step.
pub(crate) fn help() -> String {
    STEPS.iter().map(|s| format!("  {:<8}{}\n", s.name, s.what)).collect()
}

/// Runs the steps called `names`, or all of them if there are none.
pub(crate) fn run(names: &[String]) -> ExitCode {
    if let Some(unknown) = names.iter().find(|n| STEPS.iter().all(|s| s.name != n.as_str())) {
        eprintln!("no step is called {unknown:?}; the steps are\n{}", help());
        return ExitCode::from(2);
    }
    let mut tally = Tally::default();
    let mut failed = Vec::new();
    let started = Instant::now();
    for step in STEPS.iter().filter(|s| names.is_empty() || names.iter().any(|n| n == s.name)) {
        println!("== {}: {}", step.name, step.what);
        let step_started = Instant::now();
        let outcome = (step.run)(&mut tally);
        let seconds = step_started.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => println!("== {} passed in {seconds:.1} s\n", step.name),
            Err(e) => {
                println!("== {} FAILED after {seconds:.1} s: {e:#}\n", step.name);
                failed.push(step.name);
            }
        }
    }
    println!("{:.0} s in all", started.elapsed().as_secs_f64());
    if !failed.is_empty() {
        println!("failed: {}", failed.join(", "));
    }
    println!("{tally}");
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn fmt(_: &mut Tally) -> Result<()> {
    succeed(cargo(&["fmt", "--all", "--check"]))
}

fn typos(_: &mut Tally) -> Result<()> {
    if !answers("typos") {
        println!("typos is not installed (pip install typos); left out");
        return Ok(());
    }
    let mut command = Command::new("typos");
    command.current_dir(root());
    succeed(command)
}

fn clippy(_: &mut Tally) -> Result<()> {
    succeed(cargo(&["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"]))
}

fn doc(_: &mut Tally) -> Result<()> {
    let mut command = cargo(&["doc", "--locked", "--workspace", "--no-deps"]);
    command.env("RUSTDOCFLAGS", "-D warnings");
    succeed(command)
}

fn deny(_: &mut Tally) -> Result<()> {
    // The crates of other platforms are checked too, so they have to be here; after this nothing needs the network.
    succeed(cargo(&["fetch", "--locked"]))?;
    let mut command = Command::new(cargo_deny()?);
    command
        .args(["--log-level", "error", "--offline", "--locked", "check", "bans", "licenses", "sources"])
        .current_dir(root());
    succeed(command)
}

/// The cargo-deny on the PATH, or the one that an earlier run or this one puts into `target/tools`.
fn cargo_deny() -> Result<PathBuf> {
    if answers("cargo-deny") {
        return Ok("cargo-deny".into());
    }
    let tools = root().join("target").join("tools");
    let binary = tools.join("bin").join(format!("cargo-deny{}", std::env::consts::EXE_SUFFIX));
    if !binary.exists() {
        println!("installing cargo-deny {CARGO_DENY} into target/tools");
        let mut command =
            cargo(&["install", "cargo-deny", "--locked", "--debug", "--version", CARGO_DENY, "--root"]);
        command.arg(&tools).env("CARGO_PROFILE_DEV_DEBUG", "0");
        succeed(command).context("cargo-deny is not installed and could not be")?;
    }
    Ok(binary)
}

fn fuzz(_: &mut Tally) -> Result<()> {
    const MANIFEST: &str = "format/fuzz/Cargo.toml";
    // libFuzzer is C++. Where no compiler for it is found the targets are type-checked; the file stands for the library that is
    // then never linked.
    let build = answers("c++");
    let what = if build { "build" } else { "check" };
    let mut command = cargo(&[what, "--manifest-path", MANIFEST, "--target-dir", "target/fuzz"]);
    if !build {
        println!("no c++ compiler found: the targets are checked, not linked");
        command.env("CUSTOM_LIBFUZZER_PATH", root().join(MANIFEST));
    }
    succeed(command)
}

fn test(tally: &mut Tally) -> Result<()> {
    let mut command = cargo(&["test", "--locked", "--workspace", "--no-fail-fast", "--", "--show-output"]);
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| shown(&command))?;
    let stdout = child.stdout.take().context("cargo test has no output to read")?;
    for line in BufReader::new(stdout).lines() {
        // A test may print bytes that are not text; they count for nothing here.
        let Ok(line) = line else { continue };
        println!("{line}");
        tally.line(&line);
    }
    let status = child.wait()?;
    if let Some(fault) = tally.fault() {
        bail!("{fault}");
    }
    ensure!(status.success(), "{} ended with {status}", shown(&command));
    Ok(())
}

/// The cargo that runs this program, at the workspace's root.
fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(root());
    command
}

fn succeed(mut command: Command) -> Result<()> {
    let status = command.status().with_context(|| shown(&command))?;
    ensure!(status.success(), "{} ended with {status}", shown(&command));
    Ok(())
}

/// Whether `program --version` can be run.
fn answers(program: &str) -> bool {
    let quiet = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet.is_ok_and(|status| status.success())
}

fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let args = command.get_args().map(|a| a.to_string_lossy().into_owned());
    std::iter::once(program.to_string_lossy().into_owned()).chain(args).collect::<Vec<_>>().join(" ")
}

/// The workspace's root.
fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    root.expect("xtask lies two folders below the workspace's root").to_owned()
}
