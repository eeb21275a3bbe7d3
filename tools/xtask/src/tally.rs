//! Sums what the test binaries of each platform print.
//!
//! A test may be left out only if its reason says so: `#[ignore = "optional: needs …"]`. Any other skipped test is one that was
//! wanted and did not run, and that is a failure, not a footnote. A test that finds out while it runs that it cannot (an instruction
//! set the machine lacks) prints `skipped: reason`; each reason counts once. Where nothing may be left out, that too has to be optional.

use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::fmt;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::process::shown;

const OPTIONAL: &str = "optional:";

/// What tests of one platform came to.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    passed: u64,
    failed: u64,
    ignored: u64,
    /// Reasons that tests printed.
    reasons: BTreeSet<String>,
    /// Names of skipped tests that do not call themselves optional.
    skipped_required: Vec<String>,
}

impl Tally {
    /// Takes one line of output; most lines say nothing here.
    pub(crate) fn line(&mut self, line: &str) {
        if let Some(counts) = line.strip_prefix("test result: ") {
            for part in counts.split(['.', ';']) {
                match part.trim().split_once(' ') {
                    Some((n, "passed")) => self.passed += n.parse().unwrap_or(0),
                    Some((n, "failed")) => self.failed += n.parse().unwrap_or(0),
                    Some((n, "ignored")) => self.ignored += n.parse().unwrap_or(0),
                    _ => {}
                }
            }
        } else if let Some(test) = line.strip_prefix("test ")
            && let Some((name, reason)) = test.split_once(" ... ignored")
            && !reason.trim_start_matches([',', ' ']).starts_with(OPTIONAL)
        {
            self.skipped_required.push(name.to_owned());
        } else if let Some(reason) = line.strip_prefix("skipped: ") {
            self.reasons.insert(reason.to_owned());
        }
    }

    fn skipped(&self) -> u64 {
        self.ignored + self.reasons.len() as u64
    }

    fn add(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
        self.reasons.extend(other.reasons);
        self.skipped_required.extend(other.skipped_required);
    }

    /// Counts a part that could not be run here at all.
    fn skip(&mut self, reason: String) {
        self.reasons.insert(reason);
    }

    /// Why this outcome fails the run, if it does; with `no_skips` that a test left itself out does, if it is not optional.
    fn fault(&self, no_skips: bool) -> Option<String> {
        let left_out = self.reasons.iter().find(|reason| no_skips && !reason.starts_with(OPTIONAL));
        if let Some(reason) = left_out {
            return Some(format!("nothing may be left out, but was: {reason}"));
        }
        if self.failed > 0 {
            return Some(format!("{} tests failed", self.failed));
        }
        if !self.skipped_required.is_empty() {
            return Some(format!("skipped, but not marked optional: {}", self.skipped_required.join(", ")));
        }
        (self.passed == 0).then(|| "no test ran".to_owned())
    }
}

/// The tallies of platforms, in the order in which their tests ran.
#[derive(Debug, Default)]
pub(crate) struct Tallies {
    platforms: Vec<(String, Tally)>,
    /// What cannot be run here fails the run instead of being left out.
    no_skips: bool,
}

impl Tallies {
    pub(crate) fn new(no_skips: bool) -> Tallies {
        Tallies { platforms: Vec::new(), no_skips }
    }

    fn of(&mut self, platform: &str) -> &mut Tally {
        let index = self.platforms.iter().position(|(name, _)| name == platform).unwrap_or_else(|| {
            self.platforms.push((platform.to_owned(), Tally::default()));
            self.platforms.len() - 1
        });
        &mut self.platforms[index].1
    }

