//! A layer's dispatches: for each kernel its constants, its buffers and its grid, in one place.

use super::{
    inventory::BufferId,
    ops::{Extent, Maker, Op},
    plan::{LayerPlan, MAX_PARTS, Scratch, TILE_TOKENS, max_tiles},
    weights::Split,
};
use crate::{
    error::Error,
    kv::KvType,
    spec::{AttnSpec, LayerSpec, MatrixRef, MoeSpec},
};

/// Panels of 4 rows of a gemm's tile.
pub(super) const TILE_PANELS: usize = 32;

/// Panels that a workgroup of a decode kernel computes: of qkv, of o, of gate (and as many of up), of down.
pub(super) const QKV_PANELS: usize = 2;
pub(super) const O_PANELS: usize = 2;
pub(super) const GATE_PANELS: usize = 2;
pub(super) const DOWN_PANELS: usize = 1;

/// Keys that are worth a workgroup.
pub(super) const PART_KEYS: usize = 64;

/// Parts that `n_keys` keys are cut into, as `lib/parts.wgsl` has it.
fn n_parts(n_keys: usize) -> usize {
    let wanted = n_keys.div_ceil(PART_KEYS).clamp(1, MAX_PARTS);
    let keys = n_keys.div_ceil(wanted).next_multiple_of(32);
    n_keys.div_ceil(keys)
}

/// What PER_SPLIT is where all is in the first buffer.
const ALL_IN_FIRST: f64 = u32::MAX as f64;

/// Bytes of a TERNARY2 matrix.
fn ternary_bytes(m: &MatrixRef) -> u64 {
    (m.rows * m.cols / 4 + 2 * m.rows) as u64
}

/// Units in the first buffer, as the kernels take it.
pub(super) fn per_split(split: &Split, units: usize) -> f64 {
    if split.per_split >= units { ALL_IN_FIRST } else { split.per_split as f64 }
}

fn flag(on: bool) -> f64 {
    f64::from(u8::from(on))
}

fn tokens(extent: &Extent) -> usize {
    extent.n_tokens as usize
}

fn grid(x: usize, y: usize) -> [u32; 3] {
    [x as u32, y as u32, 1]
}

/// A layer whose dispatches are to be made.
pub(super) struct LayerMaker<'a> {
    pub(super) maker: &'a Maker<'a>,
    pub(super) scratch: &'a Scratch,
    pub(super) plan: &'a LayerPlan,
}

