//! The checks of one change, in order of cost. A failing step does not hide the later ones: all run, the failing ones are named at the
//! end, and the last lines sum the tests of each platform and of all.

use crate::process::{answers, cargo, root, succeed};
use crate::tally::Tallies;
use crate::target::{
    LINUX_AARCH64, LINUX_X86_64, MACOS_AARCH64, Place, SHIPPED, Target, WINDOWS_X86_64, here,
};
use crate::wine::Wine;
use crate::{dist, readme, tools};
use anyhow::{Result, anyhow, ensure};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Instant;

/// Processors that qemu imitates: with dotprod and i8mm, with dotprod alone, with neither. All tests run on the first. On the others
/// those do whose outcome a processor's instructions can change: the kernels, and what the program computes with them.
const AARCH64_CPUS: [(&str, &[&str], &[&str]); 3] = [
    ("max", &ALL_BUT_CLI, &COMMANDS),
    ("cortex-a76", &KERNELS, &["cpu_floor"]),
    ("cortex-a72", &KERNELS, &["cpu_floor"]),
];

/// Tests of the command line for an emulator: those of commands and files, without a bench that takes a minute there. Signals,
/// terminals and limits are this machine's.
const COMMANDS: [&str; 7] =
    ["answers::", "commands::", "conversion::", "cpu_floor::", "paths::", "--skip", "a_bench_record"];

/// Integration tests, as patterns, but for those of the command line.
const ALL_BUT_CLI: [&str; 4] = ["--test", "[!c]*", "--test", "c[!l]*"];

const KERNELS: [&str; 8] =
    ["--test", "contract", "--test", "definition", "--test", "format_layout", "--test", "isa_equals_scalar"];

/// The packages of the product; the shaders are tested where they are built. They are always built together: alone, some would have other features of what they depend on, and
/// all of that would be built again.
const PACKAGES: [&str; 5] = ["--workspace", "--exclude", "xtask", "--exclude", "samara-shaders"];

struct Step {
    name: &'static str,
    what: &'static str,
    run: fn(&mut Tallies) -> Result<()>,
}

const STEPS: &[Step] = &[
    Step { name: "fmt", what: "the code is formatted", run: fmt },
    Step { name: "typos", what: "spelling", run: typos },
    Step { name: "clippy", what: "no warning in any target", run: clippy },
    Step { name: "doc", what: "the documentation builds without a warning", run: doc },
    Step { name: "deny", what: "licences, sources and versions of dependencies (deny.toml)", run: deny },
    Step { name: "fuzz", what: "the fuzz targets build", run: fuzz },
    Step { name: "test", what: "unit, integration and documentation tests on this machine", run: test },
    Step { name: "macos", what: "no warning for macOS, where nothing is linked or run", run: macos },
    Step { name: "dist", what: "release archives, looked at and run on an old system", run: dist },
    Step { name: "windows", what: "the tests as Windows programs, by wine", run: windows },
    Step { name: "aarch64", what: "the tests on three ARM processors, by qemu", run: aarch64 },
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
    let no_skips = std::env::var_os("SAMARA_NO_SKIPS").is_some();
    let mut tallies = Tallies::new(no_skips);
    let mut failed = Vec::new();
    let started = Instant::now();
    for step in STEPS.iter().filter(|s| names.is_empty() || names.iter().any(|n| n == s.name)) {
        println!("== {}: {}", step.name, step.what);
        let step_started = Instant::now();
        let outcome = (step.run)(&mut tallies);
        let seconds = step_started.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => println!("== {} passed in {seconds:.1} s\n", step.name),
            Err(e) => {
                println!("== {} FAILED after {seconds:.1} s: {e:#}\n", step.name);
                failed.push(step.name);
            }
        }
    }
    if names.is_empty()
        && let Err(e) = readme::check(&tallies, no_skips)
    {
        println!("README.md: {e:#}");
        failed.push("readme");
    }
    println!("{:.0} s in all", started.elapsed().as_secs_f64());
    if !failed.is_empty() {
        println!("failed: {}", failed.join(", "));
    }
    println!("{}", tallies);
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn fmt(_: &mut Tallies) -> Result<()> {
    succeed(cargo(&["fmt", "--all", "--check"]))
}

fn typos(tallies: &mut Tallies) -> Result<()> {
    let typos = if answers("typos") { Ok(PathBuf::from("typos")) } else { tools::python("bin/typos") };
    let Some(typos) = tallies.wanted("spelling", typos)? else { return Ok(()) };
    let mut command = Command::new(typos);
    command.current_dir(root());
    succeed(command)
}

fn clippy(_: &mut Tallies) -> Result<()> {
    succeed(cargo(&["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"]))
}

fn doc(_: &mut Tallies) -> Result<()> {
    let mut command = cargo(&["doc", "--locked", "--workspace", "--no-deps"]);
    command.env("RUSTDOCFLAGS", "-D warnings");
    succeed(command)
}

