//! Placement: which backend runs which block, decided once when a model is loaded, and what that needs.
//!
//! A [`Plan`] is the decision as a value. It can be printed, its memory summed for any context, and then
//! compiled into an [`Engine`]; nothing is decided again on the way.

mod device;
mod speed;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use samara_simd::{Isa, Kernels};

pub use self::{device::Device, speed::Speed};
use self::{device::pick, speed::Speeds};
use crate::{
    backend::{Backend, Footprint, KernelId, Limits, Segment, adapters, backends, gpu},
    engine::{Compiled, Engine},
    error::Error,
    flash::{HeadKind, HeadMode},
    kv::KvType,
    model::Model,
    spec::BlockSpec,
};

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
    /// Tokens of one step; longer prompts are cut into steps of this size. 0 takes what the backends like best.
    pub max_batch: usize,
    /// Most rows of logits one step may ask for.
    pub max_logit_rows: usize,
    /// How keys and values are stored.
    pub kv: KvType,
    /// How the logits of a decoded token are computed.
    pub head: HeadKind,
    /// Clusters that a head which leaves rows out reads at first; `None` takes the file's number.
    pub n_probes: Option<usize>,
    /// Layers on the GPU, the last ones, and with them the head; `None` decides.
    pub gpu_layers: Option<usize>,
    /// Bytes of the GPU's memory that may be taken; `None` takes what the driver gives.
    pub gpu_memory: Option<u64>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            device: Device::Auto,
            isa: None,
            threads: 0,
            context: 4096,
            n_slots: 1,
            max_batch: 0,
            max_logit_rows: 1,
            kv: KvType::default(),
            head: HeadKind::default(),
            n_probes: None,
            gpu_layers: None,
            gpu_memory: None,
        }
    }
}

impl EngineOptions {
    /// `batch` is what the backends like best.
    fn limits(&self, context: usize, batch: usize, head: HeadMode) -> Limits {
        let wished = if self.max_batch == 0 { batch } else { self.max_batch };
        let max_batch = wished.clamp(1, context.max(1));
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
            head,
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
    /// What lies in the GPU's memory: its part of the weights, KV caches and scratch.
    pub device: u64,
    /// Positions the KV caches hold.
    pub context: usize,
}

impl MemoryPlan {
    /// Memory of the host beside the weights.
    pub fn private(&self) -> u64 {
        self.kv + self.scratch
    }
}

/// The fastest kernels of one machine for blocks of each shape, and how fast its backends are, to be kept so that they are
/// measured once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choices {
    /// Backend and shape of a block, and the kernels that run it.
    pub kernels: BTreeMap<String, Vec<KernelId>>,
    /// Backend and device, and how fast it decodes.
    pub speeds: BTreeMap<String, Speed>,
}

/// Every block placed.
///
/// The GPU, if one is used, has a run of blocks that ends with the head: the residual crosses over once. How many of
/// them it has follows from what they need there with the plan's context, and from what was measured.
pub struct Plan {
    model: Arc<Model>,
    options: EngineOptions,
    /// Backends that compute on the host, in order of preference.
    backends: Vec<Box<dyn Backend>>,
    /// For each block, the index of its backend on the host and its kernels there.
    on_host: Vec<(usize, Vec<KernelId>)>,
    gpu: Option<Gpu>,
    head: HeadMode,
    speeds: Option<Speeds>,
    /// Why there is no GPU, or what was wrong with it.
    reasons: Vec<String>,
}

