//! The program as a user meets it: command lines in, output and exit codes out.
//!
//! Each test runs the real binary on the fixtures' models, in a temporary folder.
#![forbid(unsafe_code)]

mod answers;
mod commands;
mod conversion;
mod damage;
#[cfg(unix)]
mod interruption;
mod program;
#[cfg(target_os = "linux")]
mod terminal;
mod text;
