//! What the cross-crate tests share: fixtures, converted models, golden sequences, tolerances.
#![forbid(unsafe_code)]

mod golden;
mod models;
mod rewrite;

pub use golden::{Golden, compare_rows, golden};
pub use models::{Fixture, emulated, engine, fixture, model};
pub use rewrite::rewrite;
