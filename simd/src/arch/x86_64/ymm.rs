//! 256 bit vectors: one row of a panel each. What AVX2 and AVX-VNNI have in common.

use std::arch::x86_64::*;

use super::PanelLanes;
use crate::activation::LANES;
use crate::arch::generic::attention_q8::Line;
use crate::rows::{CHUNK, PANEL_ROWS};

pub(super) type Int = __m256i;
pub(super) type Float = __m256;

/// Vectors of a panel.
pub(super) const VECTORS: usize = 4;

/// Panels of a gemv that share the loads of activations: registers are few.
pub(super) const PANELS: usize = 1;

/// Panels of a gemv whose [`trees`] are one.
pub(super) const TREES: usize = 1;

/// Tokens of a gemm's tile: 8 of 16 registers are sums.
pub(super) const TILE: usize = 2;

/// Panels and tokens of a ternary gemm's tile.
pub(super) const TERNARY_PANELS: usize = 1;
pub(super) const TERNARY_TILE: usize = 2;

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn zero() -> Int {
    _mm256_setzero_si256()
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn zero_lanes() -> Float {
    _mm256_setzero_ps()
}

/// Row `v` of a chunk.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load_codes(chunk: &[u8; CHUNK], v: usize) -> Int {
    let codes: &[u8; 32] = &chunk.as_chunks().0[v];
    // SAFETY: the reference covers the 32 bytes read; an unaligned load.
    unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) }
}

/// Writes what [`load_codes`] reads.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn store_codes(chunk: &mut [u8; CHUNK], v: usize, codes: Int) {
    let to: &mut [u8; 32] = &mut chunk.as_chunks_mut().0[v];
    // SAFETY: the reference covers the 32 bytes written; an unaligned store.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), codes) }
}

/// Activations, the same for each row.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load_q(q: &[i8; 32]) -> Int {
    // SAFETY: the reference covers the 32 bytes read; an unaligned load.
    unsafe { _mm256_loadu_si256(q.as_ptr().cast()) }
}

/// Scales of a span, the same for each row.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load_scales(scales: &[f32; LANES]) -> Float {
    // SAFETY: the reference covers the 32 bytes read; an unaligned load.
    unsafe { _mm256_loadu_ps(scales.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load_panel(lanes: &PanelLanes) -> [Float; VECTORS] {
    let [a, b, c, d] = &lanes.0;
    [load_scales(a), load_scales(b), load_scales(c), load_scales(d)]
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn store_panel(to: &mut PanelLanes, lanes: [Float; VECTORS]) {
    for (to, lanes) in to.0.iter_mut().zip(lanes) {
        // SAFETY: the reference covers the 32 bytes written; an unaligned store.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), lanes) }
    }
}

/// Of each byte `bits >> SHIFT & MASK`.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn bits<const SHIFT: i32, const MASK: i8>(bits: Int) -> Int {
    _mm256_and_si256(_mm256_srli_epi16::<SHIFT>(bits), _mm256_set1_epi8(MASK))
}

/// `sum + a * b` for an `a * b` that f32 has exactly.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn add_exact(sum: Float, a: Float, b: Float) -> Float {
    _mm256_fmadd_ps(a, b, sum)
}

/// `sum + a * b`, rounded twice.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn add_product(sum: Float, a: Float, b: Float) -> Float {
    _mm256_add_ps(sum, _mm256_mul_ps(a, b))
}

/// A group's scales, one a row in every lane of it, from the four scales and four biases.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn by_row(affine: __m256) -> [Float; VECTORS] {
    let mut scales = [affine; VECTORS];
    for (r, scales) in scales.iter_mut().enumerate() {
        *scales = _mm256_permutevar8x32_ps(affine, _mm256_set1_epi32(r as i32));
    }
    scales
}

/// For each token the fixed tree `((0+4) + (2+6)) + ((1+5) + (3+7))` of each row's lanes, one row a result
/// lane.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn trees<const N: usize>(tokens: [[Float; VECTORS]; N]) -> [__m128; N] {
    let mut sums = [_mm_setzero_ps(); N];
    for (sums, rows) in sums.iter_mut().zip(tokens) {
        let mut four = [_mm_setzero_ps(); PANEL_ROWS];
        for (four, row) in four.iter_mut().zip(rows) {
            *four = _mm_add_ps(_mm256_castps256_ps128(row), _mm256_extractf128_ps::<1>(row));
        }
        let [a, b, c, d] = four;
        let (ab_low, ab_high) = (_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
        let (cd_low, cd_high) = (_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
        let even = _mm_add_ps(_mm_movelh_ps(ab_low, cd_low), _mm_movelh_ps(ab_high, cd_high));
        let odd = _mm_add_ps(_mm_movehl_ps(cd_low, ab_low), _mm_movehl_ps(cd_high, ab_high));
        *sums = _mm_add_ps(even, odd);
    }
    sums
}

/// Eight bf16 as f32.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load_bf16(values: &[u8; 16]) -> __m256 {
    // SAFETY: the reference covers the 16 bytes read; an unaligned load.
    let values = unsafe { _mm_loadu_si128(values.as_ptr().cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(values)))
}

/// Vectors of a line.
pub(super) const LINE_VECTORS: usize = 2;

/// Lanes `8v..` of a line.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load_line(line: &Line, v: usize) -> Int {
    let bytes: &[u8; 32] = &line.as_chunks().0[v];
    // SAFETY: the reference covers the 32 bytes read; an unaligned load.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// Lanes `4w..` of a line, in i16.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load_words(line: &Line, w: usize) -> Int {
    let bytes: &[u8; 16] = &line.as_chunks().0[w];
    // SAFETY: the reference covers the 16 bytes read; an unaligned load.
    _mm256_cvtepu8_epi16(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
}

/// The same four in each lane.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn splat(four: [i8; 4]) -> Int {
    _mm256_set1_epi32(i32::from_ne_bytes(four.map(|x| x as u8)))
}

/// The same four in each lane.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn splat_words(four: [i16; 4]) -> Int {
    let [a, b, c, d] = four.map(|x| i64::from(x as u16));
    _mm256_set1_epi64x(d << 48 | c << 32 | b << 16 | a)
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn add(a: Int, b: Int) -> Int {
    _mm256_add_epi32(a, b)
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn shift_left_8(a: Int) -> Int {
    _mm256_slli_epi32::<8>(a)
}

/// Products of i16, pairs of which are added.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn multiply_pairs(a: Int, b: Int) -> Int {
    _mm256_madd_epi16(a, b)
}

/// Writes lanes `8v..`.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn store_lanes(to: &mut [i32; 16], v: usize, lanes: Int) {
    let to: &mut [i32; 8] = &mut to.as_chunks_mut().0[v];
    // SAFETY: the reference covers the 32 bytes written; an unaligned store.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), lanes) }
}

/// Writes lanes `4w..`, of each the sum of two.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn store_pairs(to: &mut [i32; 16], w: usize, pairs: Int) {
    let mut both = [0; 16];
    store_lanes(&mut both, 0, pairs);
    for (to, both) in to.as_chunks_mut::<4>().0[w].iter_mut().zip(both.as_chunks::<2>().0) {
        *to = both[0].wrapping_add(both[1]);
    }
}
