//! 4-bit affine rows times int8 activations.

affine4_kernels!("avx2,fma");