impl LayerMaker<'_> {
    fn attn(&self) -> &AttnSpec {
        &self.plan.spec.attn
    }

    fn moe(&self) -> &MoeSpec {
        &self.plan.spec.moe
    }

    /// Keys that the token of a step of one sees.
    fn n_keys(&self) -> impl Fn(&Extent) -> usize + Copy + Send + 'static {
        let window = self.attn().window.unwrap_or(usize::MAX);
        move |extent| window.min(extent.position as usize + 1)
    }

    /// Dispatches of a step of one token.
    ///
    /// # Errors
    /// A kernel that does not compile.
    pub(super) fn decode(&self) -> Result<Vec<Op>, Error> {
        Ok(vec![
            self.norm_gemv()?,
            self.attention()?,
            self.attention_merge()?,
            self.gemv_add()?,
            self.norm_router()?,
            self.experts_in()?,
            self.experts_out()?,
        ])
    }

    fn norm_gemv(&self) -> Result<Op, Error> {
        let Scratch { h, qkv: y, .. } = *self.scratch;
        let AttnSpec { norm, qkv, .. } = self.attn();
        let (groups, bytes) = (qkv.rows.div_ceil(4).div_ceil(QKV_PANELS), ternary_bytes(qkv));
        self.maker.op(
            "norm_gemv",
            &[
                ("COLS", qkv.cols as f64),
                ("ROWS", qkv.rows as f64),
                ("EPS", norm.eps.into()),
                ("PANELS", QKV_PANELS as f64),
            ],
            &[h, self.plan.attn_norm, self.plan.qkv, y],
            move |_| grid(groups, 1),
            move |_| bytes,
        )
    }

    /// Constants of kernels that know about parts.
    fn parts(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("N_HEADS", self.attn().n_heads as f64),
            ("WINDOW", self.attn().window.unwrap_or(0) as f64),
            ("PART_KEYS", PART_KEYS as f64),
            ("MAX_PARTS", MAX_PARTS as f64),
        ]
    }

    fn attention(&self) -> Result<Op, Error> {
        let Scratch { rows, qkv, states, .. } = *self.scratch;
        let LayerPlan { qk_norm, rope, k, v, .. } = *self.plan;
        let AttnSpec { n_kv_heads, head_dim, .. } = *self.attn();
        let n_keys = self.n_keys();
        let each = 2 * n_kv_heads * self.plan.kv.head_bytes(head_dim);
        self.maker.op(
            "attention",
            &[self.parts(), self.cache(), self.norms_and_rope()].concat(),
            &[rows, qkv, qk_norm, rope, k, v, states],
            move |extent| grid(n_kv_heads, n_parts(n_keys(extent))),
            move |extent| (each * n_keys(extent)) as u64,
        )
    }

    fn attention_merge(&self) -> Result<Op, Error> {
        let Scratch { rows, states, q, .. } = *self.scratch;
        let AttnSpec { head_dim, o, .. } = self.attn();
        let spans = o.cols.div_ceil(256);
        self.maker.op(
            "attention_merge",
            &[self.parts(), vec![("HEAD_DIM", *head_dim as f64)]].concat(),
            &[rows, states, q],
            move |_| grid(spans, 1),
            |_| 0,
        )
    }

    fn gemv_add(&self) -> Result<Op, Error> {
        let Scratch { q, h, .. } = *self.scratch;
        let o = self.attn().o;
        let (groups, bytes) = (o.rows.div_ceil(4).div_ceil(O_PANELS), ternary_bytes(&o));
        self.maker.op(
            "gemv_add",
            &[("COLS", o.cols as f64), ("ROWS", o.rows as f64), ("PANELS", O_PANELS as f64)],
            &[q, self.plan.o, h],
            move |_| grid(groups, 1),
            move |_| bytes,
        )
    }

    fn norm_router(&self) -> Result<Op, Error> {
        let Scratch { h, router: logits, q, .. } = *self.scratch;
        let MoeSpec { norm, router, .. } = self.moe();
        let (panels, bytes) = (router.rows.div_ceil(4), 2 * (router.rows * router.cols) as u64);
        self.maker.op(
            "norm_router",
            &[("COLS", router.cols as f64), ("ROWS", router.rows as f64), ("EPS", norm.eps.into())],
            &[h, self.plan.moe_norm, self.plan.router, logits, q],
            move |_| grid(panels, 1),
            move |_| bytes,
        )
    }

    fn experts_in(&self) -> Result<Op, Error> {
        let Scratch { q, router: logits, act, chosen, status, .. } = *self.scratch;
        let [x0, x1] = self.plan.experts.buffers;
        let MoeSpec { router, n_experts, n_used, expert_size, norm_topk, gate_max, up_abs_max, .. } =
            *self.moe();
        let groups = expert_size.div_ceil(4).div_ceil(GATE_PANELS);
        let constants = [
            self.blocks(),
            vec![
                ("COLS", router.cols as f64),
                ("EXPERT_SIZE", expert_size as f64),
                ("PANELS", GATE_PANELS as f64),
                ("N_EXPERTS", n_experts as f64),
                ("N_USED", n_used as f64),
                ("UP_AT", self.plan.expert.up_at as f64),
                ("NORM_TOPK", flag(norm_topk)),
                ("GATE_MAX", gate_max.into()),
                ("UP_ABS_MAX", up_abs_max.into()),
            ],
        ]
        .concat();
        self.maker.op(
            "experts_in",
            &constants,
            &[q, logits, x0, x1, act, chosen, status],
            move |_| grid(groups + 1, n_used),
            self.expert_bytes(2.0 / 3.0),
        )
    }

    fn experts_out(&self) -> Result<Op, Error> {
        let Scratch { h, act, chosen, .. } = *self.scratch;
        let [x0, x1] = self.plan.experts.buffers;
        let MoeSpec { router, n_used, expert_size, .. } = *self.moe();
        let groups = router.cols.div_ceil(4).div_ceil(DOWN_PANELS);
        let constants = [
            self.blocks(),
            vec![
                ("ROWS", router.cols as f64),
                ("COLS", expert_size as f64),
                ("Q_ROWS", n_used as f64),
                ("PANELS", DOWN_PANELS as f64),
                ("DOWN_AT", self.plan.expert.down_at as f64),
            ],
        ]
        .concat();
        self.maker.op(
            "experts_out",
            &constants,
            &[act, chosen, x0, x1, h],
            move |_| grid(groups, 1),
            self.expert_bytes(1.0 / 3.0),
        )
    }

    /// Dispatches of a step of several tokens.
    ///
    /// # Errors
    /// A kernel that does not compile.
    pub(super) fn prefill(&self) -> Result<Vec<Op>, Error> {
        let Scratch { h, mixed, xq, xs, act, normed, .. } = *self.scratch;
        let LayerSpec { index: _, attn, moe } = &self.plan.spec;
        let n_used = moe.n_used;
        Ok(vec![
            self.norm_quantize(self.plan.attn_norm, attn.norm.eps, false, attn.qkv.cols)?,
            self.ternary_gemm(&attn.qkv, self.plan.qkv, self.scratch.qkv, false)?,
            self.rope_append()?,
            self.attention_prefill()?,
            self.quantize_rows(mixed, attn.o.cols, 1)?,
            self.ternary_gemm(&attn.o, self.plan.o, h, true)?,
            self.norm_quantize(self.plan.moe_norm, moe.norm.eps, true, moe.router.cols)?,
            self.router_gemm(normed)?,
            self.route()?,
            self.sort_pairs()?,
            self.experts_in_gemm(xq, xs)?,
            self.quantize_rows(act, moe.expert_size, n_used)?,
            self.experts_out_gemm(xq, xs)?,
            self.combine()?,
        ])
    }

    fn norm_quantize(&self, norm: BufferId, eps: f32, normed: bool, cols: usize) -> Result<Op, Error> {
        let Scratch { h, xq, xs, normed: out, .. } = *self.scratch;
        self.maker.op(
            "norm_quantize",
            &[("COLS", cols as f64), ("EPS", eps.into()), ("NORMED", flag(normed))],
            &[h, norm, xq, xs, out],
            |extent| grid(tokens(extent), 1),
            |_| 0,
        )
    }

    /// `each` rows for a token.
    fn quantize_rows(&self, x: BufferId, cols: usize, each: usize) -> Result<Op, Error> {
        let units = 8 * cols.div_ceil(256);
        self.maker.op(
            "quantize_rows",
            &[("COLS", cols as f64)],
            &[x, self.scratch.xq, self.scratch.xs],
            move |extent| grid((tokens(extent) * each * units).div_ceil(256), 1),
            |_| 0,
        )
    }

    fn ternary_gemm(&self, m: &MatrixRef, w: BufferId, out: BufferId, add: bool) -> Result<Op, Error> {
        let Scratch { rows, xq, xs, .. } = *self.scratch;
        let panels = m.rows.div_ceil(4 * TILE_PANELS);
        let bytes = ternary_bytes(m);
        self.maker.op(
            "ternary_gemm",
            &[
                ("ROWS", m.rows as f64),
                ("COLS", m.cols as f64),
                ("ADD", flag(add)),
                ("PANELS", TILE_PANELS as f64),
                ("TOKENS", TILE_TOKENS as f64),
            ],
            &[xq, xs, rows, w, out],
            move |extent| grid(panels, tokens(extent).div_ceil(TILE_TOKENS)),
            move |_| bytes,
        )
    }

    fn rope_append(&self) -> Result<Op, Error> {
        let Scratch { rows, qkv, .. } = *self.scratch;
        let LayerPlan { qk_norm, rope, k, v, .. } = *self.plan;
        let constants = [self.heads(), self.norms_and_rope(), self.cache()].concat();
        let n_heads = self.attn().n_heads + 2 * self.attn().n_kv_heads;
        self.maker.op(
            "rope_append",
            &constants,
            &[rows, qkv, qk_norm, rope, k, v],
            move |extent| grid(tokens(extent), n_heads.div_ceil(8)),
            |_| 0,
        )
    }

    fn attention_prefill(&self) -> Result<Op, Error> {
        let Scratch { rows, qkv, mixed, .. } = *self.scratch;
        let LayerPlan { k, v, .. } = *self.plan;
        let AttnSpec { n_heads, n_kv_heads, window, .. } = *self.attn();
        let group = n_heads / n_kv_heads;
        let constants =
            [self.cache(), vec![("GROUP", group as f64), ("WINDOW", window.unwrap_or(0) as f64)]].concat();
        let queries = (32 / group).max(1);
        self.maker.op(
            "attention_prefill",
            &constants,
            &[rows, qkv, k, v, mixed],
            move |extent| grid(tokens(extent).div_ceil(queries), n_kv_heads),
            |_| 0,
        )
    }

    fn router_gemm(&self, normed: BufferId) -> Result<Op, Error> {
        let Scratch { rows, router, counts, status, .. } = *self.scratch;
        let m = self.moe().router;
        let bytes = 2 * (m.rows * m.cols) as u64;
        self.maker.op(
            "router_gemm",
            &[("COLS", m.cols as f64), ("N_EXPERTS", m.rows as f64)],
            &[rows, normed, self.plan.router, router, counts, status],
            move |extent| grid(m.rows.div_ceil(64), tokens(extent).div_ceil(32)),
            move |_| bytes,
        )
    }

    fn route(&self) -> Result<Op, Error> {
        let Scratch { router, chosen, slots, counts, status, .. } = *self.scratch;
        let MoeSpec { n_experts, n_used, norm_topk, .. } = *self.moe();
        self.maker.op(
            "route",
            &[("N_EXPERTS", n_experts as f64), ("N_USED", n_used as f64), ("NORM_TOPK", flag(norm_topk))],
            &[router, chosen, slots, counts, status],
            |extent| grid(tokens(extent), 1),
            |_| 0,
        )
    }

    fn sort_pairs(&self) -> Result<Op, Error> {
        let Scratch { rows, counts, chosen, slots, pairs, tiles, .. } = *self.scratch;
        let MoeSpec { n_experts, n_used, .. } = *self.moe();
        self.maker.op(
            "sort_pairs",
            &[("N_EXPERTS", n_experts as f64), ("N_USED", n_used as f64), ("TOKENS", TILE_TOKENS as f64)],
            &[rows, counts, chosen, slots, pairs, tiles],
            move |extent| grid((tokens(extent) * n_used).div_ceil(256), 1),
            |_| 0,
        )
    }

    /// Constants of kernels that find an expert's block.
    fn blocks(&self) -> Vec<(&'static str, f64)> {
        let split = &self.plan.experts;
        vec![
            ("BLOCK_WORDS", self.plan.expert.words as f64),
            ("PER_SPLIT", per_split(split, self.moe().n_experts)),
        ]
    }

    /// Grid of the experts' gemms, with `rows` of an expert; weights of as many experts as can be meant are read.
    fn expert_grid(&self, rows: usize) -> impl Fn(&Extent) -> [u32; 3] + Send + 'static {
        let MoeSpec { n_experts, n_used, .. } = *self.moe();
        move |extent| grid(rows.div_ceil(4 * TILE_PANELS), max_tiles(tokens(extent) * n_used, n_experts))
    }

    fn expert_bytes(&self, share: f64) -> impl Fn(&Extent) -> u64 + Send + 'static {
        let MoeSpec { n_experts, n_used, .. } = *self.moe();
        let bytes = self.plan.expert.bytes as f64 * share;
        move |extent| (bytes * n_experts.min(tokens(extent) * n_used) as f64) as u64
    }

    fn experts_in_gemm(&self, xq: BufferId, xs: BufferId) -> Result<Op, Error> {
        let Scratch { pairs, tiles, act, .. } = *self.scratch;
        let [x0, x1] = self.plan.experts.buffers;
        let moe = self.moe();
        let constants = [
            self.blocks(),
            vec![
                ("COLS", moe.router.cols as f64),
                ("N_USED", moe.n_used as f64),
                ("EXPERT_SIZE", moe.expert_size as f64),
                ("UP_AT", self.plan.expert.up_at as f64),
                ("GATE_MAX", moe.gate_max.into()),
                ("UP_ABS_MAX", moe.up_abs_max.into()),
                ("PANELS", TILE_PANELS as f64),
                ("TOKENS", TILE_TOKENS as f64),
            ],
        ]
        .concat();
        self.maker.op(
            "experts_in_gemm",
            &constants,
            &[xq, xs, x0, x1, pairs, tiles, act],
            self.expert_grid(2 * moe.expert_size),
            self.expert_bytes(2.0 / 3.0),
        )
    }

    fn experts_out_gemm(&self, xq: BufferId, xs: BufferId) -> Result<Op, Error> {
        let Scratch { pairs, tiles, y, .. } = *self.scratch;
        let [x0, x1] = self.plan.experts.buffers;
        let moe = self.moe();
        let hidden_size = moe.router.cols;
        let constants = [
            self.blocks(),
            vec![
                ("ROWS", hidden_size as f64),
                ("COLS", moe.expert_size as f64),
                ("N_USED", moe.n_used as f64),
                ("DOWN_AT", self.plan.expert.down_at as f64),
                ("PANELS", TILE_PANELS as f64),
                ("TOKENS", TILE_TOKENS as f64),
            ],
        ]
        .concat();
        self.maker.op(
            "experts_out_gemm",
            &constants,
            &[xq, xs, x0, x1, pairs, tiles, y],
            self.expert_grid(hidden_size),
            self.expert_bytes(1.0 / 3.0),
        )
    }

    fn combine(&self) -> Result<Op, Error> {
        let Scratch { chosen, y, h, .. } = *self.scratch;
        let moe = self.moe();
        self.maker.op(
            "combine",
            &[("COLS", moe.router.cols as f64), ("N_USED", moe.n_used as f64)],
            &[chosen, y, h],
            |extent| grid(tokens(extent), 1),
            |_| 0,
        )
    }

    fn heads(&self) -> Vec<(&'static str, f64)> {
        vec![("N_HEADS", self.attn().n_heads as f64)]
    }

    /// Constants of the norms of q and k, and of the rotation.
    fn norms_and_rope(&self) -> Vec<(&'static str, f64)> {
        let AttnSpec { qk_norm, rope, .. } = self.attn();
        let (q_eps, k_eps) = qk_norm.map_or((0.0, 0.0), |norms| (norms.q.eps, norms.k.eps));
        vec![
            ("QK_NORM", flag(qk_norm.is_some())),
            ("Q_EPS", q_eps.into()),
            ("K_EPS", k_eps.into()),
            ("ROPE_DIM", rope.map_or(0, |rope| rope.dim) as f64),
        ]
    }

    /// Constants of kernels that find keys and values.
    fn cache(&self) -> Vec<(&'static str, f64)> {
        let AttnSpec { n_kv_heads, head_dim, .. } = *self.attn();
        vec![
            ("N_KV_HEADS", n_kv_heads as f64),
            ("HEAD_DIM", head_dim as f64),
            ("KV_F32", flag(self.plan.kv == KvType::F32)),
            ("CAPACITY", self.plan.capacity as f64),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::n_parts;

    #[test]
    fn parts_are_those_of_the_kernels() {
        for (n_keys, expected) in [
            (1, 1),
            (64, 1),
            (65, 2),
            (128, 2),
            (129, 3),
            (512, 8),
            (513, 9),
            (4096, 64),
            (4097, 43),
            (131_072, 64),
        ] {
            assert_eq!(n_parts(n_keys), expected, "{n_keys} keys");
        }
    }
}
