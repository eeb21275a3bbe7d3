//! What the cross-crate tests share: fixtures, converted models, golden sequences, tolerances.
#![forbid(unsafe_code)]

mod golden;
mod models;
mod rewrite;
mod tolerance;

pub use golden::{Golden, compare_rows, golden};
pub use models::{Fixture, changed, emulated, engine, fixture, ids, model, unclamped};
pub use rewrite::rewrite;
pub use tolerance::{
    Measured, STRESS_EXACT, STRESS_INT8, TINY_EXACT, TINY_INT8, TINY_KV8, Tolerance, measure,
};
