//! Checkpoints to `.samara` files, losslessly.
//!
//! [`plan()`] reads a checkpoint's headers, config and texts and refuses what does not fit before any work; [`convert()`]
//! carries the plan out, streaming: sources are read in small pieces by position, every ternary row is proven to be
//! one, and the file appears under its name only when it is complete, on the disk and read back. [`check_target`] says
//! beforehand whether the output can be written. [`synthesise`] writes checkpoints of any size to test all that with.
//!
//! The crate knows tensor names and architectures (`arch`, one file each) and the numeric forms of weights. What the
//! output's bytes mean is `samara-format`'s matter, what the model computes is the runtime's.

#![forbid(unsafe_code)]

mod affine;
mod arch;
mod clusters;
mod config;
mod convert;
mod error;
mod journal;
mod json;
mod options;
mod plan;
mod produce;
mod progress;
mod recipe;
mod source;
mod synth;
mod target;
mod ternary;
mod text;
mod verify;

pub use convert::{Report, convert};
pub use error::{Error, TensorProblem};
pub use options::{FlashHead, Options};
pub use plan::{Plan, PlanSummary, PlannedTensor, plan};
pub use progress::{Progress, Quiet};
pub use synth::{SynthFlash, SynthLayout, SynthReport, SynthSpec, SynthTexts, synthesise};
pub use target::check_target;
pub use ternary::Counts;
