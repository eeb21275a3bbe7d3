//! 4-bit affine rows times int8 activations.
//!
//! One 128 byte chunk, 64 columns of four rows, at a time. `maddubs` cannot saturate: a pair is at most
//! 2 * 15 * 128, and the two halves twice that.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{load_bf16, load_f32, load_i8, load_u8, pair_sums, prefetch, to_array, tree};
use crate::activation::{ACT_HALF, QuantizedRow};
use crate::arch::scalar;
use crate::rows::{Affine4Rows, PANEL_ROWS};

/// As the scalar `affine4::gemv`, same bits.
#[target_feature(enable = "avx2")]
pub(crate) fn gemv(rows: &Affine4Rows<'_>, act: &QuantizedRow<'_>, panels: Range<usize>, out: &mut [f32]) {
    for (p, out) in panels.zip(out.chunks_mut(PANEL_ROWS)) {
        out.copy_from_slice(&to_array(panel_dots(rows, p, act))[..out.len()]);
    }
}

/// The four rows of panel `p` times `act`; groups ascending.
#[inline]
#[target_feature(enable = "avx2")]
fn panel_dots(rows: &Affine4Rows<'_>, p: usize, act: &QuantizedRow<'_>) -> __m128 {
    let (header, chunks) = rows.panel(p);
    for lines in header.as_flattened().as_chunks().0 {
        prefetch(lines);
    }
    let halves = act.q().as_chunks::<ACT_HALF>().0;
    let mut lanes = [_mm256_setzero_ps(); PANEL_ROWS];
    let mut biases = _mm_setzero_ps();
    let inputs = halves.iter().zip(act.offsets()).enumerate();
    for ((affine, chunk), (g, (q, &offset))) in header.iter().zip(chunks).zip(inputs) {
        prefetch(chunk);
        let q = q.as_chunks::<32>().0;
        let (low, high) = (load_i8(&q[0]), load_i8(&q[1]));
        let act_scales = load_f32(&act.scale_blocks()[g / 2]);
        let affine = load_bf16(affine);
        let bias = _mm256_extractf128_ps::<1>(affine);
        biases = _mm_add_ps(biases, _mm_mul_ps(bias, _mm_set1_ps(offset)));
        for (r, (lanes, nibbles)) in lanes.iter_mut().zip(chunk.as_chunks::<32>().0).enumerate() {
            let scale = _mm256_permutevar8x32_ps(affine, _mm256_set1_epi32(r as i32));
            let sums = pair_sums(nibble_products(load_u8(nibbles), low, high));
            *lanes = _mm256_add_ps(*lanes, _mm256_mul_ps(scale, _mm256_mul_ps(act_scales, sums)));
        }
    }
    _mm_add_ps(tree(lanes), biases)
}

/// Products of 64 nibbles and activations, added over both halves and over pairs of bytes: i16, exact.
#[inline]
#[target_feature(enable = "avx2")]
fn nibble_products(nibbles: __m256i, low: __m256i, high: __m256i) -> __m256i {
    let mask = _mm256_set1_epi8(15);
    let low = _mm256_maddubs_epi16(_mm256_and_si256(nibbles, mask), low);
    let high = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16::<4>(nibbles), mask), high);
    _mm256_add_epi16(low, high)
}

/// As the scalar `affine4::dequantize_row`, its loop compiled for AVX2.
#[target_feature(enable = "avx2")]
pub(crate) fn dequantize_row(rows: &Affine4Rows<'_>, row: usize, out: &mut [f32]) {
    scalar::affine4::dequantize_row(rows, row, out);
}
