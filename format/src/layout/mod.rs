//! The packed layouts: how a `[rows, cols]` matrix lies in memory so that one thread reads one sequential stream.
//!
//! All three share one shape: a **panel** is 4 rows, and a panel is cut along its columns into chunks of 128 bytes
//! in which each row has 32 bytes. Four rows share one load of the activations, a chunk is two cache lines, and 32
//! GPU lanes read one chunk coalesced. Rows that do not fill the last panel are padded (rules R22 to R24).
//!
//! Packing and unpacking here are plain and portable: they define the layouts and serve conversion and tests.
//! Kernels read the packed bytes directly.

mod affine4;
mod bf16;
mod ternary;

pub use affine4::Affine4Layout;
pub use bf16::Bf16PanelLayout;
pub use ternary::TernaryLayout;

/// Rows in a panel.
pub const PANEL_ROWS: usize = 4;
/// Bytes of one row in one chunk.
pub const ROW_BYTES: usize = 32;
/// Bytes in one chunk: [`PANEL_ROWS`] rows of [`ROW_BYTES`].
pub const CHUNK: usize = PANEL_ROWS * ROW_BYTES;

/// `n` rounded up to a multiple of `to`, or `None` on overflow.
fn padded(n: usize, to: usize) -> Option<usize> {
    n.checked_next_multiple_of(to)
}
