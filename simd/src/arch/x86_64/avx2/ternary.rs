//! Ternary rows times int8 activations.
//!
//! One 128 byte chunk at a time, its four rows against the same 128 activations. `maddubs` cannot saturate:
//! a pair is at most 2 * 3 * 128 even for a code that is not valid, and four planes 4 times that.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{load_f32, load_i8, load_u8, pair_sums, prefetch, to_array, tree};
use crate::activation::QuantizedRow;
use crate::rows::{CHUNK, PANEL_ROWS, TernaryRows, bf16};

/// As the scalar `ternary::gemv`, same bits.
#[target_feature(enable = "avx2")]
pub(crate) fn gemv(rows: &TernaryRows<'_>, act: &QuantizedRow<'_>, panels: Range<usize>, out: &mut [f32]) {
    let correction = _mm_set1_ps(act.correction());
    for (p, out) in panels.zip(out.chunks_mut(PANEL_ROWS)) {
        let sums = tree(panel_lanes(rows.panel(p), act));
        let [a, b, c, d] = [0, 1, 2, 3].map(|r| bf16(rows.panel_scales(p).as_chunks().0[r]));
        let dots = _mm_mul_ps(_mm_sub_ps(sums, correction), _mm_setr_ps(a, b, c, d));
        out.copy_from_slice(&to_array(dots)[..out.len()]);
    }
}

/// Σ over blocks of scale * code sum, by row and lane; blocks ascending.
#[inline]
#[target_feature(enable = "avx2")]
fn panel_lanes(panel: &[[u8; CHUNK]], act: &QuantizedRow<'_>) -> [__m256; PANEL_ROWS] {
    let mut lanes = [_mm256_setzero_ps(); PANEL_ROWS];
    for ((chunk, q), scales) in panel.iter().zip(act.q_blocks()).zip(act.scale_blocks()) {
        prefetch(chunk);
        let q = q.as_chunks::<32>().0;
        let q = [load_i8(&q[0]), load_i8(&q[1]), load_i8(&q[2]), load_i8(&q[3])];
        let scales = load_f32(scales);
        for (lanes, codes) in lanes.iter_mut().zip(chunk.as_chunks::<32>().0) {
            let sums = pair_sums(code_products(load_u8(codes), q));
            *lanes = _mm256_add_ps(*lanes, _mm256_mul_ps(scales, sums));
        }
    }
    lanes
}

/// Products of 128 codes and activations, added over the four planes and over pairs of bytes: i16, exact.
#[inline]
#[target_feature(enable = "avx2")]
fn code_products(codes: __m256i, q: [__m256i; 4]) -> __m256i {
    let mask = _mm256_set1_epi8(3);
    let p0 = _mm256_maddubs_epi16(_mm256_and_si256(codes, mask), q[0]);
    let p1 = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16::<2>(codes), mask), q[1]);
    let p2 = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16::<4>(codes), mask), q[2]);
    let p3 = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16::<6>(codes), mask), q[3]);
    _mm256_add_epi16(_mm256_add_epi16(p0, p1), _mm256_add_epi16(p2, p3))
}
