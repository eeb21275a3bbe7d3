//! Lines of the 8-bit cache, compiled for NEON with the dot product.

crate::arch::aarch64::lines::lines!("neon,dotprod");
