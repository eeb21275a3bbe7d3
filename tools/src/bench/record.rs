//! The figures, and what belongs to them, as text, markdown or JSON.

use std::ops::Range;

use samara_runtime::{Bandwidth, Engine, adapters, format_bytes};
use serde_json::{Value, json};

use super::{
    Runs,
    count::{kv_bytes, prefill_macs},
    profile::share_of,
};
use crate::{cli::Bench, head::HeadReport, load, machine::Machine};

/// A model whose experts are fewer bytes than this may stay in a machine's caches.
const CACHE: u64 = 64 << 20;

pub(super) struct Record<'a> {
    pub(super) args: &'a Bench,
    pub(super) engine: &'a Engine,
    pub(super) runs: &'a Runs,
    pub(super) machine: Machine,
}

/// The better of the measurements, GB/s.
#[derive(Clone, Copy)]
struct Bound {
    sequential: f64,
    expert_blocks: f64,
    block_bytes: u64,
    in_cache: bool,
}

impl Record<'_> {
    fn bound(&self) -> Option<Bound> {
        let runs = &self.runs.bandwidth;
        let best = |of: fn(&Bandwidth) -> f64| runs.iter().map(of).fold(0.0, f64::max);
        runs.first().map(|first| Bound {
            sequential: best(|run| run.sequential.best),
            expert_blocks: best(|run| run.expert_blocks.best),
            block_bytes: first.block_bytes,
            in_cache: first.bytes_read <= CACHE,
        })
    }

    /// The better measurement of the GPU's memory, GB/s, where it has the whole model.
    fn device_bound(&self) -> Option<f64> {
        let whole = self.runs.bandwidth.is_empty();
        self.runs.device_bandwidth.iter().copied().filter(|_| whole).max_by(f64::total_cmp)
    }

    /// Where the prompt is.
    fn prompt_positions(&self) -> Range<usize> {
        let depth = self.args.depth as usize;
        depth..depth + self.args.prompt as usize
    }

    /// Keys and values that a token of decode reads, the mean over those that were decoded.
    fn kv_bytes_per_token(&self) -> u64 {
        let Bench { depth, prompt, decode, .. } = self.args;
        let (first, n) = ((*depth + *prompt.max(&1)) as usize, *decode as usize);
        (first..first + n).map(|position| kv_bytes(self.engine, position)).sum::<u64>() / n.max(1) as u64
    }

    /// Weights that a token of decode reads.
    fn weight_bytes_per_token(&self) -> u64 {
        let model = self.engine.model();
        let all = model.decode_bytes();
        self.runs.head_bytes.map_or(all, |head| all - model.head_bytes() + head as u64)
    }

    fn bytes_per_token(&self) -> u64 {
        self.weight_bytes_per_token() + self.kv_bytes_per_token()
    }

    fn prefill_gb_per_s(&self) -> Option<f64> {
        let per_token = self.runs.prefill_bytes? as f64 / f64::from(self.args.prompt);
        median(&self.runs.prefill).map(|rate| rate * per_token / 1e9)
    }

    /// Billions of multiply-adds a second.
    fn prefill_gmac_per_s(&self) -> Option<f64> {
        let macs = prefill_macs(&self.engine.model().architecture().blocks, self.prompt_positions());
        let per_token = macs as f64 / f64::from(self.args.prompt);
        median(&self.runs.prefill).map(|rate| rate * per_token / 1e9)
    }

    fn decode_gb_per_s(&self) -> Option<f64> {
        median(&self.runs.decode).map(|rate| rate * self.bytes_per_token() as f64 / 1e9)
    }

    pub(super) fn to_json(&self) -> Value {
        let Record { args, engine, runs, machine } = self;
        let (limits, index) = (engine.limits(), engine.model().file().index());
        let bound = self.bound();
        let (sequential, blocks) = (bound.map(|b| b.sequential), bound.map(|b| b.expert_blocks));
        let (prefill, decode) = (self.prefill_gb_per_s(), self.decode_gb_per_s());
        json!({
            "prefill": {
                "tokens": args.prompt, "tokens_per_s": median(&runs.prefill), "spread": spread(&runs.prefill),
                "gb_per_s": prefill, "bytes": runs.prefill_bytes,
                "share_of_sequential": share_of(prefill, sequential),
                "share_of_expert_blocks": share_of(prefill, blocks),
                "gmac_per_s": self.prefill_gmac_per_s(),
            },
            "decode": {
                "tokens": args.decode, "depth": args.depth, "tokens_per_s": median(&runs.decode), "spread": spread(&runs.decode),
                "gb_per_s": decode, "bytes_per_token": self.bytes_per_token(),
                "weight_bytes_per_token": self.weight_bytes_per_token(),
                "kv_bytes_per_token": self.kv_bytes_per_token(),
                "share_of_sequential": share_of(decode, sequential),
                "share_of_expert_blocks": share_of(decode, blocks),
                "share_of_gpu": share_of(decode, self.device_bound()),
                "submissions_per_token": runs.submissions, "dispatches_per_token": runs.dispatches,
            },
            "bandwidth": bound.map(|bound| json!({
                "sequential_gb_per_s": bound.sequential, "expert_blocks_gb_per_s": bound.expert_blocks,
                "block_bytes": bound.block_bytes, "in_cache": bound.in_cache,
                "runs": runs.bandwidth.iter().map(bandwidth_json).collect::<Vec<_>>(),
            })),
            "gpu_bandwidth_gb_per_s": runs.device_bandwidth,
            "head": runs.head.map(HeadReport::to_json),
            "profile": runs.profile.as_ref().map(|profile| profile.to_json(blocks)),
            "logits_hash": format!("{:032x}", runs.logits_hash),
            "kernels": load::kernel_names(engine.placements()),
            "placements": load::explain(engine.placements()),
            "reasons": engine.reasons(),
            "machine": machine.to_json(&adapters()),
            "threads": limits.threads,
            "threads_used": engine.threads().map(|used| json!({ "prefill": used.prefill, "decode": used.decode })),
            "context": limits.context,
            "kv": limits.kv.name(),
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
        let bound = self.bound();
        let mut rows = Vec::new();
        let depth = if args.depth > 0 { format!(" at {}", args.depth) } else { String::new() };
        let mut row = |name: &str, n: u32, rates: &[f64], gb_per_s: Option<f64>| {
            let (Some(rate), Some([min, max])) = (median(rates), spread(rates)) else { return };
            let mut text = format!("{rate:.2} tok/s ({min:.2} to {max:.2})");
            if let Some(gb_per_s) = gb_per_s {
                text += &format!(", {gb_per_s:.2} GB/s");
                if let Some(bound) = self.device_bound() {
                    let percent = 100.0 * gb_per_s / bound;
                    text += &format!(": {percent:.1} % of the {bound:.0} GB/s that the GPU reads");
                }
                if let Some(Bound { sequential, expert_blocks, .. }) = bound {
                    let percent = |bound: f64| 100.0 * gb_per_s / bound;
                    let (blocks, sequential) = (percent(expert_blocks), percent(sequential));
                    text += &format!(": {blocks:.1} % of expert blocks, {sequential:.1} % of sequential");
                }
            }
            rows.push((format!("{name} {n}{depth}"), text));
        };
        row("prefill", args.prompt, &runs.prefill, self.prefill_gb_per_s());
        row("decode", args.decode, &runs.decode, self.decode_gb_per_s());
        if let Some(Bound { sequential, expert_blocks, block_bytes, in_cache }) = bound {
            let place = if in_cache { "; in cache" } else { "" };
            rows.push((
                "bandwidth".into(),
                format!(
                    "{expert_blocks:.2} GB/s expert blocks ({block_bytes} bytes), {sequential:.2} GB/s \
                     sequential{place}"
                ),
            ));
        }
        if let Some(rate) = self.prefill_gmac_per_s() {
            rows.push(("prefill does".into(), format!("{rate:.1} billion multiply-adds a second")));
        }
        if args.decode > 0 {
            let (weights, kv) = (self.weight_bytes_per_token(), self.kv_bytes_per_token());
            rows.push((
                "decode reads".into(),
                format!("{weights} bytes of weights and {kv} of cache a token"),
            ));
        }
        if let (Some(submissions), Some(dispatches)) = (runs.submissions, runs.dispatches) {
            rows.push((
                "decode asks".into(),
                format!("the GPU for {dispatches:.1} dispatches in {submissions:.2} submissions a token"),
            ));
        }
        rows.extend(runs.head.map(|head| ("head".to_owned(), head.to_text())));
        rows.push(("logits hash".into(), format!("{:032x}", runs.logits_hash)));
        let used = engine
            .threads()
            .map(|used| format!(": {} for prefill, {} for decode", used.prefill, used.decode));
        rows.push(("threads".into(), format!("{}{}", engine.limits().threads, used.unwrap_or_default())));
        rows.extend(load::explain(engine.placements()).into_iter().map(|text| ("runs".to_owned(), text)));
        rows.extend(engine.reasons().iter().map(|text| ("why".to_owned(), text.clone())));
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

    pub(super) fn to_text(&self) -> Vec<String> {
        let mut lines: Vec<String> =
            self.rows().into_iter().map(|(name, value)| format!("{name:<20}{value}")).collect();
        lines.push(self.context());
        let blocks = self.bound().map(|bound| bound.expert_blocks);
        lines.extend(self.runs.profile.iter().flat_map(|profile| profile.to_text(blocks)));
        lines
    }

    pub(super) fn to_markdown(&self) -> Vec<String> {
        let mut lines = vec!["| what | result |".to_owned(), "|---|---|".to_owned()];
        lines.extend(self.rows().into_iter().map(|(name, value)| format!("| {name} | {value} |")));
        lines.extend([String::new(), self.context()]);
        let blocks = self.bound().map(|bound| bound.expert_blocks);
        lines.extend(self.runs.profile.iter().flat_map(|profile| profile.to_markdown(blocks)));
        lines
    }
}

fn bandwidth_json(run: &Bandwidth) -> Value {
    let Bandwidth { sequential, expert_blocks, block_bytes: _, bytes_read } = run;
    json!({
        "sequential_gb_per_s": sequential.best, "sequential_median_gb_per_s": sequential.median,
        "expert_blocks_gb_per_s": expert_blocks.best, "expert_blocks_median_gb_per_s": expert_blocks.median,
        "bytes_read": bytes_read,
    })
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
}
