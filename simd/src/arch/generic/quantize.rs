//! f32 activations to int8 with one scale for each lane of a span, 32 inputs.
//!
//! Symmetric: scale = max|x| / 127, q = x * (127 / max|x|) rounded half to even. A lane whose largest
//! magnitude is below 2^-100 becomes zeros with scale 0, so that scale and inverse stay normal numbers.
//! A lane with a NaN or an infinity gets zeros and scale NaN: every dot product it enters is NaN, in
//! each kernel alike, and nothing is hidden.

use crate::activation::{ACT_BLOCK, ACT_HALF, ACT_SPAN, LANES};
use crate::arch::generic::tree;

const SMALLEST: f32 = f32::from_bits((127 - 100) << 23);
/// Adding 1.5 * 2^23 leaves the rounded integer in the low bits of the sum (half to even).
pub(crate) const ROUND: f32 = 12_582_912.0;

/// What an integer of 1 stands for if the largest magnitude of `x` is to become `limit`, and the inverse of that: by the rules above, zeros
/// for what is small, and a NaN with the inverse 0.
#[inline(always)]
pub(crate) fn scale_of(x: &[f32], limit: f32) -> (f32, f32) {
    // As integers, magnitudes order as floats do, with infinity and NaN on top.
    let largest = x.iter().fold(0u32, |largest, x| largest.max(x.to_bits() & 0x7fff_ffff));
    let largest = f32::from_bits(largest);
    if !largest.is_finite() {
        (f32::NAN, 0.0)
    } else if largest < SMALLEST {
        (0.0, 0.0)
    } else {
        (largest / limit, limit / largest)
    }
}

/// `x` f32 `[cols]` to `q` i8 `[padded]`, `scales` f32 `[scales_len]`, `offsets` f32 `[offsets_len]`.
#[inline(always)]
pub(crate) fn quantize(x: &[f32], q: &mut [i8], scales: &mut [f32], offsets: &mut [f32]) {
    let (offsets, correction) = offsets.split_at_mut(offsets.len() - 1);
    let spans = q.chunks_mut(ACT_SPAN).zip(offsets.chunks_mut(ACT_SPAN / ACT_HALF));
    let scales = scales.as_chunks_mut::<LANES>().0;
    for ((x, scales), (q, offsets)) in x.chunks(ACT_SPAN).zip(scales).zip(spans) {
        let (blocks, tail) = x.as_chunks::<ACT_BLOCK>();
        let mut padded = [0.0f32; ACT_BLOCK];
        padded[..tail.len()].copy_from_slice(tail);
        quantize_span(blocks, &padded, q.as_chunks_mut().0, scales, offsets);
    }
    correction[0] = offsets.iter().fold(0.0, |sum, offset| sum + offset); // ascending
}

/// The blocks of a span, and after them, if `q` has one more, `last`.
#[inline(always)]
fn quantize_span(
    blocks: &[[f32; ACT_BLOCK]],
    last: &[f32; ACT_BLOCK],
    q: &mut [[i8; ACT_BLOCK]],
    scales: &mut [f32; LANES],
    offsets: &mut [f32],
) {
    let blocks = || blocks.iter().chain(std::iter::once(last));
    // As integers, magnitudes order as floats do, with infinity and NaN on top.
    let mut largest = [0u32; 32];
    for x in blocks().flat_map(|block| block.as_chunks::<32>().0) {
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
    for (x, q) in blocks().zip(q.iter_mut()) {
        for (x, q) in x.as_chunks::<32>().0.iter().zip(q.as_chunks_mut::<32>().0) {
            for i in 0..32 {
                q[i] = ((x[i] * inverse[i] + ROUND).to_bits() & keep[i]) as i8;
            }
        }
    }
    for (q, offset) in q.as_flattened().as_chunks::<ACT_HALF>().0.iter().zip(offsets) {
        let (low, high) = q.split_at(ACT_HALF / 2);
        let both: [i32; ACT_HALF / 2] = std::array::from_fn(|i| i32::from(low[i]) + i32::from(high[i]));
        let mut sums = [0.0f32; LANES];
        for (l, four) in both.as_chunks::<4>().0.iter().enumerate() {
            sums[l] = scales[l] * ((four[0] + four[1]) + (four[2] + four[3])) as f32;
        }
        *offset = tree(sums);
    }
}
