//! The program as a user meets it: command lines in, output and exit codes out.
//!
//! Each test runs the real binary on the fixtures' models, in a temporary folder.
#![forbid(unsafe_code)]

mod answers;
mod commands;
#[cfg(target_os = "linux")]
mod console;
mod conversion;
mod cpu_floor;
mod damage;
mod heads;
mod interruption;
#[cfg(target_os = "linux")]
mod machine;
mod paths;
mod program;
#[cfg(unix)]
mod signals;
#[cfg(unix)]
mod targets;
#[cfg(target_os = "linux")]
mod terminal;
mod text;
