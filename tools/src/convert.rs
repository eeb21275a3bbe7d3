//! `samara convert`: plan, show, carry out, report.

use std::path::Path;

use anyhow::{Context, Result};
use samara_converter::{
    Counts, Error, FlashHead, Options, Plan, PlanSummary, Report, check_target, convert, plan,
};
use samara_runtime::{ChatTemplate, Message, RenderOptions, TextError, Tokenizer, format_bytes};
use serde_json::json;

use crate::{
    cli,
    failure::Failure,
    interrupt::{self, CANCEL},
    output::{json as print_json, line, note},
    progress::Reporter,
    shell,
};

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const TEMPLATE: &str = "chat_template.jinja";

pub(crate) fn run(args: &cli::Convert) -> Result<()> {
    let options = options(args)?;
    let plan = plan(&args.checkpoint, &options).map_err(|error| in_words_of_this_program(error, args))?;
    check_texts(&plan, &args.checkpoint)?;
    if args.dry_run {
        return show_plan(args, &plan, &options);
    }
    if !args.json && !args.quiet {
        headline(plan.summary()).iter().for_each(|text| note(text));
    }
    let report = carry_out(&plan, args, &options)?;
    if args.json {
        let mut report = serde_json::to_value(&report).context("the report is not JSON")?;
        if let Some(object) = report.as_object_mut() {
            object.insert("event".to_owned(), json!("report"));
            object.insert("notes".to_owned(), json!(plan.summary().notes));
        }
        // One object a line, like the progress before it.
        line(&report.to_string())?;
    } else if !args.quiet {
        proof(&report).iter().try_for_each(|text| line(text))?;
    }
    Ok(())
}

/// Head rows in a FlashHead cluster, as in Maple-Preview.
const CLUSTER_SIZE: u64 = 32;

fn options(args: &cli::Convert) -> Result<Options, Failure> {
    let flash_head = match (args.flash_head, args.cluster_size) {
        (cli::FlashHead::Build, size) => FlashHead::Build { cluster_size: size.unwrap_or(CLUSTER_SIZE) },
        (_, Some(_)) => return Err(Failure::Usage("--cluster-size needs --flash-head build".to_owned())),
        (cli::FlashHead::Auto, None) => FlashHead::Auto,
        (cli::FlashHead::None, None) => FlashHead::None,
    };
    Ok(Options {
        window: args.window,
        ternarize: args.ternarize,
        flash_head,
        force: args.force,
        resume: args.resume,
        threads: args.threads.count(),
        name: args.name.clone(),
        license: args.license.clone(),
        source_repository: args.source_repository.clone(),
        source_revision: args.source_revision.clone(),
    })
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
    let again = |flags: &[&str]| again(args, flags);
    // A file that --force was to replace is still there, and --resume does not replace.
    let go_on = || match args.output.symlink_metadata() {
        Ok(_) => format!("to start over: {}", again(&["--force"])),
        Err(_) => format!("to go on: {}", again(&["--resume"])),
    };
    let hint = match &error {
        Error::Cancelled { kept: Some(_) } | Error::DiskFull { .. } => go_on(),
        Error::UnfinishedExists { .. } => {
            format!("to go on: {}\nto start over: {}", again(&["--resume"]), again(&["--force"]))
        }
        Error::OutputExists { .. } | Error::StaleJournal { .. } | Error::JournalDamaged { .. } => {
            format!("to replace it: {}", again(&["--force"]))
        }
        Error::SourceChanged { .. } | Error::VerifyFailed { .. } => {
            format!("to start over: {}", again(&["--force"]))
        }
        Error::Format(samara_format::Error::InUse { .. }) => {
            let remove = match args.output.symlink_metadata() {
                Ok(_) => format!("remove {}, then: ", shell::path(&args.output)),
                Err(_) => String::new(),
            };
            format!("to go on when nothing uses it any more: {remove}{}", again(&["--resume"]))
        }
        Error::NotTernary { .. } => {
            let force = args.force || samara_format::part_path(&args.output).exists();
            let flags: &[&str] = if force { &["--ternarize", "--force"] } else { &["--ternarize"] };
            format!("to round such rows: {}", again(flags))
        }
        error if is_of_flash_data(error) && args.flash_head == cli::FlashHead::Auto => format!(
            "to build FlashHead data: {}\nto leave them out: {}",
            again(&["--flash-head build"]),
            again(&["--flash-head none"])
        ),
        _ => return error.into(),
    };
    Failure::Hinted(Box::new(error), hint).into()
}

