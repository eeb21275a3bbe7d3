//! The checks of one change. A failing step does not hide the later ones: all run, the failing ones are named at the end, and the last
//! lines say how long each took and sum the tests of each platform and of all.
//!
//! A step that tests builds the tests and queues them (`runs.rs`): they run beside the steps that follow. So, after what takes seconds,
//! tests are built first, and checks that leave a processor idle come last. Nearly all is built in one profile, that of releases, so
//! that what a program depends on is built once for each platform.

use crate::process::{answers, cargo, root, succeed};
use crate::runs::{Program, Runs, build, called};
use crate::tally::Tallies;
use crate::target::{
    LINUX_AARCH64, LINUX_X86_64, MACOS_AARCH64, Place, SHIPPED, Target, WINDOWS_X86_64, here,
};
use crate::wine::Wine;
use crate::{dist, readme, tools};
use anyhow::{Context, Result, anyhow};
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// Processors that qemu imitates: with dotprod and i8mm, with dotprod alone, with neither. All tests run on the first. On the others
/// those do whose outcome a processor's instructions can change: the kernels, and what the program computes with them.
const AARCH64_CPUS: [(&str, &[&str], &[&str]); 3] = [
    ("max", &[], &COMMANDS),
    ("cortex-a76", &KERNELS, &["cpu_floor"]),
    ("cortex-a72", &KERNELS, &["cpu_floor"]),
];

/// Tests of the command line for an emulator: those of commands and files, without a bench that takes a minute there. Signals,
/// terminals and limits are this machine's.
const COMMANDS: [&str; 7] =
    ["answers::", "commands::", "conversion::", "cpu_floor::", "paths::", "--skip", "a_bench_record"];

/// Unit tests of the libraries and integration tests, as patterns, but for those of the command line.
const LIBRARIES: [&str; 5] = ["--lib", "--test", "[!c]*", "--test", "c[!l]*"];

/// Tests of the kernels, and the unit tests of all that they are made of.
const KERNELS: [&str; 5] = ["kernels", "samara_converter", "samara_format", "samara_pool", "samara_runtime"];

/// The packages of the product. They are always built together: alone, some would have other features of what they depend on, and
/// all of that would be built again.
const PACKAGES: [&str; 7] =
    ["--workspace", "--exclude", "xtask", "--exclude", "samara-shaders", "--exclude", "samara-benches"];

/// Our own code has its assertions where it is tested on this machine; what it depends on stays that of a release, says Cargo.toml.
const ASSERTIONS: [&str; 2] =
    ["profile.release.debug-assertions=true", "profile.release.overflow-checks=true"];

/// What steps share.
struct Checks {
    tallies: Tallies,
    runs: Runs,
}

struct Step {
    name: &'static str,
    what: &'static str,
    run: fn(&mut Checks) -> Result<()>,
}

const STEPS: &[Step] = &[
    Step { name: "fmt", what: "the code is formatted", run: fmt },
    Step { name: "typos", what: "spelling", run: typos },
    Step { name: "deny", what: "licences, sources and versions of dependencies (deny.toml)", run: deny },
    Step { name: "test", what: "unit, integration and documentation tests on this machine", run: test },
    Step { name: "aarch64", what: "the tests on three ARM processors, by qemu", run: aarch64 },
    Step { name: "windows", what: "the tests as Windows programs, by wine", run: windows },
    Step { name: "dist", what: "release archives, looked at and run on an old system", run: dist },
    Step { name: "clippy", what: "no warning in any target", run: clippy },
    Step { name: "doc", what: "the documentation builds without a warning", run: doc },
    Step { name: "fuzz", what: "the fuzz targets build", run: fuzz },
    Step { name: "macos", what: "no warning for macOS, where nothing is linked or run", run: macos },
];

/// One line for each step.
pub(crate) fn help() -> String {
    STEPS.iter().map(|s| format!("  {:<8}{}\n", s.name, s.what)).collect()
}

/// What was done, how long it took and how it ended.
type Row = (String, Duration, Result<()>);

