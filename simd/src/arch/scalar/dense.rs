//! The f32 operations, for any machine.

crate::arch::generic::dense_table!();
