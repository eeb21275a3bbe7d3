//! AVX-512 F, BW, DQ and VL: 64 bytes at a time, two rows of a chunk, with `maddubs`, which cannot saturate
//! (`avx2`).

pub(crate) mod affine4;
pub(crate) mod dense;
mod lines;
pub(crate) mod ternary;

use std::arch::x86_64::*;

use super::zmm::*;

pulp::simd_type! {
    /// Proof that this machine runs AVX-512 F, BW, DQ and VL: `try_new` asks the CPU and the operating system.
    pub(crate) struct Avx512 {
        avx2: "avx2",
        fma: "fma",
        avx512f: "avx512f",
        avx512bw: "avx512bw",
        avx512dq: "avx512dq",
        avx512vl: "avx512vl",
    }
}

/// Adds products of unsigned `codes` and signed `q` to `sum`: pairs, i16, exact.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn dot(sum: __m512i, codes: __m512i, q: __m512i) -> __m512i {
    _mm512_add_epi16(sum, _mm512_maddubs_epi16(codes, q))
}

/// `a + b / 4` of such sums, for a `b` of multiples of four.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn add_quarter(a: __m512i, b: __m512i) -> __m512i {
    _mm512_add_epi16(a, _mm512_srai_epi16::<2>(b))
}

/// What [`dot`] added up to f32 lanes: pairs of pairs added in i32, exact.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn sums(products: __m512i) -> __m512 {
    _mm512_cvtepi32_ps(_mm512_madd_epi16(products, _mm512_set1_epi16(1)))
}
