//! Ternary rows times int8 activations.

ternary_kernels!("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni");
