//! Backends: who runs which block, with which kernels.
//!
//! A backend answers [`Backend::supports`] for a block, says how much memory it needs, and compiles a
//! run of consecutive blocks into a [`Segment`] that owns their KV caches and scratch. Everything is
//! allocated in `compile`; `forward` computes (the reference, which stays simple, excepted). One folder
//! and one line in [`backends`] each.

mod cpu;
mod reference;
mod wgpu;

use std::{fmt, sync::Arc, time::Duration};

use samara_simd::Kernels;

pub use self::wgpu::{Adapter, adapters};
use crate::{
    arch::Architecture,
    error::Error,
    flash::{HeadCounts, HeadMode},
    kv::KvType,
    model::Model,
    spec::BlockSpec,
};

/// Names one kernel variant: `ternary_gemv/avx2`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelId(String);

/// A block and the kernels chosen for it.
pub type Placed<'a> = (&'a BlockSpec, &'a [KernelId]);

impl KernelId {
    /// `op` is what is computed, `variant` how.
    pub fn new(op: &str, variant: &str) -> Self {
        KernelId(format!("{op}/{variant}"))
    }

    /// What is computed.
    pub fn op(&self) -> &str {
        self.0.split_once('/').map_or(&*self.0, |(op, _)| op)
    }

    /// How.
    pub fn variant(&self) -> &str {
        self.0.split_once('/').map_or("", |(_, variant)| variant)
    }
}

impl fmt::Display for KernelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a segment is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Worker threads, at least one.
    pub threads: usize,
    /// Whether fewer of them may do the work where that is faster.
    pub fewer_threads: bool,
    /// Sequences with a KV cache of their own.
    pub n_slots: usize,
    /// Positions of a sequence.
    pub context: usize,
    /// Tokens of one step, all sequences together.
    pub max_batch: usize,
    /// Rows of logits of one step.
    pub max_logit_rows: usize,
    /// How keys and values are stored; the reference keeps f32.
    pub kv: KvType,
    /// How [`Logits::Top`] are computed.
    pub head: HeadMode,
}

/// Bytes a segment needs beside the mapped file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// KV cache, in the host's memory.
    pub kv: u64,
    /// Scratch buffers, shared by the segment's blocks, in the host's memory.
    pub scratch: u64,
    /// Everything that lies in the memory of a device: weights, KV cache, scratch.
    pub device: u64,
}

/// Which logits a sequence of a step wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: the tokens only fill the cache.
    None,
    /// Those of its last token.
    Last,
    /// Those of its last token, of which the so many largest matter: where the head leaves rows out, others are
    /// -infinity.
    Top(usize),
    /// The so many largest of its last token, by a head that leaves rows out and can tell them: they are in
    /// [`Activations::best`] then. By others as [`Logits::Top`].
    Best(usize),
    /// Those of every token.
    All,
}

/// New tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// Which KV cache, below `n_slots`.
    pub slot: usize,
    /// Position of the first token: the number of tokens already cached in the slot.
    pub position: usize,
    /// Ids, at least one.
    pub tokens: &'a [u32],
    /// Logits wanted.
    pub logits: Logits,
}

/// One pass over the model, for one or several sequences.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// At most one entry a slot.
    pub sequences: &'a [Sequence<'a>],
}

impl<'a> Step<'a> {
    /// Tokens of all sequences.
    pub fn n_tokens(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.tokens.len()).sum()
    }

    /// `(slot, position, token)` of every token, in the order of the rows of the hidden states.
    pub fn tokens(&self) -> impl Iterator<Item = (usize, usize, u32)> + 'a {
        self.sequences.iter().flat_map(|sequence| {
            sequence
                .tokens
                .iter()
                .enumerate()
                .map(|(i, &token)| (sequence.slot, sequence.position + i, token))
        })
    }

    /// How many of the largest logits matter, in a step of one token that does not want them all.
    pub fn top(&self) -> Option<usize> {
        match self.sequences {
            [Sequence { tokens: [_], logits: Logits::Top(k) | Logits::Best(k), .. }] => Some(*k),
            _ => None,
        }
    }

    /// Whether the largest logits alone are enough.
    pub fn wants_best(&self) -> bool {
        matches!(self.sequences, [Sequence { tokens: [_], logits: Logits::Best(_), .. }])
    }

    /// Rows of the hidden states whose logits are wanted, ascending.
    pub fn logit_rows(&self) -> impl Iterator<Item = usize> + 'a {
        let mut first = 0;
        self.sequences.iter().flat_map(move |sequence| {
            let end = first + sequence.tokens.len();
            let start = match sequence.logits {
                Logits::None => end,
                Logits::Last | Logits::Top(_) | Logits::Best(_) => end - 1,
                Logits::All => first,
            };
            first = end;
            start..end
        })
    }
}

