//! Every buffer a CPU segment writes, sized when it is compiled.

use rayon::prelude::*;
use samara_simd::{ACT_GROUP, ACT_HALF, Kernels, QuantizedRow, padded_cols};

use crate::{
    backend::Limits,
    spec::{BlockSpec, HeadSpec, LayerSpec},
};

/// Tasks a matrix is cut into: enough to share out evenly, few enough that a task is worth waking for.
const TASKS: usize = 32;

/// Rows of one task, whole panels.
pub(super) fn rows_per_task(rows: usize) -> usize {
    rows.div_ceil(TASKS).next_multiple_of(samara_simd::PANEL_ROWS).max(16)
}

/// The largest dimensions among a segment's blocks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sizes {
    hidden: usize,
    qkv: usize,
    q: usize,
    n_heads: usize,
    n_experts: usize,
    n_used: usize,
    expert: usize,
    rope: usize,
    /// Vocabulary, when the head's rows are not in token order.
    head: usize,
}

impl Sizes {
    pub(super) fn of(blocks: &[BlockSpec], hidden: usize) -> Self {
        let mut sizes = Sizes { hidden, ..Sizes::default() };
        for block in blocks {
            match block {
                BlockSpec::Embed(_) => {}
                BlockSpec::Layer(LayerSpec { index: _, attn, moe }) => {
                    sizes.qkv = sizes.qkv.max(attn.qkv.rows);
                    sizes.q = sizes.q.max(attn.o.cols);
                    sizes.n_heads = sizes.n_heads.max(attn.n_heads);
                    sizes.n_experts = sizes.n_experts.max(moe.n_experts);
                    sizes.n_used = sizes.n_used.max(moe.n_used);
                    sizes.expert = sizes.expert.max(moe.expert_size);
                    sizes.rope = sizes.rope.max(attn.rope.map_or(0, |rope| rope.dim / 2));
                }
                BlockSpec::Head(HeadSpec { norm: _, weight, token_map }) => {
                    sizes.head = sizes.head.max(token_map.map_or(0, |_| weight.rows));
                }
            }
        }
        sizes
    }

    /// Bytes [`Scratch::new`] and the head's row list allocate; norms and other short lists are left out.
    pub(super) fn bytes(&self, limits: &Limits) -> u64 {
        let Sizes { hidden, qkv, q, n_heads, n_experts, n_used, expert, rope, head } = *self;
        let (tokens, pairs) = (limits.max_batch as u64, (limits.max_batch * n_used) as u64);
        let act = |cols: usize| {
            let cols = padded_cols(cols) as u64;
            cols + 4 * (cols / ACT_GROUP as u64 + cols / ACT_HALF as u64)
        };
        let per_token = 4 * (2 * hidden + qkv + q + n_experts + 2 * rope) as u64 + act(hidden.max(q));
        let per_pair = 4 * (3 * expert + hidden) as u64 + act(expert);
        tokens * per_token + pairs * per_pair + 4 * (n_heads * limits.context + 2 * head) as u64
    }
}

/// One token's way through one expert.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pair {
    pub(super) expert: u32,
    pub(super) token: u32,
    pub(super) weight: f32,
}

