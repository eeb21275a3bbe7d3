//! Placement and stepping: which backend runs which block, and the loop that feeds them.

use std::sync::Arc;

use crate::{
    backend::{Activations, Backend, Footprint, KernelId, Limits, Segment, Sequence, Step, backends},
    error::Error,
    model::Model,
    spec::BlockSpec,
};

/// Where to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Device {
    /// The fastest backend that supports each block.
    #[default]
    Auto,
    /// The CPU kernels.
    Cpu,
    /// A GPU.
    Gpu,
    /// The slow scalar definition, f32.
    Reference,
}

impl Device {
    /// The backend's name, or `auto`.
    pub fn name(self) -> &'static str {
        match self {
            Device::Auto => "auto",
            Device::Cpu => "cpu",
            Device::Gpu => "gpu",
            Device::Reference => "reference",
        }
    }
}

/// How to load a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Where to run.
    pub device: Device,
    /// Worker threads; 0 takes one for each core this process may use.
    pub threads: usize,
    /// Positions of a sequence, at most the model's `max_context`.
    pub context: usize,
    /// Sequences that may be live at once.
    pub n_slots: usize,
    /// Tokens of one step; longer prompts are cut into steps of this size.
    pub max_batch: usize,
    /// Most rows of logits one step may ask for.
    pub max_logit_rows: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            device: Device::Auto,
            threads: 0,
            context: 4096,
            n_slots: 1,
            max_batch: 128,
            max_logit_rows: 1,
        }
    }
}

impl EngineOptions {
    fn limits(&self) -> Limits {
        let max_batch = self.max_batch.clamp(1, self.context.max(1));
        let threads = match self.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        };
        Limits {
            threads,
            n_slots: self.n_slots,
            context: self.context,
            max_batch,
            max_logit_rows: self.max_logit_rows.clamp(1, max_batch),
        }
    }
}

/// Consecutive blocks on one backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The backend's name.
    pub backend: String,
    /// Labels of the blocks: `embed`, `layer 0`, …, `head`.
    pub blocks: Vec<String>,
    /// Kernels that run them, without repeats.
    pub kernels: Vec<KernelId>,
}

/// What a model needs to run, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// The file, mapped or copied.
    pub weights: u64,
    /// KV caches of all slots.
    pub kv: u64,
    /// Scratch buffers, residual and logits.
    pub scratch: u64,
    /// Positions the KV caches hold.
    pub context: usize,
}

impl MemoryPlan {
    /// Memory beside the weights.
    pub fn private(&self) -> u64 {
        self.kv + self.scratch
    }
}

/// A model placed on backends, with its caches.
pub struct Engine {
    model: Arc<Model>,
    limits: Limits,
    placements: Vec<Placement>,
    segments: Vec<Box<dyn Segment>>,
    /// Positions cached in each slot.
    lens: Vec<usize>,
    io: Activations,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("limits", &self.limits).field("placements", &self.placements).finish()
    }
}