    /// Runs `command`, a cargo that tests, shows what it prints and counts it for `platform`.
    ///
    /// # Errors
    /// If it fails, if a test failed or was left out without being optional, or if none ran.
    pub(crate) fn run(&mut self, platform: &str, mut command: Command) -> Result<()> {
        let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| shown(&command))?;
        let stdout = child.stdout.take().context("cargo test has no output to read")?;
        let mut tally = Tally::default();
        for line in BufReader::new(stdout).split(b'\n') {
            // A test may print bytes that are not text.
            let line = line?;
            let line = String::from_utf8_lossy(&line);
            println!("{line}");
            tally.line(line.trim_end());
        }
        let status = child.wait()?;
        self.add(platform, tally)?;
        ensure!(status.success(), "{} ended with {status}", shown(&command));
        Ok(())
    }

    /// Counts `tally` for `platform`.
    ///
    /// # Errors
    /// If a test failed or was left out without being optional, or if none ran.
    pub(crate) fn add(&mut self, platform: &str, tally: Tally) -> Result<()> {
        let fault = tally.fault(self.no_skips);
        self.of(platform).add(tally);
        ensure!(fault.is_none(), "{platform}: {}", fault.unwrap_or_default());
        Ok(())
    }

    /// What a platform's tests need, or `None` where it is missing and may be: that is said, and counted as one that was skipped.
    ///
    /// # Errors
    /// If it is missing and nothing may be left out.
    pub(crate) fn wanted<T>(&mut self, platform: &str, found: Result<T>) -> Result<Option<T>> {
        match found {
            Ok(found) => Ok(Some(found)),
            Err(e) if self.no_skips => Err(e),
            Err(e) => {
                println!("left out: {platform}: {e:#}");
                self.of(platform).skip(format!("{platform}: {e:#}"));
                Ok(None)
            }
        }
    }

    /// Whether a test of `platform`, on any of its processors, passed.
    pub(crate) fn ran(&self, platform: &str) -> bool {
        self.platforms
            .iter()
            .any(|(name, tally)| name.split(' ').next() == Some(platform) && tally.passed > 0)
    }
}

/// A line for each platform, then their sum.
impl fmt::Display for Tallies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut sum = [0; 3];
        for (platform, tally) in &self.platforms {
            writeln!(f, "{platform}: {tally}")?;
            let counts = [tally.passed, tally.failed, tally.skipped()];
            sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        let [passed, failed, skipped] = sum;
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(output: &str, summary: &str, fault: Option<&str>) {
        let mut tally = Tally::default();
        output.lines().for_each(|l| tally.line(l));
        assert_eq!(tally.to_string(), summary, "{output}");
        assert_eq!(tally.fault(false).as_deref(), fault, "{output}");
    }

    #[test]
    fn results_are_summed_and_faults_are_seen() {
        check("", "0 passed, 0 failed, 0 skipped", Some("no test ran"));
        check(
            "running 2 tests\ntest a ... ok\ntest b ... ok\n\n\
             test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n\
             test result: ok. 40 passed; 0 failed; 0 ignored; 0 measured; 7 filtered out; finished in 1.25s",
            "42 passed, 0 failed, 0 skipped",
            None,
        );
        check(
            "test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.08s\n\
             test result: ok. 5 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.08s",
            "8 passed, 1 failed, 0 skipped",
            Some("1 tests failed"),
        );
        check(
            "test gpu ... ignored, optional: needs a GPU\n\
             test result: ok. 1 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "1 passed, 0 failed, 1 skipped",
            None,
        );
        check(
            "skipped: no avx2\nskipped: no avx2\nskipped: no neon\n\
             test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "2 passed, 0 failed, 3 skipped",
            None,
        );
        check(
            "test slow ... ignored\ntest src/lib.rs - f (line 3) ... ignored\ntest big ... ignored, takes long\n\
             test result: ok. 1 passed; 0 failed; 3 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "1 passed, 0 failed, 3 skipped",
            Some("skipped, but not marked optional: slow, src/lib.rs - f (line 3), big"),
        );
    }

    #[test]
    fn where_nothing_may_be_left_out_only_what_is_optional_is() {
        for (reason, fault) in [("no avx2", true), ("optional: an emulator has no limits", false)] {
            let mut tally = Tally::default();
            tally.line("test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured");
            tally.line(&format!("skipped: {reason}"));
            assert_eq!((tally.fault(true).is_some(), tally.fault(false)), (fault, None), "{reason}");
        }
    }

    #[test]
    fn platforms_are_counted_apart_and_summed() {
        let mut tallies = Tallies::default();
        tallies.of("linux").line("test result: ok. 7 passed; 0 failed; 1 ignored; 0 measured");
        tallies.of("linux").line("skipped: no avx2");
        tallies.of("arm (max)").line("test result: ok. 5 passed; 0 failed; 0 ignored; 0 measured");
        tallies.of("arm (max)").line("skipped: no avx2");
        let missing = || Err::<(), _>(anyhow::anyhow!("no wine"));
        assert!(Tallies::new(true).wanted("windows", missing()).is_err());
        assert!(tallies.wanted("windows", missing()).unwrap().is_none());
        assert_eq!(
            tallies.to_string(),
            "linux: 7 passed, 0 failed, 2 skipped\n\
             arm (max): 5 passed, 0 failed, 1 skipped\n\
             windows: 0 passed, 0 failed, 1 skipped\n\
             12 passed, 0 failed, 4 skipped"
        );
        assert!(tallies.ran("linux") && tallies.ran("arm") && !tallies.ran("windows") && !tallies.ran("ar"));
    }
}
