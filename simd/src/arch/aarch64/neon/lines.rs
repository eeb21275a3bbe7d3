//! Lines of the 8-bit cache, compiled for plain NEON.

crate::arch::aarch64::lines::lines!("neon");