/// Buffers of a segment. The first dimension is tokens of the step, or (token, expert) pairs.
#[derive(Debug)]
pub(super) struct Scratch {
    /// `[tokens, hidden_size]`.
    pub(super) normed: Vec<f32>,
    /// Quantised `normed` or attention output.
    pub(super) act: QuantizedRows,
    /// `[tokens, qkv rows]`.
    pub(super) qkv: Vec<f32>,
    /// Attention output, `[n_heads, tokens, head_dim]`.
    pub(super) by_head: Vec<f32>,
    /// `[tokens, hidden_size]`.
    pub(super) delta: Vec<f32>,
    /// Attention scores, `[n_heads, context]`.
    pub(super) scores: Vec<f32>,
    /// Cosines and sines, `[tokens, rope dim / 2]` each.
    pub(super) cos: Vec<f32>,
    pub(super) sin: Vec<f32>,
    /// Router logits, `[tokens, n_experts]`.
    pub(super) router: Vec<f32>,
    /// Chosen experts and weights of one token, `[n_used]`.
    pub(super) experts: Vec<u32>,
    pub(super) weights: Vec<f32>,
    /// Sorted by expert.
    pub(super) pairs: Vec<Pair>,
    /// Where pair (token, rank) went in `pairs`, `[tokens, n_used]`.
    pub(super) place: Vec<u32>,
    /// `[pairs, 2, expert_size]`: gate, then up.
    pub(super) gate_up: Vec<f32>,
    /// `[pairs, expert_size]`.
    pub(super) inner: Vec<f32>,
    /// Quantised `inner`.
    pub(super) inner_act: QuantizedRows,
    /// `[pairs, hidden_size]`.
    pub(super) y: Vec<f32>,
    /// Logits in the order of the head's rows, `[vocab_size]`.
    pub(super) head: Vec<f32>,
}

impl Scratch {
    pub(super) fn new(sizes: &Sizes, limits: &Limits) -> Self {
        let Sizes { hidden, qkv, q, n_heads, n_experts, n_used, expert, rope, head } = *sizes;
        let tokens = limits.max_batch;
        let pairs = tokens * n_used;
        Scratch {
            normed: vec![0.0; tokens * hidden],
            act: QuantizedRows::new(tokens, hidden.max(q)),
            qkv: vec![0.0; tokens * qkv],
            by_head: vec![0.0; tokens * q],
            delta: vec![0.0; tokens * hidden],
            scores: vec![0.0; n_heads * limits.context],
            cos: vec![0.0; tokens * rope],
            sin: vec![0.0; tokens * rope],
            router: vec![0.0; tokens * n_experts],
            experts: vec![0; n_used],
            weights: vec![0.0; n_used],
            pairs: vec![Pair::default(); pairs],
            place: vec![0; pairs],
            gate_up: vec![0.0; pairs * 2 * expert],
            inner: vec![0.0; pairs * expert],
            inner_act: QuantizedRows::new(pairs, expert),
            y: vec![0.0; pairs * hidden],
            head: vec![0.0; head],
        }
    }
}

/// int8 activations of several rows. Widths may change from one use to the next.
#[derive(Debug)]
pub(super) struct QuantizedRows {
    q: Vec<i8>,
    scales: Vec<f32>,
    offsets: Vec<f32>,
}

impl QuantizedRows {
    fn new(n: usize, max_cols: usize) -> Self {
        let len = n * padded_cols(max_cols);
        QuantizedRows {
            q: vec![0; len],
            scales: vec![0.0; len / ACT_GROUP],
            offsets: vec![0.0; len / ACT_HALF],
        }
    }

    /// Quantises `x`, `[n, cols]`.
    pub(super) fn quantize(&mut self, kernels: &Kernels, x: &[f32], cols: usize) {
        let padded = padded_cols(cols);
        x.par_chunks_exact(cols)
            .zip(self.q.par_chunks_exact_mut(padded))
            .zip(self.scales.par_chunks_exact_mut(padded / ACT_GROUP))
            .zip(self.offsets.par_chunks_exact_mut(padded / ACT_HALF))
            .for_each(|(((x, q), scales), offsets)| {
                kernels.quantize(x, q, scales, offsets);
            });
    }

    /// Row `i` of the last [`quantize`](Self::quantize), which had `cols` columns.
    pub(super) fn row(&self, i: usize, cols: usize) -> QuantizedRow<'_> {
        let padded = padded_cols(cols);
        let of = |per: usize| i * (padded / per)..(i + 1) * (padded / per);
        QuantizedRow::new(&self.q[of(1)], &self.scales[of(ACT_GROUP)], &self.offsets[of(ACT_HALF)])
    }
}
