//! Ternary rows times int8 activations.

crate::arch::aarch64::ternary::ternary_kernels!("neon,dotprod", 4);
