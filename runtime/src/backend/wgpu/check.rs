//! Whether a GPU computes what the CPU computes.
//!
//! When a segment is compiled, one block of each kind runs on the device with the very pipelines and buffers that will be
//! used, and on the CPU: [`block`]. If they differ, each kernel is checked alone to find the one to name. The tests run
//! the same checks of single kernels over sizes and variants.

mod alone;
mod decode;
mod flash;
mod made;
mod prefill;
mod tolerance;
mod trial;

use std::sync::Arc;

use samara_simd::Kernels;

use self::{made::Made, trial::Difference};
use super::{ops::Variants, segment::GpuSegment};
use crate::{
    backend::{Activations, Backend, Limits, Logits, Sequence, Step, cpu::Cpu},
    error::Error,
    flash::HeadMode,
    model::Model,
    spec::{BlockSpec, EmbedSpec, HeadSpec, LayerSpec},
};

/// Tokens of the step of several; then comes one of one.
const TOKENS: usize = 72;

/// Inputs that are tried. With some a router's choice is so close that a rounding decides it, which is no fault.
const TRIES: u64 = 3;

/// How far a layer's contribution to the residual of a token may be from the CPU's, by their lengths. Rounding to int8 hardly
/// ever differs; where one element of some hundred does, it is by a 127th.
const LAYER_TOLERANCE: f64 = 0.02;

/// The same of a row of logits.
const HEAD_TOLERANCE: f64 = 0.005;

/// Rows of the head that are computed in f64 to name what is wrong.
const HEAD_ROWS: usize = 4096;

/// The same of an embedding row, which is a product and a sum.
const EMBED_TOLERANCE: f64 = 1e-6;

/// Runs block `at` of a segment on the device and on the CPU. Returns what is wrong, if something is.
///
/// # Errors
/// A lost device, or a CPU on which no thread can start.
pub(super) fn block(
    segment: &mut GpuSegment,
    model: &Arc<Model>,
    blocks: &[BlockSpec],
    at: usize,
    limits: &Limits,
    variants: &Variants,
) -> Result<Option<String>, Error> {
    let kv = limits.kv;
    let limits = Limits {
        threads: 1,
        fewer_threads: false,
        n_slots: 1,
        context: limits.context.min(TOKENS + 1),
        max_batch: TOKENS,
        max_logit_rows: 1,
        kv,
        head: HeadMode::EXACT,
    };
    let cpu = Host { model, block: &blocks[at], limits };
    let tolerance = match &blocks[at] {
        BlockSpec::Embed(EmbedSpec { weight: _ }) => EMBED_TOLERANCE,
        BlockSpec::Layer(LayerSpec { .. }) => LAYER_TOLERANCE,
        BlockSpec::Head(HeadSpec { .. }) => HEAD_TOLERANCE,
    };
    let index = blocks[..at].iter().filter(|block| matches!(block, BlockSpec::Layer(_))).count();
    let mut worst = f64::INFINITY;
    for seed in 1..=TRIES {
        worst = match &blocks[at] {
            BlockSpec::Embed(embed) => embedding(segment, &cpu, embed)?,
            BlockSpec::Layer(_) => layer(segment, &cpu, index, seed)?,
            BlockSpec::Head(head) => logits(segment, &cpu, head, seed)?,
        };
        if worst <= tolerance {
            break;
        }
    }
    let gpu = Arc::clone(&segment.gpu);
    let wrong = if worst > tolerance {
        alone::wrong(&gpu, model, &blocks[at], kv, variants)?
    } else {
        match &blocks[at] {
            BlockSpec::Layer(spec) if spec.attn.window.is_none() => {
                alone::many_parts(&gpu, spec, kv, variants)?
            }
            BlockSpec::Head(head) => match flash::wrong(segment, &cpu, head)? {
                Some(wrong) => {
                    let variant = variants.get(wrong.kernel).copied().unwrap_or_default();
                    Some((wrong, variant))
                }
                None if segment.queue.is_some() => alone::drawing(&gpu, head.weight.rows, variants)?,
                None => None,
            },
            _ => None,
        }
    };
    let off = |found: f64, allowed: f64| format!("is off by {found:.1e}, and {allowed:.0e} is allowed");
    Ok(match wrong {
        Some((Difference { kernel, found, allowed }, variant)) => {
            Some(format!("kernel {kernel}/{variant} {}", off(found, allowed)))
        }
        None if worst > tolerance => Some(format!("{} {}", blocks[at].label(), off(worst, tolerance))),
        None => None,
    })
}

/// A block on the CPU.
struct Host<'a> {
    model: &'a Arc<Model>,
    block: &'a BlockSpec,
    limits: Limits,
}

