//! The f32 operations, compiled for AVX2.

crate::arch::generic::dense_table!(#[target_feature(enable = "avx2")]);
