//! Whole models, from the fixtures' checkpoints to logits and answers.

mod batches;
mod flash;
mod generating;
mod golden;
mod gpu;
mod refusals;
mod windows;
