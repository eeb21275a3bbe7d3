//! aarch64. Two sets that differ in one step, the products of 16 codes and 16 activations: the kernels are written
//! once, as macros, and each set's folder makes its own of them.
//!
//! A set has, beside its kernels, `Sums` (the products of four lanes so far), `ZERO`, `dot(sums, codes, q)`, which adds
//! 16 products, and `lane_sums(sums)`, the four i32. The eight lanes are two registers: lanes `4h..4h + 4` of a row
//! are bytes `16h..16h + 16` of its 32.

mod affine4;
mod gemm;
mod lines;
pub(crate) mod neon;
pub(crate) mod neon_dotprod;
mod ternary;

use std::arch::aarch64::*;

use crate::arch::generic;
use crate::rows::PANEL_ROWS;

/// Four lanes of each row of a panel.
type Lanes = [float32x4_t; PANEL_ROWS];

/// How far ahead of a panel stream to prefetch, bytes. Not measured on ARM hardware.
const PREFETCH: usize = 2048;

/// Asks for the two 64 byte lines [`PREFETCH`] bytes after `bytes`.
#[inline(always)]
fn prefetch(bytes: &[u8]) {
    generic::prefetch(bytes.as_ptr(), PREFETCH);
    generic::prefetch(bytes.as_ptr(), PREFETCH + 64);
}

#[inline]
#[target_feature(enable = "neon")]
fn load_u8(bytes: &[u8; 16]) -> uint8x16_t {
    // SAFETY: the reference covers the 16 bytes read.
    unsafe { vld1q_u8(bytes.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_i8(values: &[i8; 16]) -> int8x16_t {
    // SAFETY: the reference covers the 16 bytes read.
    unsafe { vld1q_s8(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_f32(values: &[f32; 4]) -> float32x4_t {
    // SAFETY: the reference covers the 16 bytes read.
    unsafe { vld1q_f32(values.as_ptr()) }
}

/// Four bf16, little endian, as f32.
#[inline]
#[target_feature(enable = "neon")]
fn load_bf16(values: &[u8; 8]) -> float32x4_t {
    // SAFETY: the reference covers the 8 bytes read.
    let values = unsafe { vld1_u8(values.as_ptr()) };
    vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(values)))
}

#[inline]
#[target_feature(enable = "neon")]
fn to_array(values: float32x4_t) -> [f32; PANEL_ROWS] {
    let mut array = [0.0f32; PANEL_ROWS];
    // SAFETY: the array is the 16 bytes written.
    unsafe { vst1q_f32(array.as_mut_ptr(), values) };
    array
}

/// Lane `r` in all lanes; where it is multiplied by, the compiler makes it an operand of the multiplication.
#[inline]
#[target_feature(enable = "neon")]
fn splat(values: float32x4_t, r: usize) -> float32x4_t {
    match r {
        0 => vdupq_laneq_f32::<0>(values),
        1 => vdupq_laneq_f32::<1>(values),
        2 => vdupq_laneq_f32::<2>(values),
        _ => vdupq_laneq_f32::<3>(values),
    }
}

/// The fixed tree `((0+4) + (2+6)) + ((1+5) + (3+7))` of each row's lanes, one row a result lane. `low` are lanes
/// 0..4, `high` 4..8.
#[inline]
#[target_feature(enable = "neon")]
fn tree(low: Lanes, high: Lanes) -> float32x4_t {
    let mut rows = low;
    for (row, high) in rows.iter_mut().zip(high) {
        *row = vaddq_f32(*row, high);
    }
    let [a, b, c, d] = rows;
    vpaddq_f32(fold(a, b), fold(c, d))
}

/// `[a0 + a2, a1 + a3, b0 + b2, b1 + b3]`.
#[inline]
#[target_feature(enable = "neon")]
fn fold(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    let low = vcombine_f32(vget_low_f32(a), vget_low_f32(b));
    let high = vcombine_f32(vget_high_f32(a), vget_high_f32(b));
    vaddq_f32(low, high)
}
