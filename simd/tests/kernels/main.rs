//! Tests of the kernels: scalar against what defines it, every instruction set against scalar, and which of them is chosen.

mod common;
mod contract;
mod definition;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod emulated_cpus;
mod exp;
mod format_layout;
mod isa_equals_scalar;
