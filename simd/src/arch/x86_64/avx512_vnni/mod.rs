//! AVX-512 with VNNI: as AVX-512, with `dpbusd` for the products of unsigned codes and signed activations.

pub(crate) mod affine4;
pub(crate) mod dense;
mod lines;
pub(crate) mod ternary;

use std::arch::x86_64::*;

use super::zmm::*;

pulp::simd_type! {
    /// Proof that this machine runs AVX-512 F, BW, DQ, VL and VNNI: `try_new` asks the CPU and the operating
    /// system.
    pub(crate) struct Avx512Vnni {
        avx2: "avx2",
        fma: "fma",
        avx512f: "avx512f",
        avx512bw: "avx512bw",
        avx512dq: "avx512dq",
        avx512vl: "avx512vl",
        avx512vnni: "avx512vnni",
    }
}

/// Adds products of unsigned `codes` and signed `q` to `sum`: fours, i32, exact.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dot(sum: __m512i, codes: __m512i, q: __m512i) -> __m512i {
    _mm512_dpbusd_epi32(sum, codes, q)
}

/// `a + b / 4` of such sums, for a `b` of multiples of four.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn add_quarter(a: __m512i, b: __m512i) -> __m512i {
    _mm512_add_epi32(a, _mm512_srai_epi32::<2>(b))
}

/// What [`dot`] added up to f32 lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn sums(products: __m512i) -> __m512 {
    _mm512_cvtepi32_ps(products)
}
