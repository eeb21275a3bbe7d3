//! Norm, gate, rotation and weighted sum: one pass over a vector each.

use crate::arch::generic::dot;
use crate::arch::generic::exp::exp;

/// `1 / sqrt(mean(x^2) + eps)`, squares summed as in [`dot`]; NaN when the mean is not finite, so that an
/// overflow is seen and not turned into zeros.
#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let mean = dot(x, x) / x.len() as f32;
    if mean.is_finite() { 1.0 / (mean + eps).sqrt() } else { f32::NAN }
}

/// `out = weight * (x * inverse rms of x)`.
#[inline(always)]
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let inverse = inverse_rms(x, eps);
    for (out, (x, weight)) in out.iter_mut().zip(x.iter().zip(weight)) {
        *out = weight * (x * inverse);
    }
}

/// [`rms_norm`] over its own input.
#[inline(always)]
pub(crate) fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    let inverse = inverse_rms(x, eps);
    for (x, weight) in x.iter_mut().zip(weight) {
        *x = weight * (*x * inverse);
    }
}

/// `out = silu(min(gate, gate_max)) * clamp(up, -up_abs_max, up_abs_max)`; NaN stays NaN.
#[inline(always)]
pub(crate) fn swiglu_clamped(gate: &[f32], up: &[f32], gate_max: f32, up_abs_max: f32, out: &mut [f32]) {
    for (out, (&gate, &up)) in out.iter_mut().zip(gate.iter().zip(up)) {
        let gate = if gate > gate_max { gate_max } else { gate };
        let up = if up > up_abs_max { up_abs_max } else { up };
        let up = if up < -up_abs_max { -up_abs_max } else { up };
        *out = gate / (1.0 + exp(-gate)) * up;
    }
}

/// Rotates the pairs `(x[i], x[i + n])` by the angle of `cos[i]`, `sin[i]`, `i` below `n = cos.len()`.
#[inline(always)]
pub(crate) fn rope(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, rest) = x.split_at_mut(cos.len());
    for (((a, b), cos), sin) in first.iter_mut().zip(rest).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// Columns whose sums stay in registers.
const SUMS: usize = 64;

/// `out += Σ weights[i] * y[rows[i]]`, `y` f32 `[n, out.len()]`: the sum first, ascending from 0. All rows are read side by side, so that
/// more of memory is asked for at a time.
#[inline(always)]
pub(crate) fn combine(y: &[f32], rows: &[u32], weights: &[f32], out: &mut [f32]) {
    let cols = out.len();
    let row = |i: u32| &y[i as usize * cols..][..cols];
    let (chunks, tail) = out.as_chunks_mut::<SUMS>();
    for (c, out) in chunks.iter_mut().enumerate() {
        let mut sums = [0.0f32; SUMS];
        for (&i, &weight) in rows.iter().zip(weights) {
            let y: &[f32; SUMS] = row(i)[c * SUMS..].first_chunk().expect("a row is as long as the output");
            for l in 0..SUMS {
                sums[l] += weight * y[l];
            }
        }
        for l in 0..SUMS {
            out[l] += sums[l];
        }
    }
    let first = cols - tail.len();
    for (c, out) in (first..).zip(tail) {
        let sum = rows.iter().zip(weights).fold(0.0, |sum, (&i, &weight)| sum + weight * row(i)[c]);
        *out += sum;
    }
}
