//! Every buffer a CPU segment writes, sized when it is compiled.

use samara_pool::Chunks;
use samara_simd::{
    KV_PART, Kernels, PANEL_ROWS, QuantizedRow, QuantizedRows, attention_state_len, offsets_len, padded_cols,
    scales_len,
};

use crate::{
    backend::{Limits, Step},
    flash::HeadKind,
    spec::{BlockSpec, HeadSpec, LayerSpec, RopeSpec},
};

/// (token, expert) pairs of one expert that a worker takes through it together.
pub(super) const PAIRS: usize = 64;

/// Rows of logits that are computed together.
pub(super) const LOGIT_ROWS: usize = 16;

/// Rows of a matrix that make a piece when a step has several tokens.
pub(super) const TILE: usize = 64;

/// Rows of a piece of the inner or the output side of an expert, of which each has `rows`: whole panels that no two
/// experts share.
pub(super) fn piece_of(rows: usize) -> usize {
    [64, 32, 16, 8, PANEL_ROWS].into_iter().find(|piece| rows.is_multiple_of(*piece)).unwrap_or(rows)
}

/// The largest dimensions among a segment's blocks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sizes {
    hidden: usize,
    qkv: usize,
    q: usize,
    head_dim: usize,
    n_kv_heads: usize,
    /// Query heads of a kv head.
    group: usize,
    n_experts: usize,
    n_used: usize,
    expert: usize,
    rope: usize,
    /// Rows of the head.
    vocab: usize,
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
                    sizes.head_dim = sizes.head_dim.max(attn.head_dim);
                    sizes.n_kv_heads = sizes.n_kv_heads.max(attn.n_kv_heads);
                    sizes.group = sizes.group.max(attn.n_heads / attn.n_kv_heads);
                    sizes.n_experts = sizes.n_experts.max(moe.n_experts);
                    sizes.n_used = sizes.n_used.max(moe.n_used);
                    sizes.expert = sizes.expert.max(moe.expert_size);
                    sizes.rope = sizes.rope.max(attn.rope.map_or(0, |rope| rope.dim / 2));
                }
                BlockSpec::Head(HeadSpec { norm: _, weight, token_map: _, flash: _ }) => {
                    sizes.vocab = sizes.vocab.max(weight.rows);
                }
            }
        }
        sizes
    }

    /// Elements of the states of all parts of a context, for one token.
    fn states(&self, context: usize) -> usize {
        // A window that starts inside a part ends inside another.
        let parts = context.div_ceil(KV_PART) + 1;
        self.n_kv_heads * parts * attention_state_len(self.group, self.head_dim)
    }

    /// Bytes [`Scratch::new`] and the head's lists of rows allocate; norms and other short lists are left out.
    pub(super) fn bytes(&self, limits: &Limits) -> u64 {
        let Sizes { hidden, qkv, q, head_dim, n_kv_heads: _, group, n_experts, n_used, expert, rope, vocab } =
            *self;
        let act = |cols: usize| padded_cols(cols) + 4 * (scales_len(cols) + offsets_len(cols));
        let per_token = 4 * (2 * hidden + qkv + q + n_experts + 2 * n_used + 2 * rope + 1)
            + size_of::<(usize, usize)>()
            + act(hidden.max(q));
        let per_pair = 4 * (hidden + 1) + size_of::<Pair>();
        let state = attention_state_len(group, head_dim);
        let per_worker = 4
            * (2 * PAIRS * expert
                + q.max(hidden).max(PAIRS * expert)
                + group * (KV_PART + head_dim)
                + 2 * state)
            + PAIRS * (4 + act(expert));
        let logit_rows = limits.max_logit_rows.min(LOGIT_ROWS);
        // Where a token's row is; what token a row has, and logits to be ranked.
        let lists = if limits.head.kind == HeadKind::Exact { 1 } else { 3 };
        let fixed = n_used * (act(expert) + 4 * expert)
            + 4 * (self.states(limits.context) + (logit_rows + lists) * vocab);
        (limits.max_batch * (per_token + n_used * per_pair) + limits.threads * per_worker + fixed) as u64
    }
}

/// One token's way through one expert.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pair {
    pub(super) expert: u32,
    pub(super) token: u32,
}

