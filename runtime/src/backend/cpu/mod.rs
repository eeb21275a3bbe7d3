//! The CPU backend: int8 activations against packed weights, through the kernels that
//! [`samara_simd::Kernels`] has for this machine, rows shared out over a pool of threads.
//!
//! Every row of every matrix is computed by one thread in one order, so results do not depend on the
//! number of threads, on the batch, or on the instruction set.

mod cache;
mod choose;
mod clock;
mod flash;
mod head;
mod layer;
mod scratch;
mod threads;

use std::{
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use samara_pool::Pool;
use samara_simd::{Isa, Kernels, Op, PANEL_ROWS, Q8_MAX_DIM};

use self::{
    clock::Clock,
    head::{Head, embed},
    layer::Layer,
    scratch::{Scratch, Sizes},
    threads::DecodeThreads,
};
use super::{Activations, Backend, Footprint, KernelId, Limits, Phase, Placed, Segment, Step, Threads};
use crate::{
    error::Error,
    flash::HeadCounts,
    kv::KvType,
    model::Model,
    spec::{BlockSpec, EmbedSpec, LayerSpec},
};

/// More than any machine's cores: a number beyond it is a slip, and starting the threads would stall the machine.
const MAX_THREADS: usize = 1024;

/// The backend; threads are started for its first segment.
pub(super) struct Cpu {
    kernels: Kernels,
    pool: OnceLock<Arc<Mutex<Pool>>>,
}

impl Cpu {
    pub(super) fn new(kernels: Kernels) -> Self {
        Cpu { kernels, pool: OnceLock::new() }
    }

    /// The threads, shared by all segments of this backend.
    fn pool(&self, threads: usize) -> Result<Arc<Mutex<Pool>>, Error> {
        if let Some(pool) = self.pool.get() {
            return Ok(Arc::clone(pool));
        }
        let fails = |reason: String| Error::Threads { threads, reason };
        if threads > MAX_THREADS {
            return Err(fails(format!("at most {MAX_THREADS} are of use")));
        }
        let pool = Pool::new(threads).map_err(|error| fails(error.to_string()))?;
        Ok(Arc::clone(self.pool.get_or_init(|| Arc::new(Mutex::new(pool)))))
    }
}

/// Operations that run a block.
fn ops(spec: &BlockSpec) -> &'static [Op] {
    match spec {
        BlockSpec::Embed(_) => &[Op::Affine4Row],
        BlockSpec::Layer(_) => &[
            Op::RmsNorm,
            Op::RmsNormInPlace,
            Op::Quantize,
            Op::TernaryGemv,
            Op::TernaryGemm,
            Op::Rope,
            Op::AttentionPart,
            Op::AttentionMerge,
            Op::AttentionFinish,
            Op::Bf16Gemv,
            Op::Bf16Gemm,
            Op::TopKRouter,
            Op::SwigluClamped,
            Op::Combine,
        ],
        BlockSpec::Head(_) => &[Op::RmsNorm, Op::Quantize, Op::Affine4Gemv, Op::Affine4Gemm],
    }
}

/// Names of the kernels that run a block.
fn ids(spec: &BlockSpec, kernels: &Kernels) -> Vec<KernelId> {
    ops(spec).iter().map(|op| KernelId::new(op.name(), kernels.id(*op).isa.name())).collect()
}

