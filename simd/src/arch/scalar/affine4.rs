//! 4-bit affine rows times int8 activations, and one such row as f32: the definitions.

use std::ops::Range;

use crate::activation::{ACT_HALF, ACT_SPAN, LANES, QuantizedRow, QuantizedRows};
use crate::arch::generic::tree;
use crate::rows::{Affine4Rows, PANEL_ROWS, bf16};

/// Groups of 64 columns in a whole span.
pub(crate) const SPAN_GROUPS: usize = ACT_SPAN / ACT_HALF;

/// `out[i] = row[4 * panels.start + i] . act`, for the rows of `panels`; f32 `[n_rows]`.
pub(crate) fn gemv(rows: &Affine4Rows<'_>, act: &QuantizedRow<'_>, panels: Range<usize>, out: &mut [f32]) {
    for (p, out) in panels.zip(out.chunks_mut(PANEL_ROWS)) {
        for (r, out) in out.iter_mut().enumerate() {
            *out = row_dot(rows, p, r, act);
        }
    }
}

/// `out[t][i]`: [`gemv`] with activations `tokens[t]`; f32 `[n_tokens, n_rows]`.
pub(crate) fn gemm(
    rows: &Affine4Rows<'_>,
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

/// Row `r` of panel `p` times `act`. i32 sums are exact; groups, and the spans they are in, ascending in f32.
#[inline]
fn row_dot(rows: &Affine4Rows<'_>, p: usize, r: usize, act: &QuantizedRow<'_>) -> f32 {
    let (header, chunks) = rows.panel(p);
    let halves = act.q().as_chunks::<ACT_HALF>().0;
    let mut lanes = [0.0f32; LANES];
    let mut bias_sum = 0.0f32;
    let spans = header.chunks(SPAN_GROUPS).zip(chunks.chunks(SPAN_GROUPS)).zip(halves.chunks(SPAN_GROUPS));
    let inputs = act.span_scales().iter().zip(act.offsets().chunks(SPAN_GROUPS));
    for (((header, chunks), halves), (act_scales, offsets)) in spans.zip(inputs) {
        let mut span = [0.0f32; LANES];
        for (((affine, chunk), q), offset) in header.iter().zip(chunks).zip(halves).zip(offsets) {
            let (scale, bias) = scale_and_bias(affine, r);
            let nibbles = &chunk.as_chunks::<32>().0[r];
            let (low, high) = q.split_at(ACT_HALF / 2);
            let mut products = [0i16; 32]; // at most 2 * 15 * 128
            for i in 0..32 {
                products[i] = i16::from(nibbles[i] & 15) * i16::from(low[i])
                    + i16::from(nibbles[i] >> 4) * i16::from(high[i]);
            }
            for (l, four) in products.as_chunks::<4>().0.iter().enumerate() {
                let sum: i32 = four.iter().map(|&product| i32::from(product)).sum();
                span[l] += scale * sum as f32;
            }
            bias_sum += bias * offset;
        }
        for l in 0..LANES {
            lanes[l] += act_scales[l] * span[l];
        }
    }
    tree(lanes) + bias_sum
}

/// Row `row` as f32 `[cols]`: nibble * scale + bias, multiply and add rounded separately.
#[inline]
pub(crate) fn dequantize_row(rows: &Affine4Rows<'_>, row: usize, out: &mut [f32]) {
    let (header, chunks) = rows.panel(row / PANEL_ROWS);
    let r = row % PANEL_ROWS;
    for ((affine, chunk), out) in header.iter().zip(chunks).zip(out.chunks_exact_mut(ACT_HALF)) {
        let (scale, bias) = scale_and_bias(affine, r);
        let (low, high) = out.split_at_mut(ACT_HALF / 2);
        for (i, &byte) in chunk.as_chunks::<32>().0[r].iter().enumerate() {
            low[i] = f32::from(byte & 15) * scale + bias;
            high[i] = f32::from(byte >> 4) * scale + bias;
        }
    }
}

#[inline(always)]
fn scale_and_bias(affine: &[u8; 16], r: usize) -> (f32, f32) {
    let values = affine.as_chunks::<2>().0;
    (bf16(values[r]), bf16(values[PANEL_ROWS + r]))
}