/// What one thread writes.
#[derive(Debug)]
pub(super) struct Worker {
    /// `[PAIRS, expert_size]` each.
    pub(super) gate: Vec<f32>,
    pub(super) up: Vec<f32>,
    /// `[PAIRS, expert_size]`, `[n_heads * head_dim]` or `[hidden_size]`.
    pub(super) row: Vec<f32>,
    /// Of `[PAIRS, expert_size]`.
    pub(super) act: Act,
    /// Tokens of pairs, `[PAIRS]`.
    pub(super) tokens: Vec<u32>,
    /// Query heads of a kv head, `[group, head_dim]`.
    pub(super) queries: Vec<f32>,
    /// `[group, KV_PART]`.
    pub(super) weights: Vec<f32>,
    /// Attention states, of a part and of all before it.
    pub(super) part: Vec<f32>,
    pub(super) state: Vec<f32>,
}

/// Buffers of a segment. The first dimension is tokens of the step, or (token, expert) pairs.
#[derive(Debug)]
pub(super) struct Scratch {
    /// `[tokens, hidden_size]`.
    pub(super) normed: Vec<f32>,
    /// Quantised `normed` or attention output.
    pub(super) act: Act,
    /// 0, 1, 2, …
    pub(super) tokens: Vec<u32>,
    /// Slot and position of each token of the step.
    pub(super) rows: Vec<(usize, usize)>,
    /// Heads of q, k and v, `[heads, tokens, head_dim]`.
    pub(super) qkv: Vec<f32>,
    /// Attention output, `[n_kv_heads, tokens, group, head_dim]`.
    pub(super) mixed: Vec<f32>,
    /// States of the parts of one token, `[n_kv_heads, parts, state]`.
    pub(super) states: Vec<f32>,
    /// Rows of the output projection, in tiles: `[tiles, tokens, TILE]`.
    pub(super) delta: Vec<f32>,
    pub(super) angles: Angles,
    /// Router logits, `[tokens, n_experts]`.
    pub(super) router: Vec<f32>,
    /// Chosen experts and weights, `[tokens, n_used]`.
    pub(super) experts: Vec<u32>,
    pub(super) weights: Vec<f32>,
    /// Sorted by expert.
    pub(super) pairs: Vec<Pair>,
    /// Where each chosen expert's pairs begin, and the end.
    pub(super) bounds: Vec<u32>,
    /// Where pair (token, rank) went in `pairs`, `[tokens, n_used]`.
    pub(super) place: Vec<u32>,
    /// Of the inner side of one token's experts, `[n_used, expert_size]`.
    pub(super) inner: Vec<f32>,
    pub(super) inner_act: Act,
    /// `[pairs, hidden_size]`.
    pub(super) y: Vec<f32>,
    /// Logits in the order of the head's rows, in tiles: `[tiles, rows of logits, rows of the tile]`.
    pub(super) head: Vec<f32>,
    pub(super) workers: Vec<Worker>,
}

impl Scratch {
    /// A new step begins.
    pub(super) fn begin(&mut self, step: &Step<'_>) {
        self.rows.clear();
        self.rows.extend(step.tokens().map(|(slot, position, _)| (slot, position)));
        self.angles.of = None;
    }

    pub(super) fn new(sizes: &Sizes, limits: &Limits) -> Self {
        let Sizes { hidden, qkv, q, head_dim, n_kv_heads: _, group, n_experts, n_used, expert, rope, vocab } =
            *sizes;
        let tokens = limits.max_batch;
        let pairs = tokens * n_used;
        let zeros = |n: usize| vec![0.0f32; n];
        let state = attention_state_len(group, head_dim);
        let worker = || Worker {
            gate: zeros(PAIRS * expert),
            up: zeros(PAIRS * expert),
            row: zeros(q.max(hidden).max(PAIRS * expert)),
            act: Act::new(PAIRS, expert),
            tokens: vec![0; PAIRS],
            queries: zeros(group * head_dim),
            weights: zeros(group * KV_PART),
            part: zeros(state),
            state: zeros(state),
        };
        Scratch {
            normed: zeros(tokens * hidden),
            act: Act::new(tokens, hidden.max(q)),
            tokens: (0..).take(tokens).collect(),
            rows: Vec::with_capacity(tokens),
            qkv: zeros(tokens * qkv),
            mixed: zeros(tokens * q),
            states: zeros(sizes.states(limits.context)),
            delta: zeros(tokens * hidden),
            angles: Angles { of: None, cos: zeros(tokens * rope), sin: zeros(tokens * rope) },
            router: zeros(tokens * n_experts),
            experts: vec![0; pairs],
            weights: zeros(pairs),
            pairs: vec![Pair::default(); pairs],
            bounds: Vec::with_capacity(n_experts + 1),
            place: vec![0; pairs],
            inner: zeros(n_used * expert),
            inner_act: Act::new(n_used, expert),
            y: zeros(pairs * hidden),
            head: zeros(limits.max_logit_rows.min(LOGIT_ROWS) * vocab),
            workers: std::iter::repeat_with(worker).take(limits.threads).collect(),
        }
    }
}

