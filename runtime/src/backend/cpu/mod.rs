//! The CPU backend: int8 activations against packed weights, through the kernels that
//! [`samara_simd::Kernels`] has for this machine, rows shared out over a rayon pool.
//!
//! Every row of every matrix is computed by one thread in one order, so results do not depend on the
//! number of threads, on the batch, or on the instruction set.

mod layer;
mod scratch;

use std::sync::{Arc, OnceLock};

use rayon::{ThreadPool, ThreadPoolBuilder, prelude::*};
use samara_simd::{Affine4Rows, Kernels, Op};

use self::{
    layer::Layer,
    scratch::{Scratch, Sizes},
};
use super::{Activations, Backend, Footprint, KernelId, Limits, Segment, Step, check_head_input};
use crate::{
    error::Error,
    kv,
    model::Model,
    spec::{BlockSpec, EmbedSpec, HeadSpec},
};

/// More than any machine's cores: a number beyond it is a slip, and starting the threads would stall the machine.
const MAX_THREADS: usize = 1024;

/// The backend; threads are started for its first segment.
pub(super) struct Cpu {
    kernels: Kernels,
    pool: OnceLock<Arc<ThreadPool>>,
}

impl Cpu {
    pub(super) fn new(kernels: Kernels) -> Self {
        Cpu { kernels, pool: OnceLock::new() }
    }

    /// The threads, shared by all segments of this backend.
    fn pool(&self, threads: usize) -> Result<Arc<ThreadPool>, Error> {
        if let Some(pool) = self.pool.get() {
            return Ok(Arc::clone(pool));
        }
        let fails = |reason: String| Error::Threads { threads, reason };
        if threads > MAX_THREADS {
            return Err(fails(format!("at most {MAX_THREADS} are of use")));
        }
        let pool =
            ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("samara-{i}")).build();
        let pool = pool.map_err(|error| fails(error.to_string()))?;
        Ok(Arc::clone(self.pool.get_or_init(|| Arc::new(pool))))
    }
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn supports(&self, spec: &BlockSpec) -> Result<Vec<KernelId>, String> {
        let ops: &[Op] = match spec {
            BlockSpec::Embed(_) => &[Op::Affine4Row],
            BlockSpec::Layer(_) => &[
                Op::RmsNorm,
                Op::RmsNormInPlace,
                Op::Quantize,
                Op::TernaryGemv,
                Op::Rope,
                Op::Attention,
                Op::Bf16Gemv,
                Op::TopKRouter,
                Op::SwigluClamped,
            ],
            BlockSpec::Head(_) => &[Op::RmsNorm, Op::Quantize, Op::Affine4Gemv],
        };
        let id = |op: &Op| KernelId::new(op.name(), self.kernels.id(*op).isa.name());
        Ok(ops.iter().map(id).collect())
    }

    fn footprint(&self, blocks: &[BlockSpec], hidden_size: usize, limits: &Limits) -> Footprint {
        Footprint { kv: kv::bytes_of(blocks, limits), scratch: Sizes::of(blocks, hidden_size).bytes(limits) }
    }

    fn compile(
        &self,
        model: &Arc<Model>,
        blocks: &[BlockSpec],
        limits: &Limits,
    ) -> Result<Box<dyn Segment>, Error> {
        let pool = self.pool(limits.threads)?;
        let sizes = Sizes::of(blocks, model.architecture().hidden_size);
        let blocks = blocks
            .iter()
            .map(|block| {
                Ok(match block {
                    BlockSpec::Embed(spec) => Block::Embed(spec.clone()),
                    BlockSpec::Layer(spec) => Block::Layer(Box::new(Layer::new(model, spec, limits))),
                    BlockSpec::Head(spec) => Block::Head(Head::new(model, spec)?),
                })
            })
            .collect::<Result<_, Error>>()?;
        let scratch = Scratch::new(&sizes, limits);
        Ok(Box::new(CpuSegment { model: Arc::clone(model), kernels: self.kernels, pool, blocks, scratch }))
    }
}