impl Host<'_> {
    /// Runs a step after another: `tokens` of each and hidden states, which are updated; the last logits.
    fn run(&self, steps: &[&[u32]], hidden: &mut [f32]) -> Result<Vec<f32>, Error> {
        let cpu = Cpu::new(Kernels::detect());
        let mut segment = cpu.compile(self.model, &[(self.block, &[])], &self.limits, &mut |_, _| {})?;
        let architecture = self.model.architecture();
        let mut io = Activations::new(architecture, TOKENS, 1);
        let (mut position, mut rest) = (0, hidden);
        for tokens in steps {
            let (own, after) = rest.split_at_mut(tokens.len() * architecture.hidden_size);
            io.hidden[..own.len()].copy_from_slice(own);
            let sequence = Sequence { slot: 0, position, tokens, logits: Logits::Last };
            segment.forward(&Step { sequences: &[sequence] }, &mut io)?;
            own.copy_from_slice(&io.hidden[..own.len()]);
            (position, rest) = (position + tokens.len(), after);
        }
        Ok(io.logits)
    }
}

/// Length of `a - b` divided by that of `b - c`.
fn relative(a: &[f32], b: &[f32], c: impl Iterator<Item = f32>) -> f64 {
    let square = |x: f32, y: f32| (f64::from(x) - f64::from(y)).powi(2);
    let off: f64 = a.iter().zip(b).map(|(a, b)| square(*a, *b)).sum();
    let all: f64 = b.iter().zip(c).map(|(b, c)| square(*b, c)).sum();
    let relative = (off / all.max(f64::MIN_POSITIVE)).sqrt();
    if relative.is_finite() { relative } else { f64::INFINITY }
}

/// Largest difference of a token's contribution.
fn layer(segment: &mut GpuSegment, cpu: &Host<'_>, index: usize, seed: u64) -> Result<f64, Error> {
    let hidden_size = segment.hidden_size;
    let several = TOKENS.min(cpu.limits.context - 1).min(segment.max_tokens);
    let ids = vec![0; several];
    let before = Made::new(seed).values((several + 1) * hidden_size, 1.0);
    let mut expected = before.clone();
    let steps: [&[u32]; 2] = [&ids, &[0]];
    cpu.run(&steps[usize::from(several == 0)..], &mut expected)?;
    let mut found = Vec::new();
    for range in [0..several, several..several + 1] {
        if range.is_empty() {
            continue;
        }
        let tokens: Vec<_> = range.clone().map(|position| (0, position, 0)).collect();
        let h = &before[range.start * hidden_size..range.end * hidden_size];
        segment.run_alone(&tokens, h, 0, |segment, extent| {
            let layer = &segment.layers[index];
            (if extent.decode { &layer.decode } else { &layer.prefill }).iter().collect()
        })?;
        found.extend(segment.floats(segment.scratch.h, h.len())?);
    }
    let rows = found.chunks_exact(hidden_size).zip(expected.chunks_exact(hidden_size));
    let rows = rows.zip(before.chunks_exact(hidden_size));
    Ok(rows
        .map(|((found, expected), before)| relative(found, expected, before.iter().copied()))
        .fold(0.0, f64::max))
}

/// The same of a row of logits.
fn logits(segment: &mut GpuSegment, cpu: &Host<'_>, spec: &HeadSpec, seed: u64) -> Result<f64, Error> {
    let mut hidden = Made::new(seed).values(segment.hidden_size, 1.0);
    let h = hidden.clone();
    let expected = cpu.run(&[&[0]], &mut hidden)?;
    segment.run_alone(&[(0, 0, 0)], &h, 1, |segment, _| {
        segment.head.iter().flat_map(|head| &head.ops).collect()
    })?;
    let by_row = segment.floats(segment.scratch.logits, spec.weight.rows)?;
    let row_of = segment.head.as_ref().and_then(|head| head.row_of.as_ref());
    let found: Vec<f32> = match row_of {
        Some(row_of) => row_of.iter().map(|row| by_row[*row as usize]).collect(),
        None => by_row,
    };
    Ok(relative(&found, &expected, std::iter::repeat(0.0)))
}

/// The same of embedding rows, the first, the last and some between.
fn embedding(segment: &mut GpuSegment, cpu: &Host<'_>, spec: &EmbedSpec) -> Result<f64, Error> {
    let EmbedSpec { weight } = spec;
    let n = TOKENS.min(segment.max_tokens).min(cpu.limits.context);
    let ids: Vec<u32> = (0..n).map(|i| (i * (weight.rows - 1) / (n - 1).max(1)) as u32).collect();
    let mut expected = vec![0.0; n * weight.cols];
    cpu.run(&[&ids], &mut expected)?;
    let tokens: Vec<_> = ids.iter().enumerate().map(|(position, id)| (0, position, *id)).collect();
    segment.run_alone(&tokens, &[], 0, |segment, _| segment.embed.iter().collect())?;
    let found = segment.floats(segment.scratch.h, expected.len())?;
    let rows = found.chunks_exact(weight.cols).zip(expected.chunks_exact(weight.cols));
    Ok(rows.map(|(found, expected)| relative(found, expected, std::iter::repeat(0.0))).fold(0.0, f64::max))
}