/// The GPU, and what it can run.
struct Gpu {
    backend: Box<dyn Backend>,
    /// Of the blocks it supports, the last ones: index of the first.
    first: usize,
    /// Kernels of each block from there on.
    kernels: Vec<Vec<KernelId>>,
    /// Why it does not have the block before those.
    refused: Option<String>,
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
    /// Places each block on the devices that the options allow. A GPU is opened if they allow one.
    ///
    /// # Errors
    /// A context beyond the model's maximum, an instruction set that this machine lacks, a GPU that is not there, or a
    /// device that cannot run a block.
    pub fn new(model: Arc<Model>, options: &EngineOptions) -> Result<Self, Error> {
        check_context(&model, options.context)?;
        let host = backends(options.isa.map_or_else(|| Ok(Kernels::detect()), Kernels::for_isa)?);
        let found = match options.device {
            Device::Cpu | Device::Reference => return Self::of_backends(model, options, host, None),
            Device::Auto if options.gpu_layers == Some(0) => {
                return Self::of_backends(model, options, host, None);
            }
            Device::Auto => pick(&adapters(), None),
            Device::Gpu(number) => pick(&adapters(), number),
        };
        match (found.map_err(|reason| Error::NoDevice { reason }).and_then(gpu), options.device) {
            (Ok(gpu), _) => Self::of_backends(model, options, host, Some(gpu)),
            (Err(error), Device::Auto) => {
                let mut plan = Self::of_backends(model, options, host, None)?;
                plan.reasons.push(error.to_string());
                Ok(plan)
            }
            (Err(Error::NoDevice { reason }), _) => {
                let reason =
                    format!("--device gpu: {reason}; `samara devices` lists them, --device cpu needs none");
                Err(Error::NoDevice { reason })
            }
            (Err(error), _) => Err(error),
        }
    }

    /// A plan with these backends.
    fn of_backends(
        model: Arc<Model>,
        options: &EngineOptions,
        backends: Vec<Box<dyn Backend>>,
        gpu: Option<Box<dyn Backend>>,
    ) -> Result<Self, Error> {
        let blocks = &model.architecture().blocks;
        let on_host =
            blocks.iter().map(|block| choose(block, options.device, &backends)).collect::<Result<_, _>>()?;
        let gpu = gpu.map(|backend| Gpu::new(backend, blocks, options.kv));
        let flash = blocks.iter().find_map(|block| match block {
            BlockSpec::Head(head) => head.flash.as_ref(),
            BlockSpec::Embed(_) | BlockSpec::Layer(_) => None,
        });
        let head = HeadMode::of(options.head, options.n_probes, flash)?;
        let options = *options;
        let mut plan =
            Plan { model, options, backends, on_host, gpu, head, speeds: None, reasons: Vec::new() };
        plan.check_supported()?;
        if let Some(Gpu { first, refused: Some(reason), backend, .. }) = &plan.gpu {
            let block = plan.model.architecture().blocks[first - 1].label();
            plan.reasons.push(format!("{}: {block}: {reason}", describe(&**backend)));
        }
        Ok(plan)
    }

    /// Refuses a GPU that cannot run what it was asked to run.
    fn check_supported(&self) -> Result<(), Error> {
        let Some(Gpu { first, refused: Some(reason), .. }) = &self.gpu else { return Ok(()) };
        let blocks = &self.model.architecture().blocks;
        let asked = match (self.options.device, self.options.gpu_layers) {
            (Device::Gpu(_), Some(layers)) => last_layers(blocks, layers),
            (Device::Gpu(_), None) => blocks.len() - 1,
            _ => return Ok(()),
        };
        if asked >= *first {
            return Ok(());
        }
        let (block, device) = (blocks[first - 1].label(), self.options.device.name().to_owned());
        Err(Error::Unsupported { block, device, reason: reason.clone() })
    }