enum Block {
    Embed(EmbedSpec),
    Layer(Box<Layer>),
    Head(Head),
}

struct CpuSegment {
    model: Arc<Model>,
    kernels: Kernels,
    pool: Arc<ThreadPool>,
    blocks: Vec<Block>,
    scratch: Scratch,
}

impl Segment for CpuSegment {
    fn forward(&mut self, step: &Step<'_>, io: &mut Activations) -> Result<(), Error> {
        let CpuSegment { model, kernels, pool, blocks, scratch } = self;
        pool.install(|| {
            for block in blocks {
                match block {
                    Block::Embed(spec) => embed(model, kernels, spec, step, &mut io.hidden),
                    Block::Layer(layer) => layer.forward(model, kernels, scratch, step, &mut io.hidden)?,
                    Block::Head(head) => head.forward(model, kernels, scratch, step, io)?,
                }
            }
            Ok(())
        })
    }

    fn rewind(&mut self, slot: usize, len: usize) -> bool {
        let mut kept = true;
        for block in &mut self.blocks {
            if let Block::Layer(layer) = block {
                kept &= layer.cache.rewind(slot, len);
            }
        }
        kept
    }
}

fn embed(model: &Model, kernels: &Kernels, spec: &EmbedSpec, step: &Step<'_>, hidden: &mut [f32]) {
    let EmbedSpec { weight } = spec;
    let rows = Affine4Rows::new(model.matrix(weight), weight.rows, weight.cols);
    for ((_, _, token), out) in step.tokens().zip(hidden.chunks_exact_mut(weight.cols)) {
        kernels.affine4_row(&rows, token as usize, out);
    }
}

struct Head {
    spec: HeadSpec,
    norm: Vec<f32>,
    /// Row of the weight that holds a token's logit, when rows are not in token order.
    row_of: Option<Vec<u32>>,
}

impl Head {
    fn new(model: &Model, spec: &HeadSpec) -> Result<Self, Error> {
        let HeadSpec { norm, weight: _, token_map } = spec;
        let row_of = match token_map {
            Some(map) => {
                let map = model.token_map(map)?;
                let mut row_of = vec![0; map.len()];
                map.iter().zip(0..).for_each(|(&token, row)| row_of[token as usize] = row);
                Some(row_of)
            }
            None => None,
        };
        Ok(Head { norm: model.vector(&norm.weight), row_of, spec: spec.clone() })
    }

    fn forward(
        &self,
        model: &Model,
        kernels: &Kernels,
        scratch: &mut Scratch,
        step: &Step<'_>,
        io: &mut Activations,
    ) -> Result<(), Error> {
        let HeadSpec { norm, weight, token_map: _ } = &self.spec;
        let rows = Affine4Rows::new(model.matrix(weight), weight.rows, weight.cols);
        for (row, logits) in step.logit_rows().zip(io.logits.chunks_exact_mut(weight.rows)) {
            let hidden = &io.hidden[row * weight.cols..(row + 1) * weight.cols];
            let normed = &mut scratch.normed[..weight.cols];
            kernels.rms_norm(hidden, &self.norm, norm.eps, normed);
            check_head_input(normed)?;
            scratch.act.quantize(kernels, normed, weight.cols);
            let act = scratch.act.row(0, weight.cols);
            let out = match &self.row_of {
                Some(_) => &mut scratch.head[..],
                None => &mut *logits,
            };
            let chunk = scratch::rows_per_task(weight.rows);
            out.par_chunks_mut(chunk).enumerate().for_each(|(i, out)| {
                kernels.affine4_gemv(&rows, &act, i * chunk..i * chunk + out.len(), out);
            });
            if let Some(row_of) = &self.row_of {
                let head = &scratch.head;
                logits.par_chunks_mut(chunk).zip(row_of.par_chunks(chunk)).for_each(|(logits, rows)| {
                    logits.iter_mut().zip(rows).for_each(|(l, &r)| *l = head[r as usize])
                });
            }
        }
        Ok(())
    }
}
