//! Ternary rows times int8 activations: the definition.

use std::ops::Range;

use crate::activation::{LANES, QuantizedRow, QuantizedRows, SPAN_BLOCKS};
use crate::arch::generic::tree;
use crate::rows::{CHUNK, PANEL_ROWS, TernaryRows, bf16};

/// `out[i] = row[4 * panels.start + i] . act`, for the rows of `panels`; f32 `[n_rows]`.
pub(crate) fn gemv(rows: &TernaryRows<'_>, act: &QuantizedRow<'_>, panels: Range<usize>, out: &mut [f32]) {
    for (p, out) in panels.zip(out.chunks_mut(PANEL_ROWS)) {
        let (alphas, _) = rows.panel_scales(p).as_chunks();
        for (r, out) in out.iter_mut().enumerate() {
            *out = (tree(row_lanes(rows.panel(p), r, act)) - act.correction()) * bf16(alphas[r]);
        }
    }
}

/// `out[t][i]`: [`gemv`] with activations `tokens[t]`; f32 `[n_tokens, n_rows]`.
pub(crate) fn gemm(
    rows: &TernaryRows<'_>,
    acts: &QuantizedRows<'_>,
    tokens: &[u32],
    panels: Range<usize>,
    n_rows: usize,
    out: &mut [f32],
) {
    for (&token, out) in tokens.iter().zip(out.chunks_exact_mut(n_rows)) {
        gemv(rows, &acts.row(token as usize), panels.clone(), out);
    }
}

/// Σ over spans of scale * code sum, by lane. i32 sums are exact; spans ascending in f32.
#[inline]
fn row_lanes(panel: &[[u8; CHUNK]], r: usize, act: &QuantizedRow<'_>) -> [f32; LANES] {
    let mut lanes = [0.0f32; LANES];
    let spans = panel.chunks(SPAN_BLOCKS).zip(act.q_blocks().chunks(SPAN_BLOCKS));
    for ((chunks, q), scales) in spans.zip(act.span_scales()) {
        let mut products = [0i16; 32]; // at most 8 * 3 * 128
        for (chunk, q) in chunks.iter().zip(q) {
            let codes = &chunk.as_chunks::<32>().0[r];
            for (j, q) in q.as_chunks::<32>().0.iter().enumerate() {
                for i in 0..32 {
                    products[i] += i16::from((codes[i] >> (2 * j)) & 3) * i16::from(q[i]);
                }
            }
        }
        for (l, four) in products.as_chunks::<4>().0.iter().enumerate() {
            let sum: i32 = four.iter().map(|&product| i32::from(product)).sum();
            lanes[l] += scales[l] * sum as f32;
        }
    }
    lanes
}
