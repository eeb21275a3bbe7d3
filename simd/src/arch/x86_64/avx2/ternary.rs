//! Ternary rows times int8 activations.

ternary_kernels!("avx2");
