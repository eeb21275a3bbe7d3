//! The f32 operations, compiled for NEON.

const FUSED: bool = true;

crate::arch::generic::dense_table!(#[target_feature(enable = "neon")]);
