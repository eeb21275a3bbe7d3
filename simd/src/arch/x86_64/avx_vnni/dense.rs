//! The f32 operations, compiled for AVX2 and AVX-VNNI.

crate::arch::generic::dense_table!(#[target_feature(enable = "avx2,avxvnni")]);