    /// Takes the fastest kernels for each block: those that `known` has for its shape, or by a measurement of some
    /// milliseconds on the block's weights. Then, if a GPU was found and not asked for, times steps on both. Returns what is
    /// known then. With an instruction set in the options no kernels are measured.
    pub fn measure(&mut self, known: &Choices) -> Choices {
        // What is known of other shapes and backends stays known.
        let mut choices = known.clone();
        let Plan { model, options, backends, on_host, gpu, .. } = self;
        let blocks = &model.architecture().blocks;
        let mut measure = |backend: &dyn Backend, spec: &BlockSpec, kernels: &mut Vec<KernelId>| {
            let shape = format!("{} {}", describe(backend), backend.shape(spec));
            let chosen =
                choices.kernels.get(&shape).filter(|kernels| backend.accepts(spec, kernels)).cloned();
            let chosen = chosen.unwrap_or_else(|| backend.measure(model, spec, kernels.clone()));
            choices.kernels.insert(shape, chosen.clone());
            *kernels = chosen;
        };
        if options.isa.is_none() {
            for (spec, (backend, kernels)) in blocks.iter().zip(on_host) {
                measure(&*backends[*backend], spec, kernels);
            }
        }
        if let Some(Gpu { backend, first, kernels, .. }) = gpu {
            for (spec, kernels) in blocks[*first..].iter().zip(kernels) {
                measure(&**backend, spec, kernels);
            }
        }
        if self.options.device == Device::Auto && self.options.gpu_layers.is_none() {
            self.measure_speeds(&mut choices);
        }
        choices
    }

    /// Times steps on the host and on the GPU, unless that is known. A GPU that fails is not used.
    fn measure_speeds(&mut self, choices: &mut Choices) {
        let Some(gpu) = &self.gpu else { return };
        let limits = self.limits(self.options.context, self.model.architecture().blocks.len());
        let blocks = &self.model.architecture().blocks;
        let mut speed = |backend: &dyn Backend, what: String, placed: Vec<_>| {
            if let Some(known) = choices.speeds.get(&what) {
                return Ok(*known);
            }
            let speed = Speed::measure(backend, &self.model, &placed, &limits)?;
            choices.speeds.insert(what, speed);
            Ok(speed)
        };
        let host: Vec<_> = blocks
            .iter()
            .zip(&self.on_host)
            .map(|(block, (_, kernels))| (block, kernels.as_slice()))
            .collect();
        let on_gpu = blocks[gpu.first..].iter().zip(&gpu.kernels);
        let on_gpu: Vec<_> = on_gpu.map(|(block, kernels)| (block, kernels.as_slice())).collect();
        let (cpu, threads) = (&*self.backends[self.on_host[0].0], limits.threads);
        let isa = self.options.isa.map_or_else(String::new, |isa| format!(" ({isa})"));
        let what = format!("{}{isa} with {threads} threads", describe(cpu));
        let speeds = speed(cpu, what, host).and_then(|host| {
            let gpu = speed(&*gpu.backend, describe(&*gpu.backend), on_gpu)?;
            Ok(Speeds { host, gpu })
        });
        match speeds {
            Ok(speeds) => self.speeds = Some(speeds),
            Err(error) => self.drop_gpu(&error),
        }
    }

    /// Goes on without the GPU.
    fn drop_gpu(&mut self, error: &Error) {
        self.reasons.push(format!("{error}: the CPU runs everything"));
        self.gpu = None;
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
        self.placements_with(self.first_on_gpu(self.options.context))
    }

    fn placements_with(&self, first: usize) -> Vec<Placement> {
        let blocks = self.model.architecture().blocks.iter().enumerate();
        blocks
            .map(|(i, block)| {
                let (backend, kernels) = self.of_block(i, first);
                Placement {
                    block: block.label(),
                    backend: backend.name().to_owned(),
                    kernels: kernels.to_vec(),
                }
            })
            .collect()
    }

    /// Why blocks are where they are, as far as that was a choice; a line each.
    pub fn reasons(&self) -> Vec<String> {
        let mut lines = self.reasons.clone();
        if let Some(gpu) = &self.gpu {
            lines.push(describe(&*gpu.backend));
            lines.extend(self.speeds.map(Speeds::to_text));
        }
        lines
    }

    /// The GPU that has blocks with this plan's context.
    pub fn gpu(&self) -> Option<String> {
        let used = self.first_on_gpu(self.options.context) < self.on_host.len();
        self.gpu.as_ref().filter(|_| used).map(|gpu| describe(&*gpu.backend))
    }

