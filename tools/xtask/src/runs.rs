//! Test programs, built by cargo and run while cargo builds the next ones.
//!
//! A build has stretches in which one processor waits for another, and a test of one program uses one. So those of each
//! platform are queued as soon as they are built, and one thread runs them in that order, two when nothing is built any more; what a
//! program prints comes in one piece. One that does not end is killed, and what it has printed says where it hung; where an emulator
//! ran it, which may be what hung, it is run a second time.

use crate::process::{finished, shown};
use crate::tally::{Tallies, Tally};
use crate::target::here;
use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest that a program may run. The slowest takes three minutes.
const LIMIT: Duration = Duration::from_secs(10 * 60);

/// A test program.
pub(crate) struct Program {
    exe: PathBuf,
    /// Its package's folder, in which cargo would start it.
    folder: PathBuf,
}

/// What a `cargo test` has built.
pub(crate) struct Built {
    pub(crate) tests: Vec<Program>,
    /// Programs that tests start.
    pub(crate) started: Vec<PathBuf>,
}

/// Has `command`, a `cargo test`, build its programs and not run them.
///
/// # Errors
/// If it fails or builds no test.
pub(crate) fn build(mut command: Command) -> Result<Built> {
    command.args(["--no-run", "--message-format", "json-render-diagnostics"]).stdout(Stdio::piped());
    let mut child = command.spawn().with_context(|| shown(&command))?;
    let stdout = child.stdout.take().context("cargo has no output to read")?;
    let mut built = Built { tests: Vec::new(), started: Vec::new() };
    for line in BufReader::new(stdout).lines() {
        built.take(&line?);
    }
    let status = child.wait()?;
    ensure!(status.success(), "{} ended with {status}", shown(&command));
    ensure!(!built.tests.is_empty(), "{} built no test", shown(&command));
    Ok(built)
}

impl Built {
    /// Takes one of cargo's messages; those about a program say where it is.
    fn take(&mut self, line: &str) {
        let message: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
        let path = |key: &str| message[key].as_str().map(PathBuf::from);
        let (Some(exe), Some(manifest)) = (path("executable"), path("manifest_path")) else { return };
        if message["profile"]["test"] == true {
            self.tests.push(Program { exe, folder: manifest.with_file_name("") });
        } else {
            self.started.push(exe);
        }
    }
}

impl Program {
    /// The test `target` of those built: the name of its file, without the hash that cargo adds.
    pub(crate) fn is(&self, target: &str) -> bool {
        let name = self.exe.file_stem().unwrap_or_default().to_string_lossy();
        name.rsplit_once('-').is_some_and(|(name, _)| name == target)
    }

    /// Starts it by `runners`, each of which starts the next (nothing: this machine), with `args`.
    pub(crate) fn command(&self, runners: &[&Path], args: &[&str]) -> Command {
        let mut words = runners.iter().copied().chain([&*self.exe]);
        let mut command = Command::new(words.next().unwrap_or(&self.exe));
        command.args(words);
        command.arg("--show-output").args(args).current_dir(&self.folder);
        command
    }
}

/// Those of `tests` that are called by `names`; without names all.
///
/// # Errors
/// Says which name no test has: under another name it would be left out.
pub(crate) fn called<'a>(tests: &'a [Program], names: &[&str]) -> Result<Vec<&'a Program>> {
    if let Some(unknown) = names.iter().find(|name| !tests.iter().any(|test| test.is(name))) {
        bail!("no test is called {unknown}");
    }
    Ok(tests.iter().filter(|test| names.is_empty() || names.iter().any(|name| test.is(name))).collect())
}

/// What is to be run for a platform.
struct Run {
    platform: String,
    commands: Vec<Command>,
    /// Something that these commands need, dropped after the last of them.
    _needs: Box<dyn Send>,
}

/// How it went.
struct Outcome {
    platform: String,
    tally: Tally,
    failed: Vec<String>,
    took: Duration,
}

/// The queue and the thread that works it off.
pub(crate) struct Runs {
    queue: Sender<Run>,
    waiting: Arc<Mutex<Receiver<Run>>>,
    worker: JoinHandle<Vec<Outcome>>,
}

/// A thread that runs what is in the queue until that has ended.
fn work(waiting: &Arc<Mutex<Receiver<Run>>>) -> JoinHandle<Vec<Outcome>> {
    let waiting = Arc::clone(waiting);
    let next = move || waiting.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
    let show = |text: &str| println!("{text}");
    std::thread::spawn(move || std::iter::from_fn(next).map(|run| run.run(LIMIT, show)).collect())
}

impl Runs {
    pub(crate) fn start() -> Runs {
        let (queue, waiting) = mpsc::channel();
        let waiting = Arc::new(Mutex::new(waiting));
        let worker = work(&waiting);
        Runs { queue, waiting, worker }
    }

    /// Queues `commands`, which print as tests of Rust do, for `platform`. `needs` lives until they have ended.
    pub(crate) fn add(
        &self,
        platform: impl Into<String>,
        commands: Vec<Command>,
        needs: impl Send + 'static,
    ) -> Result<()> {
        let run = Run { platform: platform.into(), commands, _needs: Box::new(needs) };
        self.queue.send(run).ok().context("the thread that runs tests has ended")
    }

