//! Placement: which backend runs which block, decided once when a model is loaded, and what that needs.
//!
//! A [`Plan`] is the decision as a value. It can be printed, its memory summed for any context, and then
//! compiled into an [`Engine`]; nothing is decided again on the way.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use samara_simd::{Isa, Kernels};

use crate::{
    backend::{Backend, Footprint, KernelId, Limits, backends},
    engine::Engine,
    error::Error,
    kv::KvType,
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
    /// Instruction set of the CPU kernels; `None` takes the last that this machine has, or, after [`Plan::measure`], for each
    /// operation the fastest.
    pub isa: Option<Isa>,
    /// Worker threads; 0 takes one for each core this process may use, and fewer of them where that is faster.
    pub threads: usize,
    /// Positions of a sequence, at most the model's `max_context`.
    pub context: usize,
    /// Sequences that may be live at once.
    pub n_slots: usize,
    /// Tokens of one step; longer prompts are cut into steps of this size.
    pub max_batch: usize,
    /// Most rows of logits one step may ask for.
    pub max_logit_rows: usize,
    /// How keys and values are stored.
    pub kv: KvType,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            device: Device::Auto,
            isa: None,
            threads: 0,
            context: 4096,
            n_slots: 1,
            max_batch: 512,
            max_logit_rows: 1,
            kv: KvType::default(),
        }
    }
}

impl EngineOptions {
    fn limits(&self, context: usize) -> Limits {
        let max_batch = self.max_batch.clamp(1, context.max(1));
        Limits {
            threads: match self.threads {
                0 => std::thread::available_parallelism().map_or(1, usize::from),
                threads => threads,
            },
            fewer_threads: self.threads == 0,
            n_slots: self.n_slots,
            context,
            max_batch,
            max_logit_rows: self.max_logit_rows.clamp(1, max_batch),
            kv: self.kv,
        }
    }
}

/// Who runs one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// `embed`, `layer 0`, …, `head`.
    pub block: String,
    /// The backend's name.
    pub backend: String,
    /// Kernels that run it.
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

/// The fastest kernels of one machine for blocks of each shape, to be kept so that they are measured once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choices {
    /// Backend and shape of a block, and the kernels that run it.
    pub kernels: BTreeMap<String, Vec<KernelId>>,
}

/// Every block placed.
pub struct Plan {
    model: Arc<Model>,
    options: EngineOptions,
    backends: Vec<Box<dyn Backend>>,
    /// For each block, its backend's index and its kernels.
    chosen: Vec<(usize, Vec<KernelId>)>,
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plan")
            .field("options", &self.options)
            .field("placements", &self.placements())
            .finish()
    }
}

impl Plan {
    /// Gives each block to the first backend that the device allows and that supports it.
    ///
    /// # Errors
    /// A context beyond the model's maximum, an instruction set that this machine lacks, or a device that cannot run
    /// a block.
    pub fn new(model: Arc<Model>, options: &EngineOptions) -> Result<Self, Error> {
        check_context(&model, options.context)?;
        let backends = backends(options.isa.map_or_else(|| Ok(Kernels::detect()), Kernels::for_isa)?);
        let choose = |block| choose(block, options.device, &backends);
        let chosen = model.architecture().blocks.iter().map(choose).collect::<Result<_, _>>()?;
        Ok(Plan { model, options: *options, backends, chosen })
    }

    /// Takes the fastest kernels for each block: those that `known` has for its shape, or by a measurement of some
    /// milliseconds on the block's weights. Returns what is known then. With an instruction set in the options nothing is
    /// measured.
    pub fn measure(&mut self, known: &Choices) -> Choices {
        // What is known of other shapes and backends stays known.
        let mut choices = known.clone();
        if self.options.isa.is_some() {
            return choices;
        }
        for (spec, (backend, kernels)) in self.model.architecture().blocks.iter().zip(&mut self.chosen) {
            let backend = &self.backends[*backend];
            let shape = format!("{} {}", backend.name(), backend.shape(spec));
            let chosen =
                choices.kernels.get(&shape).filter(|kernels| backend.accepts(spec, kernels)).cloned();
            let chosen = chosen.unwrap_or_else(|| backend.measure(&self.model, spec, kernels.clone()));
            choices.kernels.insert(shape, chosen.clone());
            *kernels = chosen;
        }
        choices
    }

