//! The kernels of a step of several tokens, against the CPU in f64.
//!
//! Each function runs one kernel on inputs made on the CPU, so that a difference is that kernel's own. Sizes come from the caller: those of a
//! model when it is loaded, whatever is awkward in the tests.

mod attention;
mod experts;
mod gemm;
mod rows;
#[cfg(test)]
mod tests;

use samara_format::Bf16PanelLayout;

use self::{
    attention::{Heads, Sequence, attention_prefill, rope_append},
    experts::{Experts, combine, experts_in_gemm, experts_out_gemm, route, sort_pairs},
    gemm::{router_gemm, ternary_gemm},
    rows::{Rows, norm_quantize, quantize_rows},
};
use super::{
    made::{Made, Ternary, bf16},
    trial::{Difference, Trial},
};
use crate::{
    backend::wgpu::device::words_of,
    error::Error,
    kv::KvType,
    model::Model,
    spec::{AttnSpec, LayerSpec, MatrixRef, MoeSpec},
};

/// Tokens that a check at start-up uses: more than an invocation of a gemm has, and not a multiple of anything.
const TOKENS: usize = 19;

/// Experts whose weights it uses.
const EXPERTS: usize = 2;

/// Most rows of tokens that a kernel is given more than there are, to see that it leaves them alone.
const SPARE: usize = 3;

/// Every kernel on a layer's own weights, with made-up activations; `tile` is panels and tokens of the gemms.
///
/// # Errors
/// Those of running a kernel. A difference that is too large is not one.
pub(in super::super) fn layer(
    trial: &Trial<'_>,
    model: &Model,
    spec: &LayerSpec,
    kv: KvType,
    tile: [usize; 2],
) -> Result<Vec<Difference>, Error> {
    let LayerSpec { index: _, attn, moe } = spec;
    let AttnSpec { norm, qkv, qk_norm, o, n_heads, n_kv_heads, head_dim, rope, window } = attn;
    let MoeSpec { router, n_experts, n_used, expert_size, norm_topk, .. } = moe;
    let mut made = Made::new(1);
    let window = window.unwrap_or(0);
    let heads = Heads {
        n_heads: *n_heads,
        n_kv_heads: *n_kv_heads,
        head_dim: *head_dim,
        rope_dim: rope.map_or(0, |rope| rope.dim),
        qk_norm: qk_norm.is_some(),
        window,
        capacity: (window + 4 * TOKENS).next_multiple_of(32),
        kv_f32: kv == KvType::F32,
    };
    // The window's edge is among the keys, and a tile of queries has two sequences.
    let sequences = [
        Sequence { slot: 1, position: 3, len: 3 },
        Sequence { slot: 0, position: window.saturating_sub(5) + 7, len: TOKENS - 3 },
    ];
    let h = made.values(TOKENS * qkv.cols, 2.0);
    let act = made.values(TOKENS * n_used * expert_size, 2.0);
    let ternary = |m: &MatrixRef| Ternary::of(model.matrix(m), m.rows, m.cols);
    let (w, values) = router_values(model, router);
    let experts = Experts::of(model, moe, EXPERTS.min(*n_experts));
    Ok(vec![
        norm_quantize(trial, &h, &model.vector(&norm.weight), norm.eps)?,
        quantize_rows(trial, &act, *expert_size)?,
        ternary_gemm(trial, &ternary(qkv), TOKENS, tile, false)?,
        rope_append(trial, &heads, &sequences)?,
        attention_prefill(trial, &heads, &sequences)?,
        ternary_gemm(trial, &ternary(o), TOKENS, tile, true)?,
        router_gemm(trial, (&w, &values), router.cols, TOKENS)?,
        route(trial, *n_experts, *n_used, *norm_topk, TOKENS, false)?,
        sort_pairs(trial, *n_experts, *n_used, tile[1], TOKENS)?,
        experts_in_gemm(trial, &experts, TOKENS, tile, None)?,
        experts_out_gemm(trial, &experts, TOKENS, tile, None)?,
        combine(trial, router.cols, *n_used, TOKENS)?,
    ])
}

/// A router's words, and its values, `[n_experts, hidden_size]`.
pub(super) fn router_values(model: &Model, m: &MatrixRef) -> (Vec<u32>, Vec<f64>) {
    let part = model.matrix(m);
    let layout = Bf16PanelLayout::new(m.rows, m.cols).expect("a matrix of a file");
    let mut row = vec![0; m.cols];
    let mut values = Vec::with_capacity(m.rows * m.cols);
    for r in 0..m.rows {
        layout.unpack_row(part, r, &mut row);
        values.extend(row.iter().map(|bits| f64::from(bf16(u32::from(*bits)))));
    }
    (words_of(part), values)
}

/// The `rows` of a step of tokens at positions 0, 1, … of slot 0.
fn plain_rows(n_tokens: usize) -> Vec<u32> {
    (0..n_tokens as u32).flat_map(|i| [i, 0, i, n_tokens as u32]).collect()
}