    /// What the model needs with this plan's context. Nothing is allocated.
    pub fn memory(&self) -> MemoryPlan {
        self.memory_with(self.options.context)
    }

    /// The largest context, at most the model's maximum, whose caches and scratch fit `available` bytes, and what
    /// was granted of the GPU's memory; 0 when none does.
    pub fn largest_context(&self, available: u64) -> usize {
        let (mut low, mut high) = (0, self.model.architecture().max_context);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            let fits = self.memory_with(middle).private() <= available && self.check_device(middle).is_ok();
            if fits { low = middle } else { high = middle - 1 }
        }
        low
    }

    /// Checks that what the plan needs fits, before anything is allocated.
    ///
    /// # Errors
    /// [`Error::Memory`] with both sizes and the largest context that fits; [`Error::DeviceMemory`].
    pub fn check_memory(&self, available: u64) -> Result<MemoryPlan, Error> {
        let memory = self.memory();
        self.check_device(memory.context)?;
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

    /// Checks what was asked of the GPU against what was granted of its memory.
    fn check_device(&self, context: usize) -> Result<(), Error> {
        let blocks = &self.model.architecture().blocks;
        let (Some(gpu), Some(granted)) = (&self.gpu, self.options.gpu_memory) else { return Ok(()) };
        let first = self.first_on_gpu(context);
        // The least that was asked for: these layers, or any part at all.
        let asked = match (self.options.gpu_layers, self.options.device) {
            (Some(0), _) | (None, Device::Auto) => return Ok(()),
            (Some(_), _) => first,
            (None, _) => first.min(blocks.len() - 1),
        };
        let needed = self.device_bytes(asked, context);
        if needed <= granted {
            return Ok(());
        }
        let fit = self.first_that_fits(context, granted);
        let fit = blocks[fit..].iter().filter(|block| is_layer(block)).count();
        Err(Error::DeviceMemory {
            device: describe(&*gpu.backend),
            needed: format_bytes(needed),
            available: format!("--gpu-memory grants {}", format_bytes(granted)),
            advice: match fit {
                0 => "grant more, or use --device cpu".to_owned(),
                fit => format!("the last {fit} layers fit: use --gpu-layers {fit}"),
            },
        })
    }

    /// Allocates caches and scratch, and copies to the GPU what it has: `progress` gets the bytes copied and those to copy
    /// in all. A GPU that has too little memory gets fewer layers unless their number was asked for, and one that fails its
    /// check gets none; [`Engine::notices`] says so.
    ///
    /// # Errors
    /// What a backend finds wrong: a bad token map, threads that cannot start, a GPU's memory.
    pub fn compile(mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<Engine, Error> {
        let mut notices = Vec::new();
        let context = self.options.context;
        let compiled = loop {
            let first = self.first_on_gpu(context);
            match self.segments(first, progress) {
                Ok(compiled) => break compiled,
                Err(error) if first == self.on_host.len() => return Err(error),
                Err(error @ Error::DeviceMemory { .. }) if self.options.gpu_layers.is_none() => {
                    // A quarter less at a time: what a driver has left, it does not say.
                    self.options.gpu_memory = Some(self.device_bytes(first, context) / 4 * 3);
                    if self.first_on_gpu(context) == self.on_host.len() {
                        self.gpu = None;
                    }
                    notices.push(format!("{error}: fewer layers go there"));
                }
                Err(error @ Error::DeviceMemory { .. }) => return Err(error),
                Err(error) => {
                    let broken = matches!(error, Error::DeviceFault { .. } | Error::DeviceLost { .. });
                    if !broken && self.options.device != Device::Auto {
                        return Err(error);
                    }
                    self.drop_gpu(&error);
                    notices.extend(self.reasons.last().cloned());
                }
            }
        };
        let first = self.first_on_gpu(context);
        let limits = self.limits(context, first);
        let reasons = self.reasons();
        let model = Arc::clone(&self.model);
        let mut engine = Engine::assemble(model, limits, compiled);
        engine.explain(reasons, notices);
        let all = self.on_host.len();
        if self.gpu.take().is_some() && first < all {
            engine.fall_back_to(Box::new(move || self.segments_with(all, &limits, &mut |_, _| {})));
        }
        Ok(engine)
    }

    fn segments(&self, first: usize, progress: &mut dyn FnMut(u64, u64)) -> Result<Compiled, Error> {
        self.segments_with(first, &self.limits(self.options.context, first), progress)
    }

    fn segments_with(
        &self,
        first: usize,
        limits: &Limits,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Compiled, Error> {
        let blocks = &self.model.architecture().blocks;
        let compile = |run: Range<usize>| {
            let (backend, _) = self.of_block(run.start, first);
            let placed: Vec<_> = run.map(|i| (&blocks[i], self.of_block(i, first).1)).collect();
            backend.compile(&self.model, &placed, limits, progress)
        };
        let segments: Vec<Box<dyn Segment>> =
            self.runs(first).into_iter().map(compile).collect::<Result<_, _>>()?;
        Ok(Compiled { placements: self.placements_with(first), segments })
    }

    /// Backend and kernels of a block when those from `first` on are the GPU's.
    fn of_block(&self, block: usize, first: usize) -> (&dyn Backend, &[KernelId]) {
        match &self.gpu {
            Some(gpu) if block >= first => (&*gpu.backend, &gpu.kernels[block - gpu.first]),
            _ => {
                let (backend, kernels) = &self.on_host[block];
                (&*self.backends[*backend], kernels)
            }
        }
    }

    /// Consecutive blocks on the same backend: a segment each.
    fn runs(&self, first: usize) -> Vec<Range<usize>> {
        // The GPU's come last, and it is none of the host's backends.
        let backend = |block: usize| if block >= first { usize::MAX } else { self.on_host[block].0 };
        let blocks: Vec<usize> = (0..self.on_host.len()).collect();
        blocks.chunk_by(|a, b| backend(*a) == backend(*b)).map(|run| run[0]..run[run.len() - 1] + 1).collect()
    }

    /// Index of the first block on the GPU; the number of blocks if it has none.
    fn first_on_gpu(&self, context: usize) -> usize {
        let blocks = &self.model.architecture().blocks;
        let Some(gpu) = &self.gpu else { return blocks.len() };
        if let Some(layers) = self.options.gpu_layers {
            return last_layers(blocks, layers).max(gpu.first);
        }
        let fit = self.options.gpu_memory.map_or(gpu.first, |granted| self.first_that_fits(context, granted));
        // Unless something was measured, every block that the host has costs the same.
        let cost =
            |first: usize| self.speeds.as_ref().map_or(first as f64, |speeds| speeds.of_split(blocks, first));
        // Of equal ones the first: an embedding costs nothing, and where every layer fits it goes along.
        let splits = (fit..=blocks.len()).map(|first| (first, cost(first)));
        splits.min_by(|a, b| a.1.total_cmp(&b.1)).map_or(blocks.len(), |(first, _)| first)
    }

    /// Index of the first block such that those from there on fit `granted` bytes of the GPU's memory.
    fn first_that_fits(&self, context: usize, granted: u64) -> usize {
        let (mut low, mut high) = (self.gpu.as_ref().map_or(0, |gpu| gpu.first), self.on_host.len());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.device_bytes(middle, context) <= granted { high = middle } else { low = middle + 1 }
        }
        low
    }

    /// Bytes of the GPU's memory that the blocks from `first` on need.
    fn device_bytes(&self, first: usize, context: usize) -> u64 {
        let blocks = &self.model.architecture().blocks[first..];
        match &self.gpu {
            Some(gpu) if !blocks.is_empty() => {
                gpu.backend.footprint(&self.model, blocks, &self.limits(context, first)).device
            }
            _ => 0,
        }
    }

    fn limits(&self, context: usize, first: usize) -> Limits {
        let host = self.on_host[..first].iter().map(|(backend, _)| self.backends[*backend].batch());
        let gpu = self.gpu.iter().filter(|_| first < self.on_host.len()).map(|gpu| gpu.backend.batch());
        self.options.limits(context, host.chain(gpu).max().unwrap_or(1), self.head)
    }

    fn memory_with(&self, context: usize) -> MemoryPlan {
        let first = self.first_on_gpu(context);
        let limits = self.limits(context, first);
        let architecture = self.model.architecture();
        let weights = self.model.file().index().file_len();
        let mut memory = MemoryPlan { weights, kv: 0, scratch: 0, device: 0, context };
        for run in self.runs(first) {
            let (backend, _) = self.of_block(run.start, first);
            let Footprint { kv, scratch, device } =
                backend.footprint(&self.model, &architecture.blocks[run], &limits);
            memory.kv += kv;
            memory.scratch += scratch;
            memory.device += device;
        }
        let io =
            limits.max_batch * architecture.hidden_size + limits.max_logit_rows * architecture.vocab_size;
        memory.scratch += 4 * io as u64;
        memory
    }
}

impl Gpu {
    /// Asks for each block from the last on, up to the first that it cannot run.
    fn new(backend: Box<dyn Backend>, blocks: &[BlockSpec], kv: KvType) -> Self {
        let supports = |block: &BlockSpec| {
            if !backend.stores(kv) {
                return Err(format!(
                    "keys and values as {kv} are for the CPU; use --kv {}",
                    KvType::default()
                ));
            }
            backend.supports(block)
        };
        let (mut kernels, mut refused) = (Vec::new(), None);
        for block in blocks.iter().rev() {
            match supports(block) {
                Ok(ids) => kernels.push(ids),
                Err(reason) => {
                    refused = Some(reason);
                    break;
                }
            }
        }
        kernels.reverse();
        Gpu { backend, first: blocks.len() - kernels.len(), kernels, refused }
    }
}

fn is_layer(block: &BlockSpec) -> bool {
    matches!(block, BlockSpec::Layer(_))
}

/// Index of the first block when the last `layers` layers are the GPU's, and all that follows them; with all layers also
/// what comes before.
fn last_layers(blocks: &[BlockSpec], layers: usize) -> usize {
    let mut indices = (0..blocks.len()).rev().filter(|i| is_layer(&blocks[*i]));
    match layers {
        0 => blocks.len(),
        n if n >= indices.clone().count() => 0,
        n => indices.nth(n - 1).unwrap_or(0),
    }
}

/// `gpu NVIDIA H200 [vulkan:10de:2335], driver …`: a backend, and what it runs on.
fn describe(backend: &dyn Backend) -> String {
    match backend.adapter() {
        None => backend.name().to_owned(),
        Some(adapter) => {
            format!("{} {} [{}], driver {}", backend.name(), adapter.name, adapter.id, adapter.driver)
        }
    }
}

fn check_context(model: &Model, context: usize) -> Result<(), Error> {
    let max = model.architecture().max_context;
    if context == 0 || context > max { Err(Error::ContextTooLarge { context, max }) } else { Ok(()) }
}

/// Index of the first of the host's backends that the device allows and that supports the block, and its kernels. What is
/// not the GPU's goes to the CPU.
fn choose(
    block: &BlockSpec,
    device: Device,
    available: &[Box<dyn Backend>],
) -> Result<(usize, Vec<KernelId>), Error> {
    let mut reasons = Vec::new();
    for (index, backend) in available.iter().enumerate() {
        let allowed = match device {
            Device::Auto => true,
            Device::Cpu | Device::Gpu(_) => backend.name() == Device::Cpu.name(),
            Device::Reference => backend.name() == device.name(),
        };
        if !allowed {
            continue;
        }
        match backend.supports(block) {
            Ok(kernels) => return Ok((index, kernels)),
            Err(reason) => reasons.push(format!("{}: {reason}", backend.name())),
        }
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
