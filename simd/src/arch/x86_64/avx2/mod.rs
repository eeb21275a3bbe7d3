//! AVX2: 32 bytes at a time, `maddubs` for the products of unsigned codes and signed activations.

pub(crate) mod affine4;
pub(crate) mod dense;
pub(crate) mod ternary;

use std::arch::x86_64::*;

use crate::rows::PANEL_ROWS;

/// Proof that this machine runs AVX2: it can only be made by asking the CPU and the operating system.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

impl Avx2 {
    /// The proof, if the CPU has AVX2 and the operating system saves its registers: the standard library looks at
    /// CPUID, OSXSAVE and XCR0, all three.
    pub fn try_new() -> Option<Self> {
        std::arch::is_x86_feature_detected!("avx2").then_some(Self(()))
    }
}

/// How far ahead of a panel stream to prefetch, bytes (`benches/ternary_layout.rs`). Every line of a stream
/// must be asked for: a gap of one panel header costs half the speed.
const PREFETCH: usize = 2048;

/// Asks for the two cache lines [`PREFETCH`] bytes after `chunk`. They may lie past the rows' end: a
/// prefetch is a hint and does not fault.
#[inline]
#[target_feature(enable = "avx2")]
fn prefetch(chunk: &[u8; 128]) {
    let ahead = chunk.as_ptr().cast::<i8>().wrapping_add(PREFETCH);
    _mm_prefetch::<_MM_HINT_T0>(ahead);
    _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64));
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_u8(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: the reference covers the 32 bytes read; an unaligned load.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_i8(values: &[i8; 32]) -> __m256i {
    // SAFETY: the reference covers the 32 bytes read; an unaligned load.
    unsafe { _mm256_loadu_si256(values.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_f32(values: &[f32; 8]) -> __m256 {
    // SAFETY: the reference covers the 32 bytes read; an unaligned load.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

/// Eight bf16 as f32.
#[inline]
#[target_feature(enable = "avx2")]
fn load_bf16(values: &[u8; 16]) -> __m256 {
    // SAFETY: the reference covers the 16 bytes read; an unaligned load.
    let values = unsafe { _mm_loadu_si128(values.as_ptr().cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(values)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn to_array(values: __m128) -> [f32; PANEL_ROWS] {
    let mut array = [0.0f32; PANEL_ROWS];
    // SAFETY: the array is the 16 bytes written; an unaligned store.
    unsafe { _mm_storeu_ps(array.as_mut_ptr(), values) };
    array
}

/// i16 products to f32 lanes: pairs added in i32, exact.
#[inline]
#[target_feature(enable = "avx2")]
fn pair_sums(products: __m256i) -> __m256 {
    _mm256_cvtepi32_ps(_mm256_madd_epi16(products, _mm256_set1_epi16(1)))
}

/// The fixed tree `((0+4) + (2+6)) + ((1+5) + (3+7))` of each row's lanes, one row a result lane.
#[inline]
#[target_feature(enable = "avx2")]
fn tree(rows: [__m256; PANEL_ROWS]) -> __m128 {
    let [a, b, c, d] =
        rows.map(|row| _mm_add_ps(_mm256_castps256_ps128(row), _mm256_extractf128_ps::<1>(row)));
    let (ab_low, ab_high) = (_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    let (cd_low, cd_high) = (_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    let even = _mm_add_ps(_mm_movelh_ps(ab_low, cd_low), _mm_movelh_ps(ab_high, cd_high));
    let odd = _mm_add_ps(_mm_movehl_ps(cd_low, ab_low), _mm_movehl_ps(cd_high, ab_high));
    _mm_add_ps(even, odd)
}
