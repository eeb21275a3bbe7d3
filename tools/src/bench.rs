//! `samara bench`: prefill and decode speed, with everything a figure needs to be believed later.
//!
//! Every repetition runs the same tokens from an empty cache, prefill and decode in turn, so slow drifts of the
//! machine hit both. The logits at the end must be the same bits each time; their hash says what was computed.

use std::{sync::atomic::AtomicBool, time::Instant};

use anyhow::Result;
use samara_runtime::{Engine, Session, adapters, argmax, format_bytes};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use crate::{
    cli::{Bench, Format},
    failure::Failure,
    load::{self, Wants},
    machine::Machine,
    output::{json as print_json, line},
};

/// Tokens that the warm-up decodes, after it has prefilled like the real thing.
const WARM_UP_DECODE: usize = 8;

pub(crate) fn run(args: &Bench) -> Result<()> {
    let (n_prompt, n_decode) = (args.prompt as usize, args.decode as usize);
    if n_prompt == 0 && n_decode == 0 {
        return Err(Failure::Usage("-p 0 -n 0 leaves nothing to measure".to_owned()).into());
    }
    let format = if args.json { Format::Json } else { args.format };
    let model = load::open(&args.model, &args.engine)?;
    // Decode starts after the prompt, or after one token where there is none.
    let context = n_prompt.max(1) + n_decode;
    if args.engine.ctx.is_some_and(|ctx| (ctx as usize) < context) {
        return Err(
            Failure::Usage(format!("-p {n_prompt} -n {n_decode} needs --ctx {context} or more")).into()
        );
    }
    let max = model.architecture().max_context;
    if context > max {
        return Err(Failure::Usage(format!(
            "-p {n_prompt} -n {n_decode} is {context} tokens; the model holds {max}"
        ))
        .into());
    }
    let mut engine =
        load::engine(&model, &args.engine, Wants { context, ..Wants::answers(format == Format::Text) })?;
    if engine.limits().context < context {
        return Err(Failure::Space(format!(
            "a context of {context} tokens does not fit; use a smaller -p or -n"
        ))
        .into());
    }
    let runs = measure(&mut engine, n_prompt, n_decode, args.repetitions as usize)?;
    let record = Record { args, engine: &engine, runs: &runs, machine: Machine::detect() };
    match format {
        Format::Json => print_json(&record.to_json())?,
        Format::Text => record.to_text().iter().try_for_each(|text| line(text))?,
        Format::Markdown => record.to_markdown().iter().try_for_each(|text| line(text))?,
    }
    Ok(())
}

/// What was measured.
#[derive(Debug)]
struct Runs {
    /// Tokens a second, one for each repetition; empty when left out.
    prefill: Vec<f64>,
    decode: Vec<f64>,
    /// xxh3-128 of the last logits, f32 little endian.
    logits_hash: u128,
    warm_up_seconds: f64,
}

fn measure(engine: &mut Engine, n_prompt: usize, n_decode: usize, repetitions: usize) -> Result<Runs> {
    let prompt = tokens(n_prompt.max(1), engine.model().architecture().vocab_size);
    let started = Instant::now();
    pass(engine, &prompt, n_decode.min(WARM_UP_DECODE))?;
    let warm_up_seconds = started.elapsed().as_secs_f64();
    let (mut prefill, mut decode, mut hashes) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..repetitions {
        let Pass { prefill_seconds, decode_seconds, logits_hash } = pass(engine, &prompt, n_decode)?;
        if n_prompt > 0 {
            prefill.push(n_prompt as f64 / prefill_seconds);
        }
        if n_decode > 0 {
            decode.push(n_decode as f64 / decode_seconds);
        }
        hashes.push(logits_hash);
    }
    let logits_hash = hashes[0];
    if hashes.iter().any(|hash| *hash != logits_hash) {
        return Err(Failure::Failed(
            "two repetitions computed different logits: do not trust this machine or build".to_owned(),
        )
        .into());
    }
    Ok(Runs { prefill, decode, logits_hash, warm_up_seconds })
}

struct Pass {
    prefill_seconds: f64,
    decode_seconds: f64,
    logits_hash: u128,
}

/// One prefill and one greedy decode from an empty cache.
fn pass(engine: &mut Engine, prompt: &[u32], n_decode: usize) -> Result<Pass> {
    let (mut session, mut logits) = (Session::new(0), Vec::new());
    session.clear(engine);
    let started = Instant::now();
    session.prefill(engine, prompt, &mut logits, &AtomicBool::new(false))?;
    let prefilled = Instant::now();
    for _ in 0..n_decode {
        let token = argmax(&logits);
        session.decode(engine, token as u32, &mut logits)?;
    }
    Ok(Pass {
        prefill_seconds: (prefilled - started).as_secs_f64(),
        decode_seconds: prefilled.elapsed().as_secs_f64(),
        logits_hash: xxh3_128(bytemuck::cast_slice(&logits)),
    })
}

/// Ids spread over the vocabulary, the same on every machine (Knuth's multiplicative hash).
fn tokens(n: usize, vocab_size: usize) -> Vec<u32> {
    (0..n as u64).map(|i| (i.wrapping_mul(2_654_435_761) % vocab_size as u64) as u32).collect()
}

