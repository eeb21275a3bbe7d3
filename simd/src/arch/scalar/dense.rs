//! The f32 operations, for any machine.

const FUSED: bool = false;

crate::arch::generic::dense_table!();
