//! The f32 operations, compiled for NEON.

crate::arch::generic::dense_table!(#[target_feature(enable = "neon")]);
