//! The definition of every operation, in plain Rust.

pub(crate) mod affine4;
pub(crate) mod dense;
mod lines;
pub(crate) mod ternary;
