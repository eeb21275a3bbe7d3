//! AVX2: 32 bytes at a time, `maddubs` for the products of unsigned codes and signed activations.
//!
//! `maddubs` cannot saturate, and neither can its sums: a pair is at most 2 * 12 * 128 even for a code that is
//! not valid and four times too large, and two planes of a span 2 * `SPAN_BLOCKS` times that; a pair of nibbles
//! is at most 2 * 15 * 128, and there are two for each sum.

pub(crate) mod affine4;
pub(crate) mod dense;
mod lines;
pub(crate) mod ternary;

use std::arch::x86_64::*;

use super::ymm::*;
use crate::activation::SPAN_BLOCKS;

const _: () = assert!(SPAN_BLOCKS * 2 * (2 * 12 * 128) <= i16::MAX as usize);

pulp::simd_type! {
    /// Proof that this machine runs AVX2 and FMA: `try_new` asks the CPU and the operating system.
    pub struct Avx2 {
        avx2: "avx2",
        fma: "fma",
    }
}

/// Adds products of unsigned `codes` and signed `q` to `sum`: pairs, i16, exact.
#[inline]
#[target_feature(enable = "avx2")]
fn dot(sum: __m256i, codes: __m256i, q: __m256i) -> __m256i {
    _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, q))
}

/// `a + b / 4` of such sums, for a `b` of multiples of four.
#[inline]
#[target_feature(enable = "avx2")]
fn add_quarter(a: __m256i, b: __m256i) -> __m256i {
    _mm256_add_epi16(a, _mm256_srai_epi16::<2>(b))
}

/// What [`dot`] added up to f32 lanes: pairs of pairs added in i32, exact.
#[inline]
#[target_feature(enable = "avx2")]
fn sums(products: __m256i) -> __m256 {
    _mm256_cvtepi32_ps(_mm256_madd_epi16(products, _mm256_set1_epi16(1)))
}
