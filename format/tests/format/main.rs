//! Tests of the container, from outside: what a reader accepts and refuses, what a writer leaves on the disk.

#![expect(clippy::unwrap_used, reason = "a test's own failure")]

mod errors;
mod golden;
mod hostile;
mod layouts;
mod raw;
mod roundtrip;
mod sample;
mod writer;
