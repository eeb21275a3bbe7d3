//! The f32 operations: those of NEON, but for attention, whose 8-bit cache is multiplied in integers.

pub(crate) use crate::arch::aarch64::neon::dense::*;

const FUSED: bool = true;

crate::arch::generic::attention_shell!(#[target_feature(enable = "neon,dotprod")]);