    /// Waits for all, counts them, and returns for each how long it took and why it failed, if it did.
    ///
    /// # Panics
    /// If the thread did.
    pub(crate) fn finish(self, tallies: &mut Tallies) -> Vec<(String, Duration, Result<()>)> {
        let Runs { queue, waiting, worker } = self;
        drop(queue);
        let workers = [worker, work(&waiting)];
        let outcomes =
            workers.into_iter().flat_map(|worker| worker.join().expect("a thread that runs tests"));
        let count = |Outcome { platform, tally, mut failed, took }| {
            failed.extend(tallies.add(&platform, tally).err().map(|e| format!("{e:#}")));
            let result = if failed.is_empty() { Ok(()) } else { Err(anyhow::anyhow!(failed.join("; "))) };
            (platform, took, result)
        };
        outcomes.map(count).collect()
    }
}

impl Run {
    /// Runs every command and shows what it printed; a failure does not keep the later ones from running.
    fn run(self, limit: Duration, show: impl Fn(&str)) -> Outcome {
        let started = Instant::now();
        let (mut tally, mut failed) = (Tally::default(), Vec::new());
        let emulated = !self.platform.starts_with(&here());
        for mut command in self.commands {
            let name = shown(&command);
            let late = format!("had not ended after {} s and was killed", limit.as_secs());
            let mut turn = || {
                let started = Instant::now();
                finished(&mut command, limit).map(|(end, stdout)| {
                    // A test may print bytes that are not text.
                    let text = String::from_utf8_lossy(&stdout).into_owned();
                    let took = started.elapsed().as_secs_f64();
                    show(&format!("-- {}: {name} ({took:.1} s)\n{text}", self.platform));
                    (end, text)
                })
            };
            let mut result = turn();
            if emulated && matches!(result, Ok((None, _))) {
                show(&format!("{name} {late}; again:"));
                result = turn();
            }
            let result = result.map(|(end, text)| {
                text.lines().for_each(|line| tally.line(line.trim_end()));
                match end {
                    Some(status) if status.success() => None,
                    Some(status) => Some(format!("ended with {status}")),
                    None => Some(late),
                }
            });
            let fault = result.unwrap_or_else(|error| Some(format!("did not start: {error}")));
            failed.extend(fault.map(|why| format!("{name} {why}")));
        }
        Outcome { platform: self.platform, tally, failed, took: started.elapsed() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_the_messages_of_cargo() {
        let mut built = Built { tests: Vec::new(), started: Vec::new() };
        for line in [
            r#"{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","profile":{"test":false},"executable":null}"#,
            r#"{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","profile":{"test":true},"executable":"/w/t/deps/a_b-0f"}"#,
            r#"{"reason":"compiler-artifact","manifest_path":"/w/c/Cargo.toml","profile":{"test":false},"executable":"/w/t/c"}"#,
            r#"{"reason":"build-finished","success":true}"#,
            "no message",
        ] {
            built.take(line);
        }
        let [test] = &built.tests[..] else { panic!("one test") };
        assert!(test.is("a_b") && !test.is("a") && test.folder == Path::new("/w/a"));
        assert_eq!(built.started, [Path::new("/w/t/c")]);
    }

    #[test]
    fn a_name_that_no_test_has_is_a_fault() {
        let tests = ["a-0f", "b_c-1e"].map(|exe| Program { exe: exe.into(), folder: PathBuf::new() });
        assert_eq!(called(&tests, &[]).unwrap().len(), 2);
        assert!(called(&tests, &["b_c"]).unwrap()[0].is("b_c"));
        assert_eq!(called(&tests, &["a", "c"]).err().unwrap().to_string(), "no test is called c");
    }

    #[test]
    fn what_fails_is_counted_and_does_not_hide_what_follows() {
        let say = |text: &str, code: u8| {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("echo '{text}'; exit {code}")]);
            command
        };
        let check = |commands: Vec<Command>, passed: &str, failed: usize| {
            // Not shown: what these print would be counted again by whoever counts this test.
            let run = Run { platform: "here".to_owned(), commands, _needs: Box::new(()) };
            let outcome = run.run(LIMIT, |_| {});
            assert_eq!((outcome.tally.to_string().as_str(), outcome.failed.len()), (passed, failed));
        };
        let passed = "test result: ok. 2 passed; 0 failed; 0 ignored";
        check(vec![say(passed, 0), say(passed, 0)], "4 passed, 0 failed, 0 skipped", 0);
        check(vec![say("crashed", 101), say(passed, 0)], "2 passed, 0 failed, 0 skipped", 1);
        check(vec![Command::new("/nonexistent"), say(passed, 0)], "2 passed, 0 failed, 0 skipped", 1);
    }

    #[test]
    #[cfg(unix)]
    fn what_hangs_in_an_emulator_has_a_second_turn() {
        let check = |platform: &str, script: &str, passed: &str, failed: usize| {
            let folder = tempfile::tempdir().unwrap();
            let mut command = Command::new("sh");
            command.args(["-c", script]).current_dir(&folder);
            let run = Run { platform: platform.to_owned(), commands: vec![command], _needs: Box::new(()) };
            let outcome = run.run(Duration::from_millis(500), |_| {});
            assert_eq!(
                (outcome.tally.to_string().as_str(), outcome.failed.len()),
                (passed, failed),
                "{script}"
            );
        };
        let once =
            "echo 'test result: ok. 2 passed; 0 failed; 0 ignored'; [ -e seen ] || { touch seen; sleep 50; }";
        check("elsewhere (max)", once, "2 passed, 0 failed, 0 skipped", 0);
        check(&here(), once, "2 passed, 0 failed, 0 skipped", 1);
        check("elsewhere (max)", "sleep 50", "0 passed, 0 failed, 0 skipped", 1);
    }
}
