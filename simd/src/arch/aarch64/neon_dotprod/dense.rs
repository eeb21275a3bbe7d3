//! The f32 operations: those of NEON, since none of them has an integer dot product.

pub(crate) use crate::arch::aarch64::neon::dense::*;
