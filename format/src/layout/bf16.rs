//! BF16_PANELS (rule R24): bf16 values, four rows to a panel, 16 columns to a chunk. The router's layout.
//!
//! A range of rows that starts at a multiple of 4 is contiguous.

use super::{CHUNK, PANEL_ROWS, ROW_BYTES};

/// Columns in one chunk.
const BLOCK_COLS: usize = ROW_BYTES / 2;

/// Geometry of one BF16_PANELS matrix of `[rows, cols]`, and its packing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bf16PanelLayout {
    rows: usize,
    cols: usize,
    n_panels: usize,
    n_col_blocks: usize,
    len: usize,
}

impl Bf16PanelLayout {
    /// The layout of a `[rows, cols]` matrix; `None` when a dimension is zero or a size overflows.
    pub fn new(rows: usize, cols: usize) -> Option<Self> {
        if rows == 0 || cols == 0 {
            return None;
        }
        rows.checked_mul(cols)?;
        let n_panels = rows.div_ceil(PANEL_ROWS);
        let n_col_blocks = cols.div_ceil(BLOCK_COLS);
        let len = n_panels.checked_mul(n_col_blocks)?.checked_mul(CHUNK)?;
        Some(Self { rows, cols, n_panels, n_col_blocks, len })
    }

    /// Rows of the matrix, without padding.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the matrix, without padding.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Panels of 4 rows.
    pub fn n_panels(&self) -> usize {
        self.n_panels
    }

    /// Blocks of 16 columns.
    pub fn n_col_blocks(&self) -> usize {
        self.n_col_blocks
    }

    /// Bytes of the packed matrix.
    #[expect(clippy::len_without_is_empty, reason = "a byte count that is never zero, not a collection")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Packs a matrix.
    ///
    /// `values`: `[rows, cols]`, bf16 bits. `out`: [`Self::len`] bytes, wholly overwritten.
    ///
    /// # Panics
    /// When a slice has the wrong length.
    pub fn pack(&self, values: &[u16], out: &mut [u8]) {
        assert_eq!(values.len(), self.rows * self.cols, "values are [rows, cols]");
        assert_eq!(out.len(), self.len, "out is len() bytes");
        out.fill(0);
        for (row, values) in values.chunks_exact(self.cols).enumerate() {
            for (b, block) in values.chunks(BLOCK_COLS).enumerate() {
                let at = self.at(row, b);
                for (bytes, value) in out[at..at + ROW_BYTES].chunks_exact_mut(2).zip(block) {
                    bytes.copy_from_slice(&value.to_le_bytes());
                }
            }
        }
    }

    /// Reads one row back into `values` (`[cols]`, bf16 bits).
    ///
    /// # Panics
    /// When a slice has the wrong length or `row` is not below `rows`.
    pub fn unpack_row(&self, bytes: &[u8], row: usize, values: &mut [u16]) {
        assert_eq!(bytes.len(), self.len, "bytes are len() bytes");
        assert_eq!(values.len(), self.cols, "values are [cols]");
        assert!(row < self.rows, "row {row} of {}", self.rows);
        for (b, block) in values.chunks_mut(BLOCK_COLS).enumerate() {
            let at = self.at(row, b);
            for (value, bytes) in block.iter_mut().zip(bytes[at..at + ROW_BYTES].chunks_exact(2)) {
                *value = u16::from_le_bytes([bytes[0], bytes[1]]);
            }
        }
    }

    /// Offset of column block `b` of `row`.
    fn at(&self, row: usize, b: usize) -> usize {
        (row / PANEL_ROWS * self.n_col_blocks + b) * CHUNK + row % PANEL_ROWS * ROW_BYTES
    }
}
