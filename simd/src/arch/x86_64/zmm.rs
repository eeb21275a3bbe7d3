//! 512 bit vectors: two rows of a panel each, against the same activations in both halves. What the AVX-512
//! sets have in common.

use std::arch::x86_64::*;

use super::{PanelLanes, ymm};
use crate::activation::LANES;
use crate::arch::generic::attention_q8::Line;
use crate::rows::CHUNK;

pub(super) use super::ymm::load_bf16;

pub(super) type Int = __m512i;
pub(super) type Float = __m512;

/// Vectors of a panel.
pub(super) const VECTORS: usize = 2;

/// Panels of a gemv that share the loads of activations.
pub(super) const PANELS: usize = 2;

/// Panels of a gemv whose [`trees`] are one: four cost no more.
pub(super) const TREES: usize = 4;

/// Tokens of a gemm's tile: 24 of 32 registers are sums.
pub(super) const TILE: usize = 6;

/// Panels and tokens of a ternary gemm's tile, as many sums. The panels share the loads of activations, which come from the
/// second cache.
pub(super) const TERNARY_PANELS: usize = 2;
pub(super) const TERNARY_TILE: usize = 3;

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn zero() -> Int {
    _mm512_setzero_si512()
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn zero_lanes() -> Float {
    _mm512_setzero_ps()
}

/// Rows `2v` and `2v + 1` of a chunk.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn load_codes(chunk: &[u8; CHUNK], v: usize) -> Int {
    let codes: &[u8; 64] = &chunk.as_chunks().0[v];
    // SAFETY: the reference covers the 64 bytes read; an unaligned load.
    unsafe { _mm512_loadu_si512(codes.as_ptr().cast()) }
}

/// Writes what [`load_codes`] reads.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn store_codes(chunk: &mut [u8; CHUNK], v: usize, codes: Int) {
    let to: &mut [u8; 64] = &mut chunk.as_chunks_mut().0[v];
    // SAFETY: the reference covers the 64 bytes written; an unaligned store.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), codes) }
}

/// Activations, the same for each row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn load_q(q: &[i8; 32]) -> Int {
    _mm512_broadcast_i64x4(ymm::load_q(q))
}

/// Scales of a span, the same for each row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn load_scales(scales: &[f32; LANES]) -> Float {
    _mm512_broadcast_f32x8(ymm::load_scales(scales))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn load_panel(lanes: &PanelLanes) -> [Float; VECTORS] {
    let lanes = lanes.0.as_flattened();
    // SAFETY: the reference covers the 128 bytes read by both; unaligned loads.
    unsafe { [_mm512_loadu_ps(lanes.as_ptr()), _mm512_loadu_ps(lanes[2 * LANES..].as_ptr())] }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn store_panel(to: &mut PanelLanes, lanes: [Float; VECTORS]) {
    for (to, lanes) in to.0.as_chunks_mut::<2>().0.iter_mut().zip(lanes) {
        // SAFETY: the reference covers the 64 bytes written; an unaligned store.
        unsafe { _mm512_storeu_ps(to.as_flattened_mut().as_mut_ptr(), lanes) }
    }
}

/// Of each byte `bits >> SHIFT & MASK`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn bits<const SHIFT: u32, const MASK: i8>(bits: Int) -> Int {
    _mm512_and_si512(_mm512_srli_epi16::<SHIFT>(bits), _mm512_set1_epi8(MASK))
}

/// `sum + a * b` for an `a * b` that f32 has exactly.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn add_exact(sum: Float, a: Float, b: Float) -> Float {
    _mm512_fmadd_ps(a, b, sum)
}

/// `sum + a * b`, rounded twice.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn add_product(sum: Float, a: Float, b: Float) -> Float {
    _mm512_add_ps(sum, _mm512_mul_ps(a, b))
}

/// A group's scales, one a row in every lane of it, from the four scales and four biases.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn by_row(affine: __m256) -> [Float; VECTORS] {
    let affine = _mm512_castps256_ps512(affine);
    let first = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    let second = _mm512_setr_epi32(2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    [_mm512_permutexvar_ps(first, affine), _mm512_permutexvar_ps(second, affine)]
}