    /// The same placement for another context.
    ///
    /// # Errors
    /// A context beyond the model's maximum.
    pub fn with_context(mut self, context: usize) -> Result<Self, Error> {
        check_context(&self.model, context)?;
        self.options.context = context;
        Ok(self)
    }

    /// Who runs each block, in order.
    pub fn placements(&self) -> Vec<Placement> {
        let placed = self.model.architecture().blocks.iter().zip(&self.chosen);
        placed
            .map(|(block, (backend, kernels))| Placement {
                block: block.label(),
                backend: self.backends[*backend].name().to_owned(),
                kernels: kernels.clone(),
            })
            .collect()
    }

    /// What the model needs with this plan's context. Nothing is allocated.
    pub fn memory(&self) -> MemoryPlan {
        self.memory_with(self.options.context)
    }

    /// The largest context, at most the model's maximum, whose caches and scratch fit `available` bytes;
    /// 0 when none does.
    pub fn largest_context(&self, available: u64) -> usize {
        let (mut low, mut high) = (0, self.model.architecture().max_context);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if self.memory_with(middle).private() <= available { low = middle } else { high = middle - 1 }
        }
        low
    }

    /// Checks that what the plan needs fits, before anything is allocated.
    ///
    /// # Errors
    /// [`Error::Memory`] with both sizes and the largest context that fits.
    pub fn check_memory(&self, available: u64) -> Result<MemoryPlan, Error> {
        let memory = self.memory();
        if memory.private() <= available {
            return Ok(memory);
        }
        Err(Error::Memory {
            context: memory.context,
            needed: format_bytes(memory.private()),
            available: format_bytes(available),
            advice: match self.largest_context(available) {
                0 => "no context fits: free some memory".to_owned(),
                largest => format!("the largest context that fits is {largest}: use --ctx {largest}"),
            },
        })
    }

    /// Allocates caches and scratch.
    ///
    /// # Errors
    /// What a backend finds wrong: a bad token map, threads that cannot start.
    pub fn compile(self) -> Result<Engine, Error> {
        let limits = self.options.limits(self.options.context);
        let blocks = &self.model.architecture().blocks;
        let mut segments = Vec::new();
        for (backend, run) in self.runs() {
            let kernels = self.chosen[run.clone()].iter().map(|(_, kernels)| kernels.as_slice());
            let placed: Vec<_> = blocks[run].iter().zip(kernels).collect();
            segments.push(self.backends[backend].compile(&self.model, &placed, &limits)?);
        }
        let placements = self.placements();
        Ok(Engine::assemble(self.model, limits, placements, segments))
    }

    /// Consecutive blocks on the same backend: a segment each.
    fn runs(&self) -> Vec<(usize, Range<usize>)> {
        let mut runs: Vec<(usize, Range<usize>)> = Vec::new();
        for (i, (backend, _)) in self.chosen.iter().enumerate() {
            match runs.last_mut() {
                Some((last, run)) if last == backend => run.end = i + 1,
                _ => runs.push((*backend, i..i + 1)),
            }
        }
        runs
    }

    fn memory_with(&self, context: usize) -> MemoryPlan {
        let limits = self.options.limits(context);
        let architecture = self.model.architecture();
        let mut memory =
            MemoryPlan { weights: self.model.file().index().file_len(), kv: 0, scratch: 0, context };
        for (backend, run) in self.runs() {
            let blocks = &architecture.blocks[run];
            let Footprint { kv, scratch } =
                self.backends[backend].footprint(blocks, architecture.hidden_size, &limits);
            memory.kv += kv;
            memory.scratch += scratch;
        }
        let io =
            limits.max_batch * architecture.hidden_size + limits.max_logit_rows * architecture.vocab_size;
        memory.scratch += 4 * io as u64;
        memory
    }
}

fn check_context(model: &Model, context: usize) -> Result<(), Error> {
    let max = model.architecture().max_context;
    if context == 0 || context > max { Err(Error::ContextTooLarge { context, max }) } else { Ok(()) }
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

/// `1.50 GiB`, `12.0 MiB`, `512 B`.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.iter().find(|(_, size)| bytes >= *size) {
        Some((unit, size)) => format!("{:.2} {unit}", bytes as f64 / *size as f64),
        None => format!("{bytes} B"),
    }
}