/// int8 activations of several rows. Widths may change from one use to the next.
#[derive(Debug)]
pub(super) struct Act {
    q: Vec<i8>,
    scales: Vec<f32>,
    offsets: Vec<f32>,
}

/// The buffers of some rows: i8 values, scales and offsets.
pub(super) type ActRun<'a> = (&'a mut [i8], &'a mut [f32], &'a mut [f32]);

impl Act {
    pub(super) fn new(n: usize, max_cols: usize) -> Self {
        Act {
            q: vec![0; n * padded_cols(max_cols)],
            scales: vec![0.0; n * scales_len(max_cols)],
            offsets: vec![0.0; n * offsets_len(max_cols)],
        }
    }

    /// Quantises `x`, `[n, cols]`, as the first n rows.
    pub(super) fn quantize(&mut self, kernels: &Kernels, x: &[f32], cols: usize) {
        let n = x.len() / cols;
        let run = (
            &mut self.q[..n * padded_cols(cols)],
            &mut self.scales[..n * scales_len(cols)],
            &mut self.offsets[..n * offsets_len(cols)],
        );
        quantize_rows(kernels, x, cols, run);
    }

    /// The first n rows, of `cols` columns, as pieces.
    pub(super) fn pieces(
        &mut self,
        n: usize,
        cols: usize,
    ) -> (Chunks<'_, i8>, Chunks<'_, f32>, Chunks<'_, f32>) {
        let (q, scales, offsets) = (padded_cols(cols), scales_len(cols), offsets_len(cols));
        (
            Chunks::new(&mut self.q[..n * q], q),
            Chunks::new(&mut self.scales[..n * scales], scales),
            Chunks::new(&mut self.offsets[..n * offsets], offsets),
        )
    }

    /// The first n rows, which have `cols` columns.
    pub(super) fn rows(&self, n: usize, cols: usize) -> QuantizedRows<'_> {
        QuantizedRows::new(
            &self.q[..n * padded_cols(cols)],
            &self.scales[..n * scales_len(cols)],
            &self.offsets[..n * offsets_len(cols)],
            n,
            cols,
        )
    }

    /// Row `i`, which has `cols` columns.
    pub(super) fn row(&self, i: usize, cols: usize) -> QuantizedRow<'_> {
        self.rows(i + 1, cols).row(i)
    }
}

/// Quantises `x`, `[n, cols]`, into the buffers of n rows.
pub(super) fn quantize_rows(kernels: &Kernels, x: &[f32], cols: usize, run: ActRun<'_>) {
    for (x, (q, scales, offsets)) in x.chunks_exact(cols).zip(rows_of(run, cols)) {
        kernels.quantize(x, q, scales, offsets);
    }
}

/// The buffers of each row, of `cols` columns.
pub(super) fn rows_of((q, scales, offsets): ActRun<'_>, cols: usize) -> impl Iterator<Item = ActRun<'_>> {
    let rows = q.chunks_exact_mut(padded_cols(cols)).zip(scales.chunks_exact_mut(scales_len(cols)));
    rows.zip(offsets.chunks_exact_mut(offsets_len(cols))).map(|((q, scales), offsets)| (q, scales, offsets))
}

/// Cosines and sines of a step's positions, `[tokens, dim / 2]`; layers that rotate alike share them.
#[derive(Debug)]
pub(super) struct Angles {
    /// What they are of, in this step.
    of: Option<RopeSpec>,
    pub(super) cos: Vec<f32>,
    pub(super) sin: Vec<f32>,
}

impl Angles {
    /// Fills in the angles of `rope`, computed in f64, unless they are there.
    pub(super) fn want(&mut self, rope: &RopeSpec, step: &Step<'_>) {
        if self.of.as_ref() == Some(rope) {
            return;
        }
        self.of = Some(*rope);
        let half = rope.dim / 2;
        let rows = self.cos.chunks_exact_mut(half).zip(self.sin.chunks_exact_mut(half));
        for ((_, position, _), (cos, sin)) in step.tokens().zip(rows) {
            for (i, (cos, sin)) in cos.iter_mut().zip(sin).enumerate() {
                (*sin, *cos) = RopeSpec::sin_cos(position as f64 * rope.frequency(i));
            }
        }
    }
}
