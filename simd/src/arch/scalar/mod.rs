//! The definition of every operation, in plain Rust.

pub(crate) mod affine4;
pub(crate) mod dense;
pub(crate) mod ternary;
