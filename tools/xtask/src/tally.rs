//! Sums what the test binaries of one `cargo test` print.
//!
//! A test may be left out only if its reason says so: `#[ignore = "optional: needs …"]`. Any other skipped test is one that was
//! wanted and did not run, and that is a failure, not a footnote. A test that finds out while it runs that it cannot (an instruction
//! set the machine lacks) prints `skipped: reason`; each reason counts once.

use std::{collections::BTreeSet, fmt};

const OPTIONAL: &str = "optional:";

#[derive(Debug, Default, PartialEq, Eq)]
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

    /// Why this outcome fails the run, if it does.
    pub(crate) fn fault(&self) -> Option<String> {
        if self.failed > 0 {
            return Some(format!("{} tests failed", self.failed));
        }
        if !self.skipped_required.is_empty() {
            return Some(format!("skipped, but not marked optional: {}", self.skipped_required.join(", ")));
        }
        (self.passed == 0).then(|| "no test ran".to_owned())
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let skipped = self.ignored + self.reasons.len() as u64;
        write!(f, "{} passed, {} failed, {skipped} skipped", self.passed, self.failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(output: &str, summary: &str, fault: Option<&str>) {
        let mut tally = Tally::default();
        output.lines().for_each(|l| tally.line(l));
        assert_eq!(tally.to_string(), summary, "{output}");
        assert_eq!(tally.fault().as_deref(), fault, "{output}");
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
}
