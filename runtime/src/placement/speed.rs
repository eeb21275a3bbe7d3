//! How fast a backend decodes, measured on a few of a model's blocks, and what a split of the model would take.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    backend::{Activations, Backend, Limits, Logits, Placed, Sequence, Step},
    error::Error,
    model::Model,
    spec::BlockSpec,
};

/// Seconds that one-token steps take on one backend.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Speed {
    /// One layer.
    pub layer: f64,
    /// The head.
    pub head: f64,
    /// A step, beside the blocks: getting there and back.
    pub step: f64,
}

/// Layers of the longer segment: the time of one is a slope.
const LAYERS: usize = 4;
/// Steps before a segment begins anew. Each has an input of its own, so that each chooses its own experts and no cache
/// holds them all.
const STEPS: usize = 16;
/// Steps are run for so long, and those of the later half count.
const AT_LEAST: Duration = Duration::from_millis(30);

impl Speed {
    /// Times one-token steps of one layer, of several and of the head.
    ///
    /// # Errors
    /// Those of compiling and running them.
    pub(super) fn measure(
        backend: &dyn Backend,
        model: &Arc<Model>,
        placed: &[Placed<'_>],
        limits: &Limits,
    ) -> Result<Self, Error> {
        let context = STEPS.min(limits.context);
        let limits =
            Limits { context, n_slots: 1, max_batch: 1, max_logit_rows: 1, fewer_threads: false, ..*limits };
        let time = |placed: &[Placed<'_>]| time(backend, model, placed, &limits);
        let layers: Vec<Placed<'_>> =
            placed.iter().filter(|(block, _)| is_layer(block)).take(LAYERS).copied().collect();
        let head = placed.iter().find(|(block, _)| matches!(block, BlockSpec::Head(_)));
        let (Some(one), several) = (layers.first(), layers.len()) else { return Ok(Speed::default()) };
        let one = time(std::slice::from_ref(one))?;
        let layer = match several {
            1 => one,
            n => ((time(&layers)? - one) / (n - 1) as f64).clamp(0.0, one),
        };
        let step = one - layer;
        let head = head.map_or(Ok(0.0), |head| time(std::slice::from_ref(head)))?;
        Ok(Speed { layer, head: (head - step).max(0.0), step })
    }

    /// Seconds for a block.
    pub(super) fn of(&self, block: &BlockSpec) -> f64 {
        match block {
            BlockSpec::Embed(_) => 0.0,
            BlockSpec::Layer(_) => self.layer,
            BlockSpec::Head(_) => self.head,
        }
    }
}

fn is_layer(block: &BlockSpec) -> bool {
    matches!(block, BlockSpec::Layer(_))
}

/// Median seconds of a one-token step.
fn time(
    backend: &dyn Backend,
    model: &Arc<Model>,
    placed: &[Placed<'_>],
    limits: &Limits,
) -> Result<f64, Error> {
    let mut segment = backend.compile(model, placed, limits, &mut |_, _| {})?;
    let mut io = Activations::new(model.architecture(), 1, 1);
    backend.wake()?;
    let (mut seconds, began) = (Vec::new(), Instant::now());
    while seconds.len() < 2 || began.elapsed() < AT_LEAST {
        segment.rewind(0, 0);
        for i in 0..limits.context {
            fill(&mut io.hidden, i);
            let sequence = Sequence { slot: 0, position: i, tokens: &[0], logits: Logits::Last };
            let started = Instant::now();
            segment.forward(&Step { sequences: &[sequence] }, &mut io)?;
            seconds.push(started.elapsed().as_secs_f64());
        }
    }
    let timed = seconds.split_off(seconds.len() / 2);
    Ok(median(timed))
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// A residual that means nothing, from -1 to 1, another for each `seed` (Knuth's multiplicative hash).
fn fill(hidden: &mut [f32], seed: usize) {
    for (x, i) in hidden.iter_mut().zip(1u32..) {
        let bits = (i ^ (seed as u32) << 20).wrapping_mul(2_654_435_761);
        *x = (bits >> 8) as f32 / (1 << 23) as f32 - 1.0;
    }
}

/// Two backends beside each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Speeds {
    pub(super) host: Speed,
    pub(super) gpu: Speed,
}

impl Speeds {
    /// Seconds of a one-token step with the blocks from `first` on the GPU.
    pub(super) fn of_split(&self, blocks: &[BlockSpec], first: usize) -> f64 {
        let Speeds { host, gpu } = self;
        let (before, after) = blocks.split_at(first);
        let sum = |speed: &Speed, blocks: &[BlockSpec]| match blocks {
            [] => 0.0,
            blocks => speed.step + blocks.iter().map(|block| speed.of(block)).sum::<f64>(),
        };
        sum(host, before) + sum(gpu, after)
    }

    /// For people, in one line.
    pub(super) fn to_text(self) -> String {
        let us = |seconds: f64| format!("{:.0}", 1e6 * seconds);
        let Speeds { host, gpu } = self;
        format!(
            "measured for a token: {} us a layer, {} the head and {} a step on the gpu, against {}, {} and {} on the cpu",
            us(gpu.layer),
            us(gpu.head),
            us(gpu.step),
            us(host.layer),
            us(host.head),
            us(host.step),
        )
    }
}
