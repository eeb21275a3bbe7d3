//! The f32 operations, compiled for AVX-512.

const FUSED: bool = true;

crate::arch::generic::dense_table!(#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]);
