//! 4-bit affine rows times int8 activations.

affine4_kernels!("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni");
