//! `samara convert`: plan, show, carry out, report.

use std::path::Path;

use anyhow::{Context, Result};
use samara_converter::{Counts, Error, Options, Plan, PlanSummary, Report, convert, plan};
use samara_runtime::format_bytes;
use serde_json::json;

use crate::{
    cli,
    failure::Failure,
    interrupt::{self, CANCEL},
    output::{json as print_json, line, note},
    progress::Reporter,
};

pub(crate) fn run(args: &cli::Convert) -> Result<()> {
    let options = options(args);
    let plan = plan(&args.checkpoint, &options)?;
    if args.dry_run {
        return show_plan(args, plan.summary());
    }
    if !args.json && !args.quiet {
        headline(plan.summary()).iter().for_each(|text| note(text));
    }
    let report = carry_out(&plan, args, &options)?;
    if args.json {
        let mut report = serde_json::to_value(&report).context("the report is not JSON")?;
        if let Some(object) = report.as_object_mut() {
            object.insert("event".to_owned(), json!("report"));
        }
        // One object a line, like the progress before it.
        line(&report.to_string())?;
    } else if !args.quiet {
        proof(&report).iter().try_for_each(|text| line(text))?;
    }
    Ok(())
}

fn options(args: &cli::Convert) -> Options {
    Options {
        window: args.window,
        ternarize: args.ternarize,
        force: args.force,
        resume: args.resume,
        threads: args.threads.count(),
        name: args.name.clone(),
        license: args.license.clone(),
        source_repository: args.source_repository.clone(),
        source_revision: args.source_revision.clone(),
    }
}

fn carry_out(plan: &Plan, args: &cli::Convert, options: &Options) -> Result<Report> {
    interrupt::listen()?;
    let reporter = Reporter::new(args.json, args.quiet);
    let result = convert(plan, &args.output, options, &reporter, &CANCEL);
    reporter.finish();
    result.map_err(|error| in_words_of_this_program(error, args))
}

/// The library speaks of its options; here they are flags, and there is a command to repeat.
fn in_words_of_this_program(error: Error, args: &cli::Convert) -> anyhow::Error {
    let (from, to) = (quoted(&args.checkpoint), quoted(&args.output));
    let again = |flag: &str| format!("samara convert {from} -o {to} {flag}");
    let hint = match &error {
        Error::Cancelled { kept: None } => return error.into(),
        Error::Cancelled { kept: Some(_) } => format!("to go on: {}", again("--resume")),
        Error::UnfinishedExists { .. } => {
            format!("to go on: {}\nto start over: {}", again("--resume"), again("--force"))
        }
        Error::DiskFull { .. } => format!("then: {}", again("--resume")),
        Error::OutputExists { .. } | Error::StaleJournal { .. } => {
            format!("to replace it: {}", again("--force"))
        }
        Error::NotTernary { .. } => format!("to round such rows: {}", again("--ternarize")),
        _ => return error.into(),
    };
    Failure::Hinted(Box::new(error), hint).into()
}

/// A path as it can be typed.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/\\:._-+@~".contains(c);
    if !text.is_empty() && text.chars().all(plain) { text } else { format!("\"{text}\"") }
}

fn headline(summary: &PlanSummary) -> Vec<String> {
    let mut lines = vec![format!(
        "{}: {} checkpoint ({}), {} tensors, {}",
        summary.source.display(),
        summary.architecture,
        summary.kind,
        summary.source_tensors,
        format_bytes(summary.source_bytes)
    )];
    lines.extend(summary.notes.iter().map(|text| format!("note: {text}")));
    lines
}

fn show_plan(args: &cli::Convert, summary: &PlanSummary) -> Result<()> {
    if args.json {
        return Ok(print_json(&serde_json::to_value(summary).context("the plan is not JSON")?)?);
    }
    headline(summary).iter().try_for_each(|text| line(text))?;
    let width = summary.tensors.iter().map(|tensor| tensor.name.len()).max().unwrap_or(0);
    for tensor in &summary.tensors {
        let blocks = if tensor.blocks > 1 { format!("{} blocks of ", tensor.blocks) } else { String::new() };
        let parts = tensor.parts.join(", ");
        line(&format!("  {:width$}  {:>14}  {blocks}{parts}", tensor.name, tensor.bytes))?;
    }
    let flash =
        if summary.flash_head { "head in cluster order, with FlashHead data" } else { "head in token order" };
    line(&format!("window {} keys; {flash}", summary.window))?;
    line(&format!(
        "would write {} tensors, {}, to {}; at most {} of memory",
        summary.tensors.len(),
        format_bytes(summary.output_bytes),
        args.output.display(),
        format_bytes(summary.peak_memory_bytes)
    ))?;
    Ok(())
}

/// The finished file and what was proven about it.
pub(crate) fn proof(report: &Report) -> Vec<String> {
    let Counts { rows, zero_rows, negative_zeros, ternarized_rows, near_threshold, .. } = &report.counts;
    let mut lines = Vec::new();
    if *ternarized_rows == 0 {
        lines.push(format!(
            "lossless: all {rows} ternary rows checked ({zero_rows} all zero, {negative_zeros} weights of -0.0)"
        ));
    } else {
        lines.push(format!(
            "{rows} ternary rows ({zero_rows} all zero, {negative_zeros} weights of -0.0); {ternarized_rows} were not \
             ternary and were rounded ({near_threshold} weights near the threshold)"
        ));
    }
    let resumed = match report.resumed_tensors {
        0 => String::new(),
        n => format!(", {n} of them from before the interruption"),
    };
    let seconds = report.hash_seconds + report.convert_seconds + report.verify_seconds;
    lines.push(format!(
        "{}: {} in {} tensors{resumed}, read back and right, {:.1} s",
        report.output.display(),
        format_bytes(report.output_bytes),
        report.tensors,
        seconds.as_secs_f64()
    ));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_quoted_where_a_shell_would_cut_them() {
        let check = |path: &str, want: &str| assert_eq!(quoted(Path::new(path)), want);
        check("a/b-c.samara", "a/b-c.samara");
        check("модель.samara", "модель.samara");
        check("a b", "\"a b\"");
        check("", "\"\"");
        check("a;b", "\"a;b\"");
    }
}