fn deny(_: &mut Tallies) -> Result<()> {
    // The crates of other platforms are checked too, so they have to be here; after this cargo-deny needs no network.
    succeed(cargo(&["fetch", "--locked"]))?;
    let mut command = Command::new(tools::cargo_deny()?);
    command
        .args(["--log-level", "error", "--offline", "--locked", "check", "bans", "licenses", "sources"])
        .current_dir(root());
    succeed(command)
}

fn fuzz(_: &mut Tallies) -> Result<()> {
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

fn test(tallies: &mut Tallies) -> Result<()> {
    let command = cargo(&["test", "--locked", "--workspace", "--no-fail-fast", "--", "--show-output"]);
    tallies.run(&here(), command)
}

fn macos(tallies: &mut Tallies) -> Result<()> {
    let clippy = MACOS_AARCH64.cargo("clippy", &Place::here());
    let Some(mut clippy) = tallies.wanted(MACOS_AARCH64.name, clippy)? else {
        return Ok(());
    };
    clippy.args(PACKAGES).args(["--lib", "--bins", "--tests", "--", "-D", "warnings"]);
    succeed(clippy)
}

fn dist(tallies: &mut Tallies) -> Result<()> {
    let Some(()) = tallies.wanted("dist", dist::able())? else { return Ok(()) };
    dist::make(&SHIPPED, &[])?;
    if here() != LINUX_X86_64.name {
        return Ok(());
    }
    // The program that is shipped, on old processors.
    let mut floor =
        cargo(&["test", "--locked", "--workspace", "--test", "cli", "cpu_floor", "--", "--show-output"]);
    floor.env("SAMARA_EXE", LINUX_X86_64.exe(&Place::here()));
    tallies.run("linux-x86_64 (as shipped)", floor)
}

/// All tests are Windows programs. Those of a console are this machine's: wine draws one on a terminal.
fn windows(tallies: &mut Tallies) -> Result<()> {
    let name = WINDOWS_X86_64.name;
    let Some(wine) = tallies.wanted(name, Wine::start())? else { return Ok(()) };
    let tests = foreign_tests(&WINDOWS_X86_64, &["--bins", "--tests"]);
    let Some(mut tests) = tallies.wanted(name, tests)? else { return Ok(()) };
    tests.args(["--", "--show-output"]);
    tests.env("CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER", &wine.program);
    let mut console = program_tests(&wine.program.to_string_lossy(), &WINDOWS_X86_64);
    console.args(["console::", "--include-ignored", "--test-threads", "1"]);
    tallies.several(name, [tests, console], |command| wine.set_up(command))
}

/// The libraries' tests are ARM programs. Those of the command line stay programs of this machine, and what they run is the ARM
/// program that is shipped.
fn aarch64(tallies: &mut Tallies) -> Result<()> {
    const QEMU: &str = "qemu-aarch64-static";
    let name = LINUX_AARCH64.name;
    let system = if answers(QEMU) {
        dist::userland("arm64")
    } else {
        Err(anyhow!("{QEMU} is not installed (on Debian: apt install qemu-user-static)"))
    };
    let Some(system) = tallies.wanted(name, system)? else { return Ok(()) };
    let build = LINUX_AARCH64.cargo("build", &Place::here());
    let Some(mut build) = tallies.wanted(name, build)? else { return Ok(()) };
    build.args(["-p", "samara"]);
    succeed(build)?;
    let mut failed = Vec::new();
    for (cpu, chosen, filter) in AARCH64_CPUS {
        let mut libraries = foreign_tests(&LINUX_AARCH64, chosen)?;
        libraries.args(["--", "--show-output"]).env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", QEMU);
        let mut program = program_tests(QEMU, &LINUX_AARCH64);
        program.args(filter);
        let outcome = tallies.several(&format!("{name} ({cpu})"), [libraries, program], |command| {
            command.env("QEMU_CPU", cpu).env("QEMU_LD_PREFIX", &system).env("SAMARA_EMULATED", "1");
        });
        failed.extend(outcome.err().map(|e| format!("{e:#}")));
    }
    ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}

/// Unit tests of the libraries and the tests `chosen`, built as the program is for a release, so that what is tested is what is
/// shipped. Documentation tests run on this machine alone.
fn foreign_tests(target: &Target, chosen: &[&str]) -> Result<Command> {
    let mut command = target.cargo("test", &Place::here())?;
    command.args(PACKAGES).args(["--no-fail-fast", "--lib"]).args(chosen);
    Ok(command)
}

/// Tests of the command line, of this machine, which have `runner` run what was built for `target`.
fn program_tests(runner: &str, target: &Target) -> Command {
    let mut command = cargo(&["test", "--locked", "--workspace", "--test", "cli", "--", "--show-output"]);
    command.env("SAMARA_RUNNER", runner).env("SAMARA_EXE", target.exe(&Place::here()));
    command
}
