//! NEON with the integer dot product: four products of bytes added to each i32, 16 in an instruction.

pub(crate) mod affine4;
pub(crate) mod dense;
mod lines;
pub(crate) mod ternary;

use std::arch::aarch64::*;
use std::arch::asm;

pulp::simd_type! {
    /// Proof that this machine runs NEON with the dot product: `try_new` asks the operating system.
    pub(crate) struct NeonDotprod {
        neon: "neon",
        dotprod: "dotprod",
    }
}

/// Sums of four lanes.
type Sums = int32x4_t;

// SAFETY: any bits are four integers.
const ZERO: Sums = unsafe { std::mem::transmute([0i32; 4]) };

// The name that plain NEON has for sums of lanes, which its `dot` does not give.
use self::dot as add_dot;

/// Adds 16 products, four to each lane. `vdotq_s32` is not in stable Rust.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot(mut sums: Sums, codes: int8x16_t, q: int8x16_t) -> Sums {
    // SAFETY: the function's features have the instruction; it changes the one register that is declared so.
    unsafe {
        asm!(
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) sums,
            in(vreg) codes,
            in(vreg) q,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// They are sums already.
#[inline]
#[target_feature(enable = "neon")]
fn lane_sums(sums: Sums) -> int32x4_t {
    sums
}