impl Engine {
    /// Places every block and allocates caches and scratch.
    ///
    /// # Errors
    /// A context beyond the model's maximum, a device that cannot run a block, threads that cannot
    /// start. Memory is not checked here: call [`memory_plan`] and [`check_memory`] first.
    pub fn new(model: Arc<Model>, options: &EngineOptions) -> Result<Self, Error> {
        let available = backends();
        let runs = place(&model, options, &available)?;
        let limits = options.limits();
        let blocks = &model.architecture().blocks;
        let mut segments = Vec::with_capacity(runs.len());
        let mut placements = Vec::with_capacity(runs.len());
        for run in runs {
            let blocks = &blocks[run.blocks];
            segments.push(run.backend.compile(&model, blocks, &limits)?);
            placements.push(Placement {
                backend: run.backend.name().to_owned(),
                blocks: blocks.iter().map(|block| block.label()).collect(),
                kernels: run.kernels,
            });
        }
        let architecture = model.architecture();
        let io = Activations {
            hidden: vec![0.0; limits.max_batch * architecture.hidden_size],
            logits: vec![0.0; limits.max_logit_rows * architecture.vocab_size],
        };
        let lens = vec![0; limits.n_slots];
        Ok(Engine { model, limits, placements, segments, lens, io })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// What the engine was compiled for.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Which backend and kernels run what, in order.
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// Runs one step and returns its logits, `[n_logit_rows, vocab_size]`, token order.
    ///
    /// # Errors
    /// A token outside the vocabulary or a position past the context, which leave every slot as it was; or
    /// non-finite values inside, which leave the step's slots empty.
    ///
    /// # Panics
    /// When the step itself is malformed: no tokens, more than `max_batch`, a slot out of range or used
    /// twice, a position that is not the end of the slot's cache, more logits than `max_logit_rows`.
    pub fn forward(&mut self, step: &Step<'_>) -> Result<&[f32], Error> {
        let n_logit_rows = self.check(step)?;
        for segment in &mut self.segments {
            if let Err(error) = segment.forward(step, &mut self.io) {
                // Some layers have cached these tokens and others not: nothing of it can be trusted.
                for sequence in step.sequences {
                    self.rewind(sequence.slot, 0);
                }
                return Err(error);
            }
        }
        for sequence in step.sequences {
            self.lens[sequence.slot] = sequence.position + sequence.tokens.len();
        }
        Ok(&self.io.logits[..n_logit_rows * self.model.architecture().vocab_size])
    }

    /// Positions cached in a slot.
    pub fn cached(&self, slot: usize) -> usize {
        self.lens[slot]
    }

    /// Forgets the positions of a slot from `len` on. `false` when a window no longer holds what that
    /// needs: the slot is then empty.
    pub fn rewind(&mut self, slot: usize, len: usize) -> bool {
        let len = len.min(self.lens[slot]);
        let mut kept = true;
        for segment in &mut self.segments {
            kept &= segment.rewind(slot, len);
        }
        if !kept {
            for segment in &mut self.segments {
                segment.rewind(slot, 0);
            }
        }
        self.lens[slot] = if kept { len } else { 0 };
        kept
    }

    fn check(&self, step: &Step<'_>) -> Result<usize, Error> {
        let limits = &self.limits;
        let n_tokens = step.n_tokens();
        assert!(n_tokens >= 1 && n_tokens <= limits.max_batch, "a step of {n_tokens} tokens");
        let n_logit_rows = step.logit_rows().count();
        assert!(n_logit_rows <= limits.max_logit_rows, "a step of {n_logit_rows} rows of logits");
        for (i, sequence) in step.sequences.iter().enumerate() {
            let Sequence { slot, position, tokens, logits: _ } = *sequence;
            assert!(slot < limits.n_slots && !tokens.is_empty(), "slot {slot}, {} tokens", tokens.len());
            assert!(step.sequences[..i].iter().all(|other| other.slot != slot), "slot {slot} used twice");
            assert_eq!(position, self.lens[slot], "the next position of slot {slot}");
            let (end, max) = (position + tokens.len(), self.model.architecture().max_context);
            if end > limits.context {
                return Err(Error::PromptTooLong { prompt: end, context: limits.context, max });
            }
        }
        let vocab_size = self.model.architecture().vocab_size;
        for (_, position, id) in step.tokens() {
            if id as usize >= vocab_size {
                return Err(Error::TokenOutOfRange { id, position, vocab_size });
            }
        }
        Ok(n_logit_rows)
    }
}

/// Consecutive blocks given to one backend.
struct Run<'a> {
    backend: &'a dyn Backend,
    blocks: std::ops::Range<usize>,
    kernels: Vec<KernelId>,
}

