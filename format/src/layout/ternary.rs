//! TERNARY2 (rule R22): 2-bit codes in planes, four rows to a panel, then one bf16 scale a row.
//!
//! Planes: byte `i` of a row's 32 bytes holds columns `i`, `32 + i`, `64 + i` and `96 + i`, so one shift and one mask
//! turn 32 bytes into 32 consecutive codes, and the four bytes of a `u32` stand beside four packed activations.

use super::{CHUNK, PANEL_ROWS, ROW_BYTES, padded};

/// Columns in one chunk.
const BLOCK_COLS: usize = 128;
/// Four codes 1, the weight zero.
const ZERO_WEIGHTS: u8 = 0b01_01_01_01;

/// Geometry of one TERNARY2 matrix of `[rows, cols]`, and its packing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TernaryLayout {
    rows: usize,
    cols: usize,
    n_panels: usize,
    n_col_blocks: usize,
    codes_len: usize,
    len: usize,
}

impl TernaryLayout {
    /// The layout of a `[rows, cols]` matrix; `None` when a dimension is zero or a size overflows.
    pub fn new(rows: usize, cols: usize) -> Option<Self> {
        if rows == 0 || cols == 0 {
            return None;
        }
        rows.checked_mul(cols)?;
        let n_panels = rows.div_ceil(PANEL_ROWS);
        let n_col_blocks = cols.div_ceil(BLOCK_COLS);
        let codes_len = n_panels.checked_mul(n_col_blocks)?.checked_mul(CHUNK)?;
        let scales_len = padded(n_panels.checked_mul(PANEL_ROWS * 2)?, CHUNK)?;
        let len = codes_len.checked_add(scales_len)?;
        Some(Self { rows, cols, n_panels, n_col_blocks, codes_len, len })
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

    /// Blocks of 128 columns.
    pub fn n_col_blocks(&self) -> usize {
        self.n_col_blocks
    }

    /// Bytes of the codes; the scales start here.
    pub fn codes_len(&self) -> usize {
        self.codes_len
    }

    /// Offset in bytes of the row scales, bf16, one for each padded row.
    pub fn scales_offset(&self) -> usize {
        self.codes_len
    }

    /// Bytes of the packed matrix.
    #[expect(clippy::len_without_is_empty, reason = "a byte count that is never zero, not a collection")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Packs a matrix.
    ///
    /// `codes`: `[rows, cols]`, one code a byte, sign + 1. `scales`: `[rows]`, bf16 bits. `out`: [`Self::len`] bytes,
    /// wholly overwritten.
    ///
    /// # Panics
    /// When a slice has the wrong length or a code is above 2.
    pub fn pack(&self, codes: &[u8], scales: &[u16], out: &mut [u8]) {
        assert_eq!(codes.len(), self.rows * self.cols, "codes are [rows, cols]");
        assert_eq!(scales.len(), self.rows, "scales are [rows]");
        assert_eq!(out.len(), self.len, "out is len() bytes");
        // The largest of all, not the first above 2: without an early end the loop becomes vector instructions.
        let largest = codes.iter().fold(0, |largest, &code| code.max(largest));
        assert!(largest <= 2, "a ternary code is 0, 1 or 2");
        let (out_codes, out_scales) = out.split_at_mut(self.codes_len);
        let panel_len = self.n_col_blocks * CHUNK;
        for (panel, rows) in out_codes.chunks_exact_mut(panel_len).zip(codes.chunks(PANEL_ROWS * self.cols)) {
            panel.fill(ZERO_WEIGHTS);
            for (r, row) in rows.chunks_exact(self.cols).enumerate() {
                for (chunk, block) in panel.chunks_exact_mut(CHUNK).zip(row.chunks(BLOCK_COLS)) {
                    pack_block(block, &mut chunk[r * ROW_BYTES..(r + 1) * ROW_BYTES]);
                }
            }
        }
        out_scales.fill(0);
        for (bytes, scale) in out_scales.chunks_exact_mut(2).zip(scales) {
            bytes.copy_from_slice(&scale.to_le_bytes());
        }
    }

    /// Reads one row back: fills `codes` (`[cols]`, one code a byte) and returns the row's scale as bf16 bits.
    ///
    /// A code 3, which no valid matrix has, comes back as 3.
    ///
    /// # Panics
    /// When a slice has the wrong length or `row` is not below `rows`.
    pub fn unpack_row(&self, bytes: &[u8], row: usize, codes: &mut [u8]) -> u16 {
        assert_eq!(bytes.len(), self.len, "bytes are len() bytes");
        assert_eq!(codes.len(), self.cols, "codes are [cols]");
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let (panel, r) = (row / PANEL_ROWS, row % PANEL_ROWS);
        for (b, block) in codes.chunks_mut(BLOCK_COLS).enumerate() {
            let at = (panel * self.n_col_blocks + b) * CHUNK + r * ROW_BYTES;
            let packed = &bytes[at..at + ROW_BYTES];
            for (plane, codes) in block.chunks_mut(ROW_BYTES).enumerate() {
                for (code, byte) in codes.iter_mut().zip(packed) {
                    *code = (byte >> (2 * plane)) & 3;
                }
            }
        }
        let at = self.codes_len + 2 * row;
        u16::from_le_bytes([bytes[at], bytes[at + 1]])
    }
}

/// Packs up to 128 codes of one row into its 32 bytes; columns past the end of `block` get code 1.
fn pack_block(block: &[u8], out: &mut [u8]) {
    let mut full = [1u8; BLOCK_COLS];
    full[..block.len()].copy_from_slice(block);
    let (lo, hi) = full.split_at(2 * ROW_BYTES);
    let ((a, b), (c, d)) = (lo.split_at(ROW_BYTES), hi.split_at(ROW_BYTES));
    for (i, byte) in out.iter_mut().enumerate() {
        *byte = a[i] | (b[i] << 2) | (c[i] << 4) | (d[i] << 6);
    }
}