/// For each token the fixed tree `((0+4) + (2+6)) + ((1+5) + (3+7))` of each row's lanes, one row a result
/// lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn trees<const N: usize>(tokens: [[Float; VECTORS]; N]) -> [__m128; N] {
    let mut sums = [_mm_setzero_ps(); N];
    for (sums, tokens) in sums.chunks_mut(4).zip(tokens.chunks(4)) {
        let mut four = [_mm512_setzero_ps(); 4];
        for (four, &[a, b]) in four.iter_mut().zip(tokens) {
            // Lanes 0..4 of each row, and 4..8.
            *four = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
        }
        let [a, b, c, d] = four;
        let (ab_low, ab_high) = (as_pairs(_mm512_unpacklo_ps(a, b)), as_pairs(_mm512_unpackhi_ps(a, b)));
        let (cd_low, cd_high) = (as_pairs(_mm512_unpacklo_ps(c, d)), as_pairs(_mm512_unpackhi_ps(c, d)));
        let even = _mm512_add_ps(low_pairs(ab_low, cd_low), low_pairs(ab_high, cd_high));
        let odd = _mm512_add_ps(high_pairs(ab_low, cd_low), high_pairs(ab_high, cd_high));
        // By row, in it by token; then the other way round.
        let by_token = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        let all = _mm512_permutexvar_ps(by_token, _mm512_add_ps(even, odd));
        let all = [
            _mm512_castps512_ps128(all),
            _mm512_extractf32x4_ps::<1>(all),
            _mm512_extractf32x4_ps::<2>(all),
            _mm512_extractf32x4_ps::<3>(all),
        ];
        for (sums, one) in sums.iter_mut().zip(all) {
            *sums = one;
        }
    }
    sums
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn as_pairs(x: __m512) -> __m512d {
    _mm512_castps_pd(x)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn low_pairs(a: __m512d, b: __m512d) -> __m512 {
    _mm512_castpd_ps(_mm512_unpacklo_pd(a, b))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn high_pairs(a: __m512d, b: __m512d) -> __m512 {
    _mm512_castpd_ps(_mm512_unpackhi_pd(a, b))
}

/// Vectors of a line.
pub(super) const LINE_VECTORS: usize = 1;

/// Lanes `16v..` of a line.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn load_line(line: &Line, v: usize) -> Int {
    let bytes: &[u8; 64] = &line.as_chunks().0[v];
    // SAFETY: the reference covers the 64 bytes read; an unaligned load.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// Lanes `8w..` of a line, in i16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn load_words(line: &Line, w: usize) -> Int {
    let bytes: &[u8; 32] = &line.as_chunks().0[w];
    // SAFETY: the reference covers the 32 bytes read; an unaligned load.
    _mm512_cvtepu8_epi16(unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) })
}

/// The same four in each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn splat(four: [i8; 4]) -> Int {
    _mm512_set1_epi32(i32::from_ne_bytes(four.map(|x| x as u8)))
}

/// The same four in each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn splat_words(four: [i16; 4]) -> Int {
    let [a, b, c, d] = four.map(|x| i64::from(x as u16));
    _mm512_set1_epi64(d << 48 | c << 32 | b << 16 | a)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn add(a: Int, b: Int) -> Int {
    _mm512_add_epi32(a, b)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn shift_left_8(a: Int) -> Int {
    _mm512_slli_epi32::<8>(a)
}

/// Products of i16, pairs of which are added.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn multiply_pairs(a: Int, b: Int) -> Int {
    _mm512_madd_epi16(a, b)
}

/// Writes lanes `16v..`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn store_lanes(to: &mut [i32; 16], v: usize, lanes: Int) {
    let to: &mut [i32; 16] = &mut to.as_chunks_mut().0[v];
    // SAFETY: the reference covers the 64 bytes written; an unaligned store.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), lanes) }
}

/// Writes lanes `8w..`, of each the sum of two.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn store_pairs(to: &mut [i32; 16], w: usize, pairs: Int) {
    let mut both = [0; 16];
    store_lanes(&mut both, 0, pairs);
    for (to, both) in to.as_chunks_mut::<8>().0[w].iter_mut().zip(both.as_chunks::<2>().0) {
        *to = both[0].wrapping_add(both[1]);
    }
}
