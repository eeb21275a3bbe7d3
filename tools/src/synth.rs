//! `samara synth`: a checkpoint of made-up weights, at any size.

use anyhow::{Context, Result};
use samara_converter::{SynthFlash, SynthLayout, SynthSpec, SynthTexts, synthesise};
use samara_runtime::format_bytes;
use serde_json::json;

use crate::{
    cli::{Layout, Synth, SynthSizes},
    demo::embedded_text,
    interrupt::{self, CANCEL},
    output::{line, note},
    progress::Reporter,
};

pub(crate) fn run(args: &Synth) -> Result<()> {
    let spec = spec(args);
    let (n_tensors, payload) = spec.payload()?;
    if !args.json && !args.quiet {
        note(&format!("{n_tensors} tensors, {payload} bytes ({}) of weights", format_bytes(payload)));
    }
    let text = |name: &str| embedded_text(name).with_context(|| format!("{name} is not built in"));
    let texts =
        SynthTexts { tokenizer: text("tokenizer.json")?, chat_template: text("chat_template.jinja")? };
    interrupt::listen()?;
    let reporter = Reporter::new(args.json, args.quiet);
    let result = synthesise(&spec, &texts, &args.output, &reporter, &CANCEL);
    reporter.finish();
    let report = result?;
    if args.json {
        let mut report = serde_json::to_value(&report).context("the report is not JSON")?;
        if let Some(object) = report.as_object_mut() {
            object.insert("event".to_owned(), json!("report"));
            object.insert("spec".to_owned(), serde_json::to_value(&spec).context("the sizes are not JSON")?);
        }
        line(&report.to_string())?;
    } else if !args.quiet {
        line(&format!(
            "{}: {} tensors, {} bytes of weights, {} files",
            args.output.display(),
            report.tensors,
            report.payload_bytes,
            report.files.len()
        ))?;
    }
    Ok(())
}

/// The tiny or the full model with the sizes that were given over it.
fn spec(args: &Synth) -> SynthSpec {
    let layout = match args.layout {
        Layout::Mlx => SynthLayout::Mlx2Bit,
        Layout::Hf => SynthLayout::HuggingFace,
    };
    let mut spec = if args.full { SynthSpec::full(layout) } else { SynthSpec::tiny(layout) };
    spec.seed = args.seed;
    spec.strong_clusters = args.sizes.strong_clusters;
    let no_flash = args.sizes.no_flash;
    resize(&mut spec, args.sizes);
    spec.flash = spec.flash.filter(|_| !no_flash).map(|flash| fit(flash, spec.vocab_size));
    spec
}

/// Puts the sizes that were given over those of `spec`.
fn resize(spec: &mut SynthSpec, sizes: SynthSizes) {
    for (size, given) in [
        (&mut spec.vocab_size, sizes.vocab_size),
        (&mut spec.hidden_size, sizes.hidden_size),
        (&mut spec.n_layers, sizes.n_layers),
        (&mut spec.full_every, sizes.full_every),
        (&mut spec.n_heads, sizes.n_heads),
        (&mut spec.n_kv_heads, sizes.n_kv_heads),
        (&mut spec.head_dim, sizes.head_dim),
        (&mut spec.n_experts, sizes.n_experts),
        (&mut spec.n_experts_used, sizes.n_experts_used),
        (&mut spec.expert_size, sizes.expert_size),
        (&mut spec.sliding_window, sizes.sliding_window),
        (&mut spec.max_context, sizes.max_context),
        (&mut spec.n_shards, sizes.shards),
    ] {
        if let Some(given) = given {
            *size = given;
        }
    }
}

/// A vocabulary of another size has as many clusters fewer to probe.
fn fit(flash: SynthFlash, vocab_size: u64) -> SynthFlash {
    let n_clusters = (vocab_size / flash.cluster_size).max(1);
    SynthFlash { n_probes: flash.n_probes.min(n_clusters), ..flash }
}