/// Gives each block to the first backend that supports it, and joins neighbours.
fn place<'a>(
    model: &Model,
    options: &EngineOptions,
    available: &'a [Box<dyn Backend>],
) -> Result<Vec<Run<'a>>, Error> {
    let max = model.architecture().max_context;
    if options.context > max || options.context == 0 {
        return Err(Error::ContextTooLarge { context: options.context, max });
    }
    let mut runs: Vec<(usize, Run<'a>)> = Vec::new();
    for (i, block) in model.architecture().blocks.iter().enumerate() {
        let (index, kernels) = choose(block, options.device, available)?;
        match runs.last_mut() {
            Some((last, run)) if *last == index => {
                run.blocks.end = i + 1;
                run.kernels.extend(kernels);
            }
            _ => runs.push((index, Run { backend: available[index].as_ref(), blocks: i..i + 1, kernels })),
        }
    }
    Ok(runs
        .into_iter()
        .map(|(_, mut run)| {
            run.kernels.sort();
            run.kernels.dedup();
            run
        })
        .collect())
}

/// Index of the first backend that the device allows and that supports the block, and its kernels.
fn choose(
    block: &BlockSpec,
    device: Device,
    available: &[Box<dyn Backend>],
) -> Result<(usize, Vec<KernelId>), Error> {
    let mut reasons = Vec::new();
    for (index, backend) in available.iter().enumerate() {
        if device != Device::Auto && backend.name() != device.name() {
            continue;
        }
        match backend.supports(block) {
            Ok(kernels) => return Ok((index, kernels)),
            Err(reason) => reasons.push(format!("{}: {reason}", backend.name())),
        }
    }
    if reasons.is_empty() {
        reasons.push("this build has no such backend; use --device cpu or --device auto".to_owned());
    }
    let (block, device) = (block.label(), device.name().to_owned());
    Err(Error::Unsupported { block, device, reason: reasons.join("; ") })
}

/// Sums what the model would need with these options, without allocating it.
///
/// # Errors
/// Those of placement.
pub fn memory_plan(model: &Model, options: &EngineOptions) -> Result<MemoryPlan, Error> {
    let available = backends();
    let runs = place(model, options, &available)?;
    let limits = options.limits();
    let architecture = model.architecture();
    let mut plan =
        MemoryPlan { weights: model.file().index().file_len(), kv: 0, scratch: 0, context: options.context };
    for run in &runs {
        let blocks = &architecture.blocks[run.blocks.clone()];
        let Footprint { kv, scratch } = run.backend.footprint(blocks, architecture.hidden_size, &limits);
        plan.kv += kv;
        plan.scratch += scratch;
    }
    let io = limits.max_batch * architecture.hidden_size + limits.max_logit_rows * architecture.vocab_size;
    plan.scratch += 4 * io as u64;
    Ok(plan)
}

/// The largest context, at most `options.context`, whose caches and scratch fit `available` bytes;
/// 0 when none does.
///
/// # Errors
/// Those of placement.
pub fn largest_context(model: &Model, options: &EngineOptions, available: u64) -> Result<usize, Error> {
    let fits = |context: usize| -> Result<bool, Error> {
        Ok(memory_plan(model, &EngineOptions { context, ..*options })?.private() <= available)
    };
    let (mut low, mut high) = (0, options.context);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle)? { low = middle } else { high = middle - 1 }
    }
    Ok(low)
}

/// Checks that a plan fits before anything is allocated.
///
/// # Errors
/// [`Error::Memory`] with both sizes and the largest context that fits.
pub fn check_memory(model: &Model, options: &EngineOptions, available: u64) -> Result<MemoryPlan, Error> {
    let plan = memory_plan(model, options)?;
    if plan.private() > available {
        return Err(Error::Memory {
            context: options.context,
            needed: format_bytes(plan.private()),
            available: format_bytes(available),
            advice: match largest_context(model, options, available)? {
                0 => "no context fits: free some memory".to_owned(),
                largest => format!("the largest context that fits is {largest}: use --ctx {largest}"),
            },
        });
    }
    Ok(plan)
}

/// `1.50 GiB`, `12.0 MiB`, `512 B`.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.iter().find(|(_, size)| bytes >= *size) {
        Some((unit, size)) => format!("{:.2} {unit}", bytes as f64 / *size as f64),
        None => format!("{bytes} B"),
    }
}
