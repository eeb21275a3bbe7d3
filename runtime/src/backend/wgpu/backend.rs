//! The backend: which blocks a GPU can run, with which kernels, and what that takes.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex},
};

use samara_shaders::Variant;

use super::{
    Adapter,
    ahead::{Queue, RESULT_WORDS, RING, UNDER_WAY},
    bandwidth, check,
    device::{Gpu, lock},
    head::{self, Flash},
    inventory::Buffers,
    layer::LayerMaker,
    measure,
    ops::{Maker, Variants},
    pace::Pace,
    plan::{LayerPlan, Plan},
    segment::{GpuSegment, Head, Layer, Parts},
    staging::Staging,
};
use crate::{
    backend::{Backend, Counters, Footprint, KernelId, Limits, Placed, Segment},
    error::Error,
    kv::{KvType, Ring},
    model::Model,
    spec::{AttnSpec, BlockSpec, EmbedSpec, HeadSpec, LayerSpec, MoeSpec},
};

/// One adapter.
pub(super) struct GpuBackend {
    pub(super) gpu: Arc<Gpu>,
    /// Kinds of blocks, and variants of kernels, that have been found to compute what the CPU does.
    sound: Mutex<HashSet<(String, Variants)>>,
    /// Shapes of blocks for which no variant does, and why.
    refused: Mutex<BTreeMap<String, String>>,
}

impl GpuBackend {
    pub(super) fn new(gpu: Arc<Gpu>) -> Self {
        GpuBackend { gpu, sound: Mutex::default(), refused: Mutex::default() }
    }
}

/// Kernels of a layer in a step of one token.
const ONE_TOKEN: [&str; 7] =
    ["norm_gemv", "attention", "attention_merge", "gemv_add", "norm_router", "experts_in", "experts_out"];

/// Kernels of a layer in a step of several.
const SEVERAL_TOKENS: [&str; 11] = [
    "norm_quantize",
    "ternary_gemm",
    "rope_append",
    "attention_prefill",
    "quantize_rows",
    "router_gemm",
    "route",
    "sort_pairs",
    "experts_in_gemm",
    "experts_out_gemm",
    "combine",
];

/// Whether a kernel is one of steps of several tokens.
pub(super) fn several_tokens(kernel: &str) -> bool {
    SEVERAL_TOKENS.contains(&kernel)
}

/// Kernels that run a block.
fn kernels(spec: &BlockSpec) -> Vec<&'static str> {
    match spec {
        BlockSpec::Embed(_) => vec!["embed"],
        BlockSpec::Layer(_) => [&ONE_TOKEN[..], &SEVERAL_TOKENS].concat(),
        BlockSpec::Head(HeadSpec { flash: None, .. }) => vec!["head", "select_token"],
        BlockSpec::Head(_) => vec!["head", "select_token", "centroids", "probe", "flash_rows", "certify"],
    }
}

/// Names of a block's kernels in one variant.
fn ids(spec: &BlockSpec, variant: Variant) -> Vec<KernelId> {
    kernels(spec).iter().map(|kernel| KernelId::new(kernel, variant.name())).collect()
}

/// The variants that kernels of this block are chosen in.
fn variants(spec: &BlockSpec, chosen: &[KernelId]) -> Option<Variants> {
    let named = |name: &str| Variant::ALL.into_iter().find(|variant| variant.name() == name);
    kernels(spec)
        .iter()
        .zip(chosen)
        .map(|(kernel, id)| (id.op() == *kernel).then(|| Some((*kernel, named(id.variant())?))).flatten())
        .collect()
}

