//! f32 activations to int8 with one scale for 16 inputs.
//!
//! Symmetric: scale = max|x| / 127, q = x * (127 / max|x|) rounded half to even. A group whose largest
//! magnitude is below 2^-100 becomes zeros with scale 0, so that scale and inverse stay normal numbers.
//! A group with a NaN or an infinity gets zeros and scale NaN: every dot product it enters is NaN, in
//! each kernel alike, and nothing is hidden.

use crate::activation::{ACT_BLOCK, ACT_HALF, LANES};
use crate::arch::generic::tree;

const SMALLEST: f32 = f32::from_bits((127 - 100) << 23);
/// Adding 1.5 * 2^23 leaves the rounded integer in the low bits of the sum (half to even).
const ROUND: f32 = 12_582_912.0;

/// `x` f32 `[cols]` to `q` i8 `[padded]`, `scales` f32 `[padded / 16]`, `offsets` f32 `[padded / 64]`.
#[inline(always)]
pub(crate) fn quantize(x: &[f32], q: &mut [i8], scales: &mut [f32], offsets: &mut [f32]) {
    let (blocks, tail) = x.as_chunks::<ACT_BLOCK>();
    let mut padded = [0.0f32; ACT_BLOCK];
    padded[..tail.len()].copy_from_slice(tail);
    let blocks = blocks.iter().chain(std::iter::once(&padded));
    let q = q.as_chunks_mut::<ACT_BLOCK>().0;
    let scales = scales.as_chunks_mut::<LANES>().0;
    let offsets = offsets.as_chunks_mut::<2>().0;
    for (((x, q), scales), offsets) in blocks.zip(q).zip(scales).zip(offsets) {
        quantize_block(x, q, scales, offsets);
    }
}

#[inline(always)]
fn quantize_block(
    x: &[f32; ACT_BLOCK],
    q: &mut [i8; ACT_BLOCK],
    scales: &mut [f32; LANES],
    offsets: &mut [f32; 2],
) {
    // As integers, magnitudes order as floats do, with infinity and NaN on top.
    let mut largest = [0u32; 32];
    for x in x.as_chunks::<32>().0 {
        for i in 0..32 {
            largest[i] = largest[i].max(x[i].to_bits() & 0x7fff_ffff);
        }
    }
    let mut inverse = [0.0f32; 32];
    let mut keep = [0u32; 32];
    for l in 0..LANES {
        let four = &largest[4 * l..4 * l + 4];
        let max = f32::from_bits(four[0].max(four[1]).max(four[2].max(four[3])));
        let usable = max.is_finite() && max >= SMALLEST;
        scales[l] = if usable { max / 127.0 } else { 0.0 * max };
        inverse[4 * l..4 * l + 4].fill(if usable { 127.0 / max } else { 0.0 });
        keep[4 * l..4 * l + 4].fill(if usable { u32::MAX } else { 0 });
    }
    for (x, q) in x.as_chunks::<32>().0.iter().zip(q.as_chunks_mut::<32>().0) {
        for i in 0..32 {
            q[i] = ((x[i] * inverse[i] + ROUND).to_bits() & keep[i]) as i8;
        }
    }
    for (q, offset) in q.as_chunks::<ACT_HALF>().0.iter().zip(offsets) {
        let mut sums = [0.0f32; LANES];
        for (l, sum) in sums.iter_mut().enumerate() {
            let lane = q[4 * l..4 * l + 4].iter().chain(&q[32 + 4 * l..36 + 4 * l]);
            *sum = scales[l] * lane.map(|&q| i32::from(q)).sum::<i32>() as f32;
        }
        *offset = tree(sums);
    }
}
