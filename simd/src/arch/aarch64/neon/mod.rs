//! Plain NEON: products in i16, which are added over pairs at the end of a span.

pub(crate) mod affine4;
pub(crate) mod dense;
mod lines;
pub(crate) mod ternary;

use std::arch::aarch64::*;

use crate::activation::SPAN_BLOCKS;

pulp::simd_type! {
    /// Proof that this machine runs NEON: `try_new` asks the operating system.
    pub(crate) struct Neon {
        neon: "neon",
    }
}

/// Products of four lanes: bytes 0..8 and bytes 8..16.
type Sums = [int16x8_t; 2];

// SAFETY: any bits are eight integers.
const ZERO: Sums = unsafe { std::mem::transmute([0i16; 16]) };

// Two neighbours of a span, four planes each, even with the code that is not valid.
const _: () = assert!(2 * 4 * SPAN_BLOCKS * 3 * 128 <= i16::MAX as usize);

/// Adds 16 products, each to the i16 of its byte.
#[inline]
#[target_feature(enable = "neon")]
fn dot([low, high]: Sums, codes: int8x16_t, q: int8x16_t) -> Sums {
    [vmlal_s8(low, vget_low_s8(codes), vget_low_s8(q)), vmlal_high_s8(high, codes, q)]
}

/// The four bytes of each lane added, exact.
#[inline]
#[target_feature(enable = "neon")]
fn lane_sums([low, high]: Sums) -> int32x4_t {
    vpaddlq_s16(vpaddq_s16(low, high))
}

/// Adds 16 products, four to each lane: pairs of them are added in i16, which int8 of at most 127 on one side allow.
#[inline]
#[target_feature(enable = "neon")]
fn add_dot(sums: int32x4_t, values: int8x16_t, q: int8x16_t) -> int32x4_t {
    let low = vmull_s8(vget_low_s8(values), vget_low_s8(q));
    vpadalq_s16(sums, vpaddq_s16(low, vmull_high_s8(values, q)))
}