/// `kernels` with those that have been chosen for a block; `None` if one of them does not run here.
fn table(kernels: Kernels, spec: &BlockSpec, chosen: &[KernelId]) -> Option<Kernels> {
    ops(spec).iter().zip(chosen).try_fold(kernels, |kernels, (op, id)| {
        let isa: Isa = id.variant().parse().ok()?;
        Some(kernels.with(*op, &Kernels::for_isa(isa).ok()?))
    })
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn supports(&self, spec: &BlockSpec) -> Result<Vec<KernelId>, String> {
        if let BlockSpec::Layer(layer) = spec {
            for (what, rows) in [("head_dim", layer.attn.head_dim), ("expert_size", layer.moe.expert_size)] {
                if !rows.is_multiple_of(PANEL_ROWS) {
                    return Err(format!("{what} is {rows}, which is not a multiple of {PANEL_ROWS}"));
                }
            }
        }
        Ok(ids(spec, &self.kernels))
    }

    fn shape(&self, spec: &BlockSpec) -> String {
        choose::shape(spec)
    }

    fn measure(&self, model: &Arc<Model>, spec: &BlockSpec, _: Vec<KernelId>) -> Vec<KernelId> {
        ids(spec, &choose::fastest(model, spec, self.kernels))
    }

    fn accepts(&self, spec: &BlockSpec, kernels: &[KernelId]) -> bool {
        let named = ops(spec).iter().map(|op| op.name()).eq(kernels.iter().map(KernelId::op));
        named && table(self.kernels, spec, kernels).is_some()
    }

    fn footprint(&self, model: &Model, blocks: &[BlockSpec], limits: &Limits) -> Footprint {
        Footprint {
            kv: cache::bytes_of(blocks, limits),
            scratch: Sizes::of(blocks, model.architecture().hidden_size).bytes(limits),
            device: 0,
        }
    }

    fn compile(
        &self,
        model: &Arc<Model>,
        placed: &[Placed<'_>],
        limits: &Limits,
        _progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Segment>, Error> {
        let pool = self.pool(limits.threads)?;
        // What every token reads is asked for now, experts when they are first chosen.
        for (block, _) in placed {
            match block {
                BlockSpec::Embed(_) => {}
                BlockSpec::Layer(LayerSpec { index: _, attn, moe }) => {
                    [&attn.qkv, &attn.o, &moe.router].into_iter().for_each(|matrix| model.will_need(matrix));
                }
                BlockSpec::Head(head) => model.will_need(&head.weight),
            }
        }
        let specs: Vec<_> = placed.iter().map(|(spec, _)| (*spec).clone()).collect();
        let sizes = Sizes::of(&specs, model.architecture().hidden_size);
        let blocks = placed
            .iter()
            .map(|(block, chosen)| {
                let kernels = match chosen {
                    [] => self.kernels,
                    _ => table(self.kernels, block, chosen).expect("kernels that this backend has accepted"),
                };
                Ok(match block {
                    BlockSpec::Embed(spec) => Block::Embed(spec.clone(), Box::new(kernels)),
                    BlockSpec::Layer(spec) => {
                        if limits.kv == KvType::Q8 && spec.attn.head_dim > Q8_MAX_DIM {
                            let (block, device) = (block.label(), self.name().to_owned());
                            let reason = format!(
                                "head_dim is {}, and --kv q8 takes {Q8_MAX_DIM} at most; use --kv bf16",
                                spec.attn.head_dim
                            );
                            return Err(Error::Unsupported { block, device, reason });
                        }
                        Block::Layer(Box::new(Layer::new(model, spec, kernels, limits)))
                    }
                    BlockSpec::Head(spec) => {
                        Block::Head(Box::new(Head::new(model, spec, kernels, limits.head)?))
                    }
                })
            })
            .collect::<Result<_, Error>>()?;
        let mut segment = CpuSegment {
            model: Arc::clone(model),
            pool,
            blocks,
            scratch: Scratch::new(&sizes, limits),
            clock: Clock::default(),
            decode: DecodeThreads::new(limits.threads, limits.fewer_threads),
            prefill: limits.threads,
            last_row: 0,
        };
        if limits.fewer_threads {
            segment.measure_prefill_threads();
        }
        Ok(Box::new(segment))
    }
}

enum Block {
    Embed(EmbedSpec, Box<Kernels>),
    Layer(Box<Layer>),
    Head(Box<Head>),
}

struct CpuSegment {
    model: Arc<Model>,
    pool: Arc<Mutex<Pool>>,
    blocks: Vec<Block>,
    scratch: Scratch,
    clock: Clock,
    decode: DecodeThreads,
    /// Threads for steps of several tokens.
    prefill: usize,
    /// Row of the hidden states of the last step's last token.
    last_row: usize,
}

impl CpuSegment {
    /// Takes half of the threads for prefill if a matrix times many tokens says so each time that it is asked, some time apart: when
    /// another program has a core for a moment, that would say so too, and cost half of the speed from then on.
    fn measure_prefill_threads(&mut self) {
        const TIMES: usize = 3;
        const APART: Duration = Duration::from_millis(50);
        const TURNS: usize = 3;
        let CpuSegment { model, pool, blocks, scratch, prefill, .. } = self;
        let layer =
            blocks.iter().find_map(|block| if let Block::Layer(layer) = block { Some(layer) } else { None });
        let pool = &mut *pool.lock().unwrap_or_else(PoisonError::into_inner);
        let half = prefill.div_ceil(2);
        let Some(layer) = layer.filter(|_| half < *prefill) else { return };
        let half_is_best = |time: usize| {
            if time > 0 {
                std::thread::sleep(APART);
            }
            let mut tried = [(*prefill, Duration::MAX), (half, Duration::MAX)];
            for _ in 0..TURNS {
                for (threads, best) in &mut tried {
                    pool.set_active(*threads);
                    let started = Instant::now();
                    layer.multiply(model, pool, scratch);
                    *best = (*best).min(started.elapsed());
                }
            }
            threads::best(&tried) == half
        };
        if (0..TIMES).all(half_is_best) {
            *prefill = half;
        }
    }
}

/// What every block of a segment computes with.
struct Context<'a> {
    model: &'a Model,
    pool: &'a mut Pool,
    scratch: &'a mut Scratch,
    clock: &'a mut Clock,
}

impl Segment for CpuSegment {
    fn forward(&mut self, step: &Step<'_>, io: &mut Activations) -> Result<(), Error> {
        let CpuSegment { model, pool, blocks, scratch, clock, decode, prefill, last_row } = self;
        *last_row = step.n_tokens() - 1;
        // A panic in a step leaves the threads as they were.
        let pool = &mut *pool.lock().unwrap_or_else(PoisonError::into_inner);
        let one = step.n_tokens() == 1;
        pool.set_active(if one { decode.next() } else { *prefill });
        let started = Instant::now();
        scratch.begin(step);
        clock.start();
        let mut cx = Context { model, pool, scratch, clock };
        for block in blocks {
            match block {
                Block::Embed(spec, kernels) => embed(&mut cx, kernels, spec, step, &mut io.hidden),
                Block::Layer(layer) => layer.forward(&mut cx, step, &mut io.hidden)?,
                Block::Head(head) => head.forward(&mut cx, step, io)?,
            }
        }
        if one {
            decode.done(started);
        }
        Ok(())
    }

    fn head_again(&mut self, top: Option<usize>, io: &mut Activations) -> Result<(), Error> {
        let CpuSegment { model, pool, blocks, scratch, clock, last_row, .. } = self;
        let Some(Block::Head(head)) = blocks.last_mut() else { return Ok(()) };
        let pool = &mut *pool.lock().unwrap_or_else(PoisonError::into_inner);
        clock.start();
        let mut cx = Context { model, pool, scratch, clock };
        match top {
            Some(top) => head.top(&mut cx, *last_row, (top, false), io),
            None => head.all(&mut cx, std::iter::once(*last_row), io),
        }
    }

    fn head_counts(&mut self) -> Option<HeadCounts> {
        match self.blocks.last() {
            Some(Block::Head(head)) => head.flash.as_ref().map(|flash| flash.counts),
            _ => None,
        }
    }

    fn rewind(&mut self, slot: usize, len: usize) -> bool {
        let mut kept = true;
        for block in &mut self.blocks {
            if let Block::Layer(layer) = block {
                kept &= layer.cache.ring.rewind(slot, len);
            }
        }
        kept
    }

    fn pretend(&mut self, slot: usize, len: usize) -> bool {
        for block in &mut self.blocks {
            if let Block::Layer(layer) = block {
                layer.cache.pretend(slot, len);
            }
        }
        true
    }

    fn threads(&self) -> Option<Threads> {
        Some(Threads { decode: self.decode.next(), prefill: self.prefill })
    }

    fn profile(&mut self, on: bool) -> Vec<Phase> {
        let phases = self.clock.phases().to_vec();
        self.clock.set(on);
        phases
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_that_are_too_wide_for_8_bits_are_refused() {
        let model = crate::fake::model("tiny-maple-2bit");
        let mut block = model.architecture().blocks[1].clone();
        let BlockSpec::Layer(layer) = &mut block else { panic!("a layer") };
        layer.attn.head_dim = Q8_MAX_DIM + 4;
        let limits = Limits { kv: KvType::Q8, ..crate::fake::limits(1, 64) };
        let cpu = Cpu::new(Kernels::detect());
        let segment = cpu.compile(&model, &[(&block, &[])], &limits, &mut |_, _| {});
        let error = segment.err().expect("refused").to_string();
        assert!(error.contains("head_dim is 260") && error.contains("--kv bf16"), "{error}");
    }
}
