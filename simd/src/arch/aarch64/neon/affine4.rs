//! 4-bit affine rows times int8 activations.

crate::arch::aarch64::affine4::affine4_kernels!("neon", 2);