impl Backend for GpuBackend {
    fn name(&self) -> &'static str {
        "gpu"
    }

    fn supports(&self, spec: &BlockSpec) -> Result<Vec<KernelId>, String> {
        fits(spec)?;
        if let Some(reason) = lock(&self.refused).get(&shape(spec, "")) {
            return Err(reason.clone());
        }
        let best = tried(&self.gpu).next().unwrap_or_default();
        Ok(ids(spec, best))
    }

    fn adapter(&self) -> Option<&Adapter> {
        Some(self.gpu.adapter())
    }

    fn stores(&self, kv: KvType) -> bool {
        kv != KvType::Q8
    }

    fn batch(&self) -> usize {
        super::plan::MAX_TOKENS
    }

    fn footprint(&self, model: &Model, blocks: &[BlockSpec], limits: &Limits) -> Footprint {
        // What cannot be planned does not fit anywhere; `compile` says why.
        Plan::new(&self.gpu, model, blocks, limits).map_or(
            Footprint { kv: 0, scratch: 0, device: u64::MAX / 4 },
            |plan| Footprint { kv: 0, scratch: plan.staging_bytes(), device: plan.list.bytes() },
        )
    }

    fn wake(&self) -> Result<(), Error> {
        bandwidth::wake(&self.gpu)
    }

    fn shape(&self, spec: &BlockSpec) -> String {
        shape(spec, &self.gpu.adapter().id)
    }

    fn measure(&self, model: &Arc<Model>, spec: &BlockSpec, kernels: Vec<KernelId>) -> Vec<KernelId> {
        // An embedding row has nothing to choose.
        if matches!(spec, BlockSpec::Embed(_)) || self.gpu.variants().len() == 1 {
            return kernels;
        }
        match measure::fastest(self, model, spec, &self::kernels(spec)) {
            Ok(variants) => {
                let of = |kernel: &str| variants.get(kernel).copied().unwrap_or_default();
                self::kernels(spec).iter().map(|kernel| KernelId::new(kernel, of(kernel).name())).collect()
            }
            // What fails here fails when the segment is compiled, which can say so.
            Err(error) => {
                if let Error::DeviceFault { .. } = error {
                    lock(&self.refused).insert(shape(spec, ""), error.to_string());
                }
                kernels
            }
        }
    }

    fn accepts(&self, spec: &BlockSpec, kernels: &[KernelId]) -> bool {
        variants(spec, kernels).is_some_and(|variants| {
            variants.len() == self::kernels(spec).len()
                && variants.values().all(|variant| self.gpu.variants().contains(variant))
        })
    }

    fn compile(
        &self,
        model: &Arc<Model>,
        placed: &[Placed<'_>],
        limits: &Limits,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Segment>, Error> {
        Ok(Box::new(self.make(model, placed, limits, progress)?))
    }
}

impl GpuBackend {
    /// [`compile`](Backend::compile), not boxed.
    pub(super) fn make(
        &self,
        model: &Arc<Model>,
        placed: &[Placed<'_>],
        limits: &Limits,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<GpuSegment, Error> {
        let gpu = &self.gpu;
        gpu.check()?;
        if !self.stores(limits.kv) {
            return Err(gpu.error("the kernels keep keys and values as f32 or bf16, not as q8"));
        }
        let specs: Vec<BlockSpec> = placed.iter().map(|(spec, _)| (*spec).clone()).collect();
        let plan = Plan::new(gpu, model, &specs, limits)?;
        let mut segment = self.upload(model, &plan, limits, progress)?;
        let mut chosen = Variants::new();
        for (spec, kernels) in placed {
            chosen.extend(variants(spec, kernels).unwrap_or_default());
        }
        let mut notices = Vec::new();
        for variants in candidates(gpu, chosen) {
            match self.fit_out(&mut segment, model, &specs, &plan, limits, &variants)? {
                None => {
                    segment.notices = notices;
                    return Ok(segment);
                }
                Some(reason) => notices.push(format!("{}: {reason}; another variant is tried", gpu.name())),
            }
        }
        Err(Error::DeviceFault { device: gpu.name(), reason: notices.join("; ") })
    }

    /// A segment with its weights, and without dispatches.
    ///
    /// # Errors
    /// A device that has too little memory or is lost.
    pub(super) fn upload(
        &self,
        model: &Model,
        plan: &Plan,
        limits: &Limits,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<GpuSegment, Error> {
        let buffers = plan.list.allocate(&self.gpu)?;
        plan.uploads.fill(&self.gpu, model, &buffers, progress)?;
        bare(&self.gpu, model, plan, buffers, limits)
    }

    /// Gives a segment its dispatches and checks each kind of block. Returns what is wrong.
    ///
    /// # Errors
    /// A lost device.
    pub(super) fn fit_out(
        &self,
        segment: &mut GpuSegment,
        model: &Arc<Model>,
        specs: &[BlockSpec],
        plan: &Plan,
        limits: &Limits,
        variants: &Variants,
    ) -> Result<Option<String>, Error> {
        match parts(&self.gpu, &segment.buffers, plan, variants) {
            Ok(parts) => segment.install(parts),
            Err(error @ Error::DeviceLost { .. }) => return Err(error),
            Err(error) => return Ok(Some(error.to_string())),
        }
        for (at, kind) in kinds(specs) {
            let key = (format!("{kind} {} {}", limits.kv, limits.head.kind), variants.clone());
            if lock(&self.sound).contains(&key) {
                continue;
            }
            if let Some(reason) = check::block(segment, model, specs, at, limits, variants)? {
                return Ok(Some(reason));
            }
            lock(&self.sound).insert(key);
        }
        Ok(None)
    }
}

/// Variants that are tried one after another, as far as the device has them: what is not right in one may be in another.
pub(super) fn tried(gpu: &Gpu) -> impl Iterator<Item = Variant> + '_ {
    let order = [(true, true), (false, true), (false, false)];
    let order = order.map(|(subgroups, packed_dot)| Variant { subgroups, packed_dot });
    order.into_iter().filter(|variant| gpu.variants().contains(variant))
}

/// The variants chosen, then each of those tried for all kernels.
fn candidates(gpu: &Gpu, chosen: Variants) -> Vec<Variants> {
    let mut all = vec![chosen];
    for variant in tried(gpu) {
        let of_all = all[0].keys().map(|kernel| (*kernel, variant)).collect();
        if !all.contains(&of_all) {
            all.push(of_all);
        }
    }
    all
}

/// Places of the first block of each kind, with a name of the kind: blocks that differ in weights alone are of one.
fn kinds(specs: &[BlockSpec]) -> Vec<(usize, String)> {
    let mut kinds: Vec<(usize, String)> = Vec::new();
    for (at, spec) in specs.iter().enumerate() {
        let kind = match spec {
            BlockSpec::Layer(LayerSpec { index: _, attn, moe }) => {
                let AttnSpec { qk_norm, rope, window, .. } = attn;
                let MoeSpec { n_used, norm_topk, .. } = moe;
                let norms = qk_norm.is_some();
                format!("{} {norms} {rope:?} {window:?} {n_used} {norm_topk}", shape(spec, ""))
            }
            spec => shape(spec, ""),
        };
        if kinds.iter().all(|(_, other)| *other != kind) {
            kinds.push((at, kind));
        }
    }
    kinds
}

/// A segment without dispatches.
fn bare(
    gpu: &Arc<Gpu>,
    model: &Model,
    plan: &Plan,
    buffers: Buffers,
    limits: &Limits,
) -> Result<GpuSegment, Error> {
    let layer = |plan: &LayerPlan| Layer {
        index: plan.spec.index,
        decode: Vec::new(),
        prefill: Vec::new(),
        ring: Ring::new(limits.n_slots, plan.spec.attn.window, plan.capacity),
    };
    let head = match &plan.head {
        None => None,
        Some(plan) => Some(Head {
            ops: Vec::new(),
            flash: plan.flash.as_ref().map(|flash| Flash::new(model, flash, plan.panel_bytes)),
            row_of: plan.spec.token_map.as_ref().map(|map| model.row_of(map)).transpose()?,
            vocab_size: plan.spec.weight.rows,
        }),
    };
    let queue = plan.ahead.map(|ahead| {
        let staging = Staging::new(gpu, UNDER_WAY, 4 * (RING * RESULT_WORDS) as u64);
        Queue::new(ahead, staging)
    });
    Ok(GpuSegment {
        gpu: Arc::clone(gpu),
        scratch: plan.scratch,
        max_tokens: plan.max_tokens,
        hidden_size: model.architecture().hidden_size,
        last_row: 0,
        logit_rows: Vec::new(),
        embed: None,
        layers: plan.layers.iter().map(layer).collect(),
        head,
        staging: Staging::new(gpu, 1, 4 * plan.staging_words() as u64),
        clock: None,
        pace: Pace::default(),
        counters: Counters::default(),
        queue,
        notices: Vec::new(),
        buffers,
    })
}

/// All dispatches of a segment, in the variants chosen.
///
/// # Errors
/// A kernel that does not compile.
fn parts(gpu: &Gpu, buffers: &Buffers, plan: &Plan, variants: &Variants) -> Result<Parts, Error> {
    let maker = Maker { gpu, buffers, variants };
    let scratch = &plan.scratch;
    let layer = |plan: &LayerPlan| {
        let layer = LayerMaker { maker: &maker, scratch, plan };
        Ok([layer.decode()?, layer.prefill()?])
    };
    let select = match (&plan.ahead, &plan.head) {
        (Some(ahead), Some(plan)) => vec![head::select(&maker, scratch, ahead, &plan.spec)?],
        _ => Vec::new(),
    };
    let flash = plan.head.as_ref().and_then(|head| Some((head, head.flash.as_ref()?)));
    let flash = flash.map(|(head, plan)| head::flash(&maker, scratch, head, plan));
    Ok(Parts {
        flash: flash.transpose()?.unwrap_or_default(),
        embed: plan.embed.as_ref().map(|plan| head::embed(&maker, scratch, plan)).transpose()?,
        layers: plan.layers.iter().map(layer).collect::<Result<_, Error>>()?,
        head: plan.head.as_ref().map_or_else(|| Ok(Vec::new()), |plan| head::head(&maker, scratch, plan))?,
        select,
    })
}

/// What a block's kernels work on.
fn shape(spec: &BlockSpec, adapter: &str) -> String {
    match spec {
        BlockSpec::Embed(EmbedSpec { weight }) => format!("{adapter} embed {}x{}", weight.rows, weight.cols),
        BlockSpec::Layer(LayerSpec { index: _, attn, moe }) => format!(
            "{adapter} layer {}x{} {}x{} {}:{} {} {}",
            attn.qkv.rows,
            attn.qkv.cols,
            attn.o.rows,
            attn.o.cols,
            attn.n_heads,
            attn.n_kv_heads,
            moe.n_experts,
            moe.expert_size
        ),
        BlockSpec::Head(head) => format!("{adapter} head {}x{}", head.weight.rows, head.weight.cols),
    }
}

/// Whether the kernels can do a block of these sizes.
///
/// # Errors
/// The reason why not.
fn fits(spec: &BlockSpec) -> Result<(), String> {
    let multiple = |what: &str, n: usize, of: usize| {
        if n.is_multiple_of(of) {
            Ok(())
        } else {
            Err(format!("{what} is {n}, which is not a multiple of {of}"))
        }
    };
    let most = |what: &str, n: usize, max: usize| {
        if n <= max { Ok(()) } else { Err(format!("{what} is {n}, and the kernels take {max} at most")) }
    };
    match spec {
        BlockSpec::Embed(EmbedSpec { weight }) => multiple("hidden_size", weight.cols, 64),
        BlockSpec::Layer(LayerSpec { index: _, attn, moe }) => {
            let AttnSpec { qkv, n_heads, n_kv_heads, head_dim, .. } = attn;
            let MoeSpec { n_experts, n_used, expert_size, .. } = moe;
            multiple("hidden_size", qkv.cols, 4)?;
            multiple("head_dim", *head_dim, 8)?;
            most("head_dim", *head_dim, 128)?;
            multiple("n_heads", *n_heads, *n_kv_heads)?;
            most("n_heads / n_kv_heads", n_heads / n_kv_heads, 32)?;
            multiple("expert_size", *expert_size, 4)?;
            most("n_experts", *n_experts, 256)?;
            most("n_used", *n_used, 64)
        }
        BlockSpec::Head(HeadSpec { norm: _, weight, token_map: _, flash: _ }) => {
            multiple("hidden_size", weight.cols, 64)
        }
    }
}