/// The middle of the sorted values, the mean of two when their number is even.
fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    (n > 0).then(|| (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0)
}

/// Slowest and fastest.
fn spread(values: &[f64]) -> Option<[f64; 2]> {
    let min = values.iter().copied().min_by(f64::total_cmp)?;
    let max = values.iter().copied().max_by(f64::total_cmp)?;
    Some([min, max])
}

struct Record<'a> {
    args: &'a Bench,
    engine: &'a Engine,
    runs: &'a Runs,
    machine: Machine,
}

impl Record<'_> {
    fn bytes_per_token(&self) -> u64 {
        self.engine.model().decode_bytes()
    }

    fn gb_per_s(&self) -> Option<f64> {
        median(&self.runs.decode).map(|rate| rate * self.bytes_per_token() as f64 / 1e9)
    }

    fn to_json(&self) -> Value {
        let Record { args, engine, runs, machine } = self;
        let (limits, index) = (engine.limits(), engine.model().file().index());
        json!({
            "prefill": {
                "tokens": args.prompt, "tokens_per_s": median(&runs.prefill), "spread": spread(&runs.prefill),
            },
            "decode": {
                "tokens": args.decode, "tokens_per_s": median(&runs.decode), "spread": spread(&runs.decode),
                "gb_per_s": self.gb_per_s(), "bytes_per_token": self.bytes_per_token(),
            },
            "logits_hash": format!("{:032x}", runs.logits_hash),
            "kernels": load::kernel_names(engine.placements()),
            "placements": load::explain(engine.placements()),
            "machine": machine.to_json(&adapters()),
            "threads": limits.threads,
            "context": limits.context,
            "repetitions": args.repetitions,
            "warm_up_seconds": runs.warm_up_seconds,
            "file": {
                "name": args.model.file_name().unwrap_or_default().to_string_lossy(),
                "bytes": index.file_len(),
                "digest": format!("{:032x}", index.header().digest()),
            },
            "version": env!("CARGO_PKG_VERSION"),
        })
    }

    fn rows(&self) -> Vec<(String, String)> {
        let Record { args, engine, runs, machine: _ } = self;
        let mut rows = Vec::new();
        let mut row = |name: &str, n: u32, rates: &[f64]| {
            if let (Some(rate), Some([min, max])) = (median(rates), spread(rates)) {
                rows.push((format!("{name} {n}"), format!("{rate:.2} tok/s ({min:.2} to {max:.2})")));
            }
        };
        row("prefill", args.prompt, &runs.prefill);
        row("decode", args.decode, &runs.decode);
        if let Some(rate) = self.gb_per_s() {
            rows.push((
                "weights read".into(),
                format!("{rate:.2} GB/s, {} bytes a token", self.bytes_per_token()),
            ));
        }
        rows.push(("logits hash".into(), format!("{:032x}", runs.logits_hash)));
        rows.push(("threads".into(), engine.limits().threads.to_string()));
        rows.extend(load::explain(engine.placements()).into_iter().map(|text| ("runs".to_owned(), text)));
        rows
    }

    fn context(&self) -> String {
        let Record { args, engine, runs, machine } = self;
        let index = engine.model().file().index();
        format!(
            "{} ({} threads usable), {} RAM, {}; file {} ({}, digest {:032x}); medians of {} after {:.1} s of warm-up; \
             samara {}",
            machine.cpu,
            machine.threads,
            format_bytes(machine.memory_total),
            machine.system,
            args.model.file_name().unwrap_or_default().to_string_lossy(),
            format_bytes(index.file_len()),
            index.header().digest(),
            args.repetitions,
            runs.warm_up_seconds,
            env!("CARGO_PKG_VERSION"),
        )
    }

    fn to_text(&self) -> Vec<String> {
        let mut lines: Vec<String> =
            self.rows().into_iter().map(|(name, value)| format!("{name:<14}{value}")).collect();
        lines.push(self.context());
        lines
    }

    fn to_markdown(&self) -> Vec<String> {
        let mut lines = vec!["| what | result |".to_owned(), "|---|---|".to_owned()];
        lines.extend(self.rows().into_iter().map(|(name, value)| format!("| {name} | {value} |")));
        lines.extend([String::new(), self.context()]);
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_spreads() {
        let check = |values: &[f64], middle: Option<f64>, ends: Option<[f64; 2]>| {
            assert_eq!((median(values), spread(values)), (middle, ends), "{values:?}");
        };
        check(&[], None, None);
        check(&[3.0], Some(3.0), Some([3.0, 3.0]));
        check(&[4.0, 1.0], Some(2.5), Some([1.0, 4.0]));
        check(&[9.0, 1.0, 2.0], Some(2.0), Some([1.0, 9.0]));
    }

    #[test]
    fn prompt_tokens_are_in_the_vocabulary_and_differ() {
        let ids = tokens(1000, 4096);
        assert!(ids.iter().all(|id| *id < 4096));
        assert!(ids[..100].iter().collect::<std::collections::HashSet<_>>().len() > 90);
        assert!(tokens(0, 4096).is_empty());
    }
}