/// What flows between segments.
#[derive(Debug, Default)]
pub struct Activations {
    /// Residual, `[n_tokens, hidden_size]`, f32.
    pub hidden: Vec<f32>,
    /// Written by the head, `[n_logit_rows, vocab_size]`, f32, token order.
    pub logits: Vec<f32>,
    /// Written by a head instead of `logits` for [`Logits::Best`], if it can: token and logit, the largest first, of equal ones the
    /// lower token, and what is no number before all. Empty before the step.
    pub best: Vec<(u32, f32)>,
}

impl Activations {
    /// Room for a step of `n_tokens` tokens that wants `n_logit_rows` rows of logits.
    pub fn new(architecture: &Architecture, n_tokens: usize, n_logit_rows: usize) -> Self {
        Activations {
            hidden: vec![0.0; n_tokens * architecture.hidden_size],
            logits: vec![0.0; n_logit_rows * architecture.vocab_size],
            best: Vec::new(),
        }
    }
}

/// Threads that take part in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threads {
    /// With one token.
    pub decode: usize,
    /// With several.
    pub prefill: usize,
}

/// Time that one kind of work took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    /// What was done.
    pub name: &'static str,
    /// For how long, on the clock.
    pub time: Duration,
    /// Weight and cache bytes that it read.
    pub bytes: u64,
}

/// How a device draws a token from logits: what [`SamplerSpec`](crate::SamplerSpec) says, as far as a device can.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Softmax temperature; 0 takes the likeliest token.
    pub temperature: f32,
    /// Tokens kept, from 1 to [`MAX_CANDIDATES`].
    pub top_k: usize,
    /// Nucleus mass.
    pub top_p: f32,
    /// Share of the likeliest token's probability that a token must have.
    pub min_p: f32,
}

/// Most candidates that a device ranks.
pub const MAX_CANDIDATES: usize = 64;

/// What a device drew.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Drawn {
    /// The token that the next queued step continues from.
    pub token: u32,
    /// The `top_k` likeliest tokens in rank order (larger logits first, then lower ids) with their logits.
    pub candidates: Vec<(u32, f32)>,
}

/// Decoding on a device that runs ahead of the host: it draws each token itself and goes on from it, several steps in a
/// submission. The host draws again from the candidates, and its draw counts: where they differ it stops, rewinds and
/// begins anew.
pub trait Ahead {
    /// Starts decoding from `token` at `position` of a slot, drawing each next token by `draw`.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    fn begin(&mut self, slot: usize, position: usize, token: u32, draw: &Draw) -> Result<(), Error>;

    /// Queues a step for each uniform random number in [0, 1), in one submission. The caller keeps them within the
    /// context.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    fn queue(&mut self, uniforms: &[f32]) -> Result<(), Error>;

    /// Waits for the oldest queued step: the token drawn from its logits.
    ///
    /// # Errors
    /// [`Error::DeviceLost`], and the errors of [`Segment::forward`].
    fn next(&mut self) -> Result<Drawn, Error>;

    /// Lets what is queued finish, unseen. The caller rewinds.
    fn stop(&mut self);
}

/// What a device was asked to do since its segment was compiled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Submissions to its queue.
    pub submissions: u64,
    /// Dispatches in them.
    pub dispatches: u64,
}

/// A way to run blocks.
pub trait Backend: Send + Sync {
    /// The name `--device` and `--explain` use.
    fn name(&self) -> &str;

    /// The kernels that would run the block, or why none can.
    ///
    /// # Errors
    /// The reason, as a sentence.
    fn supports(&self, spec: &BlockSpec) -> Result<Vec<KernelId>, String>;

    /// The adapter it runs on; `None` for the host.
    fn adapter(&self) -> Option<&Adapter> {
        None
    }

    /// Whether it keeps keys and values this way.
    fn stores(&self, _kv: KvType) -> bool {
        true
    }

    /// Tokens of a step beyond which steps are no faster for each token.
    fn batch(&self) -> usize {
        512
    }

    /// Memory a segment of these blocks needs.
    fn footprint(&self, model: &Model, blocks: &[BlockSpec], limits: &Limits) -> Footprint;

    /// Does what it takes for the next steps to be as fast as those of a device at work. A GPU at rest has slow clocks.
    ///
    /// # Errors
    /// A lost device.
    fn wake(&self) -> Result<(), Error> {
        Ok(())
    }

    /// A name of the block's shape. Blocks of equal shape have the same fastest kernels.
    fn shape(&self, spec: &BlockSpec) -> String {
        spec.label()
    }

