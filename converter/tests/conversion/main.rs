//! Tests of whole conversions, on the fixtures and on damaged copies of them.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test may fail by panicking, in its helpers too")]

mod checkpoint;
mod clusters;
mod config;
mod files;
mod lossless;
mod resume;
mod synth;
mod target;
mod weights;
