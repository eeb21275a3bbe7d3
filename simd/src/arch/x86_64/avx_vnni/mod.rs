//! AVX-VNNI: as AVX2, with `dpbusd` for the products of unsigned codes and signed activations.

pub(crate) mod affine4;
pub(crate) mod dense;
mod lines;
pub(crate) mod ternary;

use std::arch::x86_64::*;

use super::avx2::Avx2;
use super::ymm::*;

/// Proof that this machine runs AVX2 and AVX-VNNI.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AvxVnni(());

impl AvxVnni {
    /// The proof, if the CPU has both and the operating system saves the registers, which [`Avx2`] has seen.
    pub(crate) fn try_new() -> Option<Self> {
        // `pulp` does not know this one.
        Avx2::try_new().filter(|_| std::arch::is_x86_feature_detected!("avxvnni")).map(|_| Self(()))
    }
}

/// Adds products of unsigned `codes` and signed `q` to `sum`: fours, i32, exact.
#[inline]
#[target_feature(enable = "avx2,avxvnni")]
fn dot(sum: __m256i, codes: __m256i, q: __m256i) -> __m256i {
    _mm256_dpbusd_avx_epi32(sum, codes, q)
}

/// `a + b / 4` of such sums, for a `b` of multiples of four.
#[inline]
#[target_feature(enable = "avx2")]
fn add_quarter(a: __m256i, b: __m256i) -> __m256i {
    _mm256_add_epi32(a, _mm256_srai_epi32::<2>(b))
}

/// What [`dot`] added up to f32 lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn sums(products: __m256i) -> __m256 {
    _mm256_cvtepi32_ps(products)
}