    /// The fastest kernels for a block that `supports` has accepted, by a measurement of some milliseconds on its
    /// weights. A backend with one variant of each kernel measures nothing.
    fn measure(&self, _model: &Arc<Model>, _spec: &BlockSpec, kernels: Vec<KernelId>) -> Vec<KernelId> {
        kernels
    }

    /// Whether all of `kernels`, chosen elsewhere or at another time, are for this block and run here.
    fn accepts(&self, spec: &BlockSpec, kernels: &[KernelId]) -> bool {
        self.supports(spec).is_ok_and(|own| own == kernels)
    }

    /// Makes a segment of consecutive blocks, each of which `supports` has accepted, with the kernels chosen. A backend
    /// that copies weights to a device calls `progress` meanwhile, with the bytes copied and those to copy in all.
    ///
    /// # Errors
    /// Whatever keeps the blocks from being run: a bad token map, threads that cannot start, a device that has too
    /// little memory ([`Error::DeviceMemory`]), is gone ([`Error::DeviceLost`]) or computes wrong
    /// ([`Error::DeviceFault`]).
    fn compile(
        &self,
        model: &Arc<Model>,
        blocks: &[Placed<'_>],
        limits: &Limits,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Segment>, Error>;
}

/// Compiled blocks with their caches.
pub trait Segment: Send {
    /// Runs the step: an embed block fills `hidden`, layers update it, a head fills `logits`.
    /// The engine has checked that tokens are in the vocabulary, slots in range, and that each sequence
    /// starts where its slot's cache ends.
    ///
    /// # Errors
    /// [`Error::NonFinite`] when a router sees NaN or infinity, [`Error::NonFiniteHead`] when the head does,
    /// [`Error::DeviceLost`] when there is no device any more.
    fn forward(&mut self, step: &Step<'_>, io: &mut Activations) -> Result<(), Error>;

    /// Forgets the positions of a slot from `len` on. `false` when a ring no longer holds the keys
    /// that position `len` would need; the caller then starts again from 0.
    fn rewind(&mut self, slot: usize, len: usize) -> bool;

    /// The logits of the last token of the step before once more: all of them, or as for [`Logits::Top`] with `top`. A segment
    /// without a head does nothing.
    ///
    /// # Errors
    /// As [`Segment::forward`].
    fn head_again(&mut self, top: Option<usize>, io: &mut Activations) -> Result<(), Error>;

    /// What was read for steps with [`Logits::Top`]; `None` from a segment whose head leaves nothing out.
    fn head_counts(&mut self) -> Option<HeadCounts> {
        None
    }

    /// Takes `len` positions of an empty slot as cached, with values that mean nothing: for measuring at a long context
    /// without computing it. `false` if the segment cannot.
    fn pretend(&mut self, _slot: usize, _len: usize) -> bool {
        false
    }

    /// Threads that decode and that prefill; `None` where that is not decided (yet), or means nothing.
    fn threads(&self) -> Option<Threads> {
        None
    }

    /// Decoding that runs ahead, in a segment that has every block from the embedding to the head.
    fn ahead(&mut self) -> Option<&mut dyn Ahead> {
        None
    }

    /// What a device was asked to do so far; `None` without one.
    fn counters(&self) -> Option<Counters> {
        None
    }

    /// Bytes a second that a device reads from its memory, measured now; `None` without one.
    fn bandwidth(&mut self) -> Option<f64> {
        None
    }

    /// What there is to say about how the segment was made, for the user: kernels that do not do what they should, and what
    /// runs instead.
    fn notices(&self) -> &[String] {
        &[]
    }

    /// Starts timing from nothing, or stops; returns what was timed since the last call. A segment that cannot tell
    /// returns nothing.
    fn profile(&mut self, _on: bool) -> Vec<Phase> {
        Vec::new()
    }
}

/// Refuses a head's normalised input, `[hidden_size]`, that holds NaN or infinity.
fn check_head_input(normed: &[f32]) -> Result<(), Error> {
    if normed.iter().all(|x| x.is_finite()) { Ok(()) } else { Err(Error::NonFiniteHead) }
}

/// Every backend of this build that runs blocks, fastest first as far as is known without measuring. The CPU runs
/// these kernels.
pub fn backends(kernels: Kernels) -> Vec<Box<dyn Backend>> {
    vec![Box::new(cpu::Cpu::new(kernels)), Box::new(reference::Reference)]
}

/// The backend that runs blocks on the GPU of this index in [`adapters`].
///
/// # Errors
/// [`Error::NoDevice`].
pub(crate) fn gpu(index: usize) -> Result<Box<dyn Backend>, Error> {
    wgpu::open(index)
}