/// Runs the steps called `names`, or all of them if there are none.
pub(crate) fn run(names: &[String]) -> ExitCode {
    if let Some(unknown) = names.iter().find(|n| STEPS.iter().all(|s| s.name != n.as_str())) {
        eprintln!("no step is called {unknown:?}; the steps are\n{}", help());
        return ExitCode::from(2);
    }
    let no_skips = std::env::var_os("SAMARA_NO_SKIPS").is_some();
    let started = Instant::now();
    let mut checks = Checks { tallies: Tallies::new(no_skips), runs: Runs::start() };
    let mut rows = Vec::new();
    for step in STEPS.iter().filter(|s| names.is_empty() || names.iter().any(|n| n == s.name)) {
        println!("== {}: {}", step.name, step.what);
        let step_started = Instant::now();
        let outcome = (step.run)(&mut checks);
        let row = (step.name.to_owned(), step_started.elapsed(), outcome);
        println!("==\n{}\n", shown(&row));
        rows.push(row);
    }
    let Checks { mut tallies, runs } = checks;
    let waited = Instant::now();
    let runs = runs.finish(&mut tallies);
    rows.push(("waiting for the last tests".to_owned(), waited.elapsed(), Ok(())));
    if names.is_empty() {
        rows.push(("README.md".to_owned(), Duration::ZERO, readme::check(&tallies, no_skips)));
    }
    println!("== seconds of each step, then of each platform's tests, which ran beside them");
    rows.extend(runs);
    for row in &rows {
        println!("{}", shown(row));
    }
    println!("{:6.0} s in all\n{tallies}", started.elapsed().as_secs_f64());
    if rows.iter().all(|(_, _, outcome)| outcome.is_ok()) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn shown((name, took, outcome): &Row) -> String {
    let seconds = took.as_secs_f64();
    match outcome {
        Ok(()) => format!("{seconds:6.1} s  {name}"),
        Err(e) => format!("{seconds:6.1} s  {name} FAILED: {e:#}"),
    }
}

fn fmt(_: &mut Checks) -> Result<()> {
    succeed(cargo(&["fmt", "--all", "--check"]))
}

fn typos(checks: &mut Checks) -> Result<()> {
    let Some(typos) = checks.tallies.wanted("spelling", tools::typos())? else { return Ok(()) };
    let mut command = Command::new(typos);
    command.current_dir(root());
    succeed(command)
}

/// `cargo SUBCOMMAND` for this machine. Where releases for it can be made, all is built as for them, and each crate that others have
/// written once; elsewhere in the development profile.
fn local(subcommand: &str) -> Command {
    let target = SHIPPED.into_iter().find(|target| target.name == here());
    let command = target.and_then(|target| target.cargo(subcommand, &Place::here()).ok());
    let mut command = command.unwrap_or_else(|| cargo(&[subcommand, "--locked"]));
    command.args(ASSERTIONS.iter().flat_map(|setting| ["--config", setting]));
    command
}

fn clippy(_: &mut Checks) -> Result<()> {
    let mut command = local("clippy");
    command.args(["--workspace", "--all-targets", "--", "-D", "warnings"]);
    succeed(command)
}

fn doc(_: &mut Checks) -> Result<()> {
    let mut command = local("doc");
    command.args(["--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings");
    succeed(command)
}

fn deny(checks: &mut Checks) -> Result<()> {
    let Some(deny) = checks.tallies.wanted("dependencies", tools::cargo_deny())? else { return Ok(()) };
    // The crates of other platforms are checked too, so they have to be here; after this cargo-deny needs no network.
    succeed(cargo(&["fetch", "--locked"]))?;
    let mut command = Command::new(deny);
    command
        .args(["--log-level", "error", "--offline", "--locked", "check", "bans", "licenses", "sources"])
        .current_dir(root());
    succeed(command)
}

fn fuzz(_: &mut Checks) -> Result<()> {
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

fn macos(checks: &mut Checks) -> Result<()> {
    let clippy = MACOS_AARCH64.cargo("clippy", &Place::here());
    let Some(mut clippy) = checks.tallies.wanted(MACOS_AARCH64.name, clippy)? else {
        return Ok(());
    };
    // None of the tests is run there, and what they alone depend on would have to be checked too.
    clippy.args(PACKAGES).args(["--lib", "--bins", "--", "-D", "warnings"]);
    succeed(clippy)
}

/// The shaders and this program are tested in the development profile, in which this program is built anyway, each alone: with them
/// the product would have other features of what it depends on. The shaders' tests and build script share a compiler of shaders, which
/// is built once where both are built alike: as build scripts are.
fn test(checks: &mut Checks) -> Result<()> {
    let mut tests = local("test");
    tests.args(PACKAGES).arg("--tests");
    let built = build(tests)?;
    let mut commands: Vec<_> = built.tests.iter().map(|test| test.command(&[], &[])).collect();
    // A release puts its program in the same place, maybe before these have run.
    if let [samara] = &built.started[..] {
        let copy =
            root().join("target/checked").join(samara.file_name().context("a program without a name")?);
        fs::create_dir_all(copy.with_file_name(""))?;
        fs::copy(samara, &copy)?;
        for command in &mut commands {
            command.env("SAMARA_EXE", &copy);
        }
    }
    checks.runs.add(here(), commands, ())?;
    let mut documentation = local("test");
    documentation.args(PACKAGES).args(["--doc", "--no-fail-fast"]);
    let mut failed = vec![checks.tallies.run(&here(), documentation)];
    let as_scripts = ["--config", "profile.dev.opt-level=0", "--config", "profile.dev.debug=false"];
    for (package, settings) in [("samara-shaders", &as_scripts[..]), ("xtask", &[])] {
        let mut command = cargo(&["test", "--locked", "--package", package, "--no-fail-fast"]);
        command.args(settings).args(["--", "--show-output"]);
        failed.push(checks.tallies.run(&here(), command));
    }
    failed.into_iter().collect()
}

/// The libraries' tests are ARM programs. Those of the command line stay programs of this machine, and what they run is the ARM
/// program that is shipped.
fn aarch64(checks: &mut Checks) -> Result<()> {
    const QEMU: &str = "qemu-aarch64-static";
    let name = LINUX_AARCH64.name;
    let system = if answers(QEMU) {
        dist::userland("arm64")
    } else {
        Err(anyhow!("{QEMU} is not installed (on Debian: apt install qemu-user-static)"))
    };
    let Some(system) = checks.tallies.wanted(name, system)? else { return Ok(()) };
    let program = LINUX_AARCH64.cargo("build", &Place::here());
    let Some(program) = checks.tallies.wanted(name, program)? else { return Ok(()) };
    let libraries = foreign_tests(program, &LINUX_AARCH64, &LIBRARIES)?;
    let cli = cli()?;
    for (cpu, chosen, filter) in AARCH64_CPUS {
        let tests = called(&libraries, chosen)?;
        let mut commands: Vec<_> = tests.iter().map(|p| p.command(&[Path::new(QEMU)], &[])).collect();
        commands.push(program_test(&cli, QEMU, &LINUX_AARCH64, filter));
        for command in &mut commands {
            command.env("QEMU_CPU", cpu).env("QEMU_LD_PREFIX", &system);
            command.env("SAMARA_EMULATED", "1").env("SAMARA_NO_GPU", "1");
        }
        checks.runs.add(format!("{name} ({cpu})"), commands, ())?;
    }
    Ok(())
}

/// All tests are Windows programs, in the short form that emulators run: the processor is this machine's, on which the long one runs.
/// Those of a console are this machine's: wine draws one on a terminal.
fn windows(checks: &mut Checks) -> Result<()> {
    let name = WINDOWS_X86_64.name;
    let Some(wine) = checks.tallies.wanted(name, Wine::start())? else { return Ok(()) };
    let program = WINDOWS_X86_64.cargo("build", &Place::here());
    let Some(program) = checks.tallies.wanted(name, program)? else { return Ok(()) };
    let tests = foreign_tests(program, &WINDOWS_X86_64, &["--tests"])?;
    let mut commands: Vec<_> = tests.iter().map(|p| p.command(&[&wine.program], &[])).collect();
    let console = ["console::", "--include-ignored", "--test-threads", "1"];
    commands.push(program_test(&cli()?, &wine.program.to_string_lossy(), &WINDOWS_X86_64, &console));
    // Without a screen wine finds no GPU; on one that nobody sees, the one in software.
    for command in &mut commands {
        command.env("SAMARA_NO_GPU", "1");
    }
    let screen = Path::new("/usr/bin/xvfb-run");
    let missing = || anyhow!("a GPU: xvfb-run is not installed (on Debian: apt install xvfb xauth)");
    let screen = screen.exists().then_some(screen).ok_or_else(missing);
    if let Some(screen) = checks.tallies.wanted(name, screen)? {
        let models = tests.iter().find(|program| program.is("models"));
        let models = models.context("there is no test called models")?;
        commands.push(wine.stop());
        commands.push(models.command(&[screen, Path::new("-a"), &wine.program], &["gpu_is_close"]));
    }
    for command in &mut commands {
        wine.set_up(command.env("SAMARA_EMULATED", "1"));
    }
    checks.runs.add(name, commands, wine)
}

fn dist(checks: &mut Checks) -> Result<()> {
    let Some(()) = checks.tallies.wanted("dist", dist::able())? else { return Ok(()) };
    // Built before the releases: it puts a program of its own where that for this machine will be.
    let cli = cli()?;
    dist::make(&SHIPPED, &[])?;
    if here() != LINUX_X86_64.name {
        return Ok(());
    }
    // The program that is shipped, on old processors.
    let mut floor = cli.command(&[], &["cpu_floor"]);
    floor.env("SAMARA_EXE", LINUX_X86_64.exe(&Place::here()));
    checks.runs.add("linux-x86_64 (as shipped)", vec![floor], ())
}

/// Builds the program, by `program`, a `cargo build`, and then the tests `chosen` of the product: all as for a release, so that what is
/// tested is what is shipped.
/// Documentation tests run on this machine alone.
fn foreign_tests(mut program: Command, target: &Target, chosen: &[&str]) -> Result<Vec<Program>> {
    program.args(["--package", "samara"]);
    succeed(program)?;
    let mut tests = target.cargo("test", &Place::here())?;
    tests.args(PACKAGES).args(chosen);
    Ok(build(tests)?.tests)
}

/// Builds the tests of the command line for this machine.
fn cli() -> Result<Program> {
    let mut command = local("test");
    command.args(PACKAGES).args(["--test", "cli"]);
    build(command)?.tests.pop().context("there is no test called cli")
}

/// Tests of the command line, of this machine, which have `runner` run what was built for `target`.
fn program_test(cli: &Program, runner: &str, target: &Target, args: &[&str]) -> Command {
    let mut command = cli.command(&[], args);
    command.env("SAMARA_RUNNER", runner).env("SAMARA_EXE", target.exe(&Place::here()));
    command
}
