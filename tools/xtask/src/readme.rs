//! README's table of platforms is a promise: what it calls tested has to be tested.

use crate::process::root;
use crate::tally::Tallies;
use anyhow::{Result, ensure};

/// Fails if a platform that README calls tested passed no test in this run. Where parts may be left out, that is said by the part.
///
/// # Errors
/// Names those platforms; also if README has no such table.
pub(crate) fn check(tallies: &Tallies, no_skips: bool) -> Result<()> {
    let tested = tested(&std::fs::read_to_string(root().join("README.md"))?);
    ensure!(!tested.is_empty(), "there is no table with a column \"tests run\" that names a tested platform");
    let missing: Vec<_> = tested.into_iter().filter(|platform| no_skips && !tallies.ran(platform)).collect();
    ensure!(missing.is_empty(), "called tested, but no test passed there: {}", missing.join(", "));
    Ok(())
}

/// The first cells of the rows whose cell under "tests run" says yes.
fn tested(readme: &str) -> Vec<String> {
    let cells = |line: &str| -> Vec<String> {
        line.trim().trim_matches('|').split('|').map(|cell| cell.trim().replace('`', "")).collect()
    };
    let mut lines = readme.lines().map(cells).skip_while(|row| !row.iter().any(|cell| cell == "tests run"));
    let Some(head) = lines.next() else { return Vec::new() };
    let column = head.iter().position(|cell| cell == "tests run").unwrap_or_default();
    lines
        .take_while(|row| row.len() == head.len())
        .filter(|row| row[column].starts_with("yes"))
        .map(|row| row[0].clone())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_say_yes_are_tested() {
        let readme = "text\n| platform | builds | tests run |\n|---|---|---|\n| `a` | yes | yes, by wine |\n\
                      | b | yes | no |\n| c | no | yes |\n\n| d | yes | yes |\n";
        assert_eq!(tested(readme), ["a", "c"]);
        assert!(tested("| platform | builds |\n|---|---|\n| a | yes |").is_empty());
    }

    #[test]
    fn a_tested_platform_without_a_test_is_a_fault() {
        let error = check(&Tallies::default(), true).unwrap_err().to_string();
        assert!(error.contains("linux-x86_64"), "{error}");
        check(&Tallies::default(), false).unwrap();
    }
}