/// Whether it is the checkpoint's FlashHead data that cannot be used.
fn is_of_flash_data(error: &Error) -> bool {
    match error {
        Error::ForceTokens { .. } | Error::CentroidsNotScaled { .. } | Error::TokenMap { .. } => true,
        Error::ConfigValue { key, .. } | Error::ConfigMissing { key } => key.starts_with("flash_head"),
        _ => false,
    }
}

/// The command that was given, with other flags for what to do with files in the way.
fn again(args: &cli::Convert, flags: &[&str]) -> String {
    // Destructured whole, so that an option added later is not forgotten here.
    let cli::Convert {
        checkpoint,
        output,
        window,
        ternarize,
        flash_head,
        cluster_size,
        force: _,
        resume: _,
        dry_run: _,
        name,
        license,
        source_repository,
        source_revision,
        json,
        quiet,
        threads,
    } = args;
    let mut command = format!("samara convert {} -o {}", shell::path(checkpoint), shell::path(output));
    let mut push = |word: &str| {
        command.push(' ');
        command.push_str(word);
    };
    if let Some(window) = window {
        push(&format!("--window {window}"));
    }
    match (flash_head, cluster_size) {
        (cli::FlashHead::Auto, _) => {}
        (cli::FlashHead::None, _) => push("--flash-head none"),
        (cli::FlashHead::Build, None) => push("--flash-head build"),
        (cli::FlashHead::Build, Some(size)) => push(&format!("--flash-head build --cluster-size {size}")),
    }
    let texts = [
        ("--name", name),
        ("--license", license),
        ("--source-repository", source_repository),
        ("--source-revision", source_revision),
    ];
    for (option, text) in texts {
        if let Some(text) = text {
            push(&shell::option(option, text));
        }
    }
    if threads.count() > 0 {
        push(&format!("-t {}", threads.count()));
    }
    for (given, flag) in [(*json, "--json"), (*quiet, "--quiet"), (*ternarize, "--ternarize")] {
        if given && !flags.contains(&flag) {
            push(flag);
        }
    }
    flags.iter().for_each(|flag| push(flag));
    command
}

/// Has the tokenizer and the chat template answer for themselves, before an hour of work and not after it.
fn check_texts(plan: &Plan, checkpoint: &Path) -> Result<()> {
    let (tokenizer, template) = plan.texts()?;
    let wrong = |file: &str, error: TextError| {
        Failure::Input(format!("{}: {error}", checkpoint.join(file).display()))
    };
    let tokenizer = Tokenizer::from_json(tokenizer).map_err(|error| wrong(TOKENIZER, error))?;
    let place = if checkpoint.join(TEMPLATE).is_file() { TEMPLATE } else { TOKENIZER_CONFIG };
    let question = [Message::new("user", "Name three trees.")];
    let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let pieces = ChatTemplate::new(template, &tokenizer)
        .and_then(|template| template.render(&question, options))
        .map_err(|error| wrong(place, error))?;
    tokenizer.encode_pieces(&pieces).map_err(|error| wrong(TOKENIZER, error))?;
    Ok(())
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

fn show_plan(args: &cli::Convert, plan: &Plan, options: &Options) -> Result<()> {
    check_target(plan, &args.output, options).map_err(|error| in_words_of_this_program(error, args))?;
    let summary = plan.summary();
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
