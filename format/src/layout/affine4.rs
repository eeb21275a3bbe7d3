//! AFFINE4 (rule R23): 4-bit values with a bf16 scale and bias for each 64 inputs, four rows to a panel.
//!
//! A panel's scales and biases come first, then its nibbles, so a thread that takes a range of panels reads one
//! stream from its first byte to its last. A range of rows that starts at a multiple of 4 is contiguous: large
//! matrices are packed batch by batch, with a layout of the batch's own row count.

use super::{CHUNK, PANEL_ROWS, ROW_BYTES, padded};

/// Inputs that share one scale and bias.
const GROUP: usize = 64;
/// Header bytes of one group: 4 scales and 4 biases, bf16.
const GROUP_HEADER: usize = 2 * 2 * PANEL_ROWS;

/// Geometry of one AFFINE4 matrix of `[rows, cols]`, and its packing. weight = nibble * scale + bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Affine4Layout {
    rows: usize,
    cols: usize,
    n_panels: usize,
    panel_header_len: usize,
    panel_len: usize,
    len: usize,
}

impl Affine4Layout {
    /// The layout of a `[rows, cols]` matrix; `None` when a dimension is zero, `cols` is not a multiple of 64 or a
    /// size overflows.
    pub fn new(rows: usize, cols: usize) -> Option<Self> {
        if rows == 0 || cols == 0 || !cols.is_multiple_of(GROUP) {
            return None;
        }
        rows.checked_mul(cols)?;
        let n_panels = rows.div_ceil(PANEL_ROWS);
        let n_groups = cols / GROUP;
        let panel_header_len = padded(n_groups.checked_mul(GROUP_HEADER)?, CHUNK)?;
        let panel_len = panel_header_len.checked_add(n_groups.checked_mul(CHUNK)?)?;
        let len = n_panels.checked_mul(panel_len)?;
        Some(Self { rows, cols, n_panels, panel_header_len, panel_len, len })
    }

    /// Rows of the matrix, without padding.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the matrix.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Panels of 4 rows.
    pub fn n_panels(&self) -> usize {
        self.n_panels
    }

    /// Groups of 64 columns in a row.
    pub fn n_groups(&self) -> usize {
        self.cols / GROUP
    }

    /// Bytes of a panel's scales and biases, padded to 128; its nibbles start here.
    pub fn panel_header_len(&self) -> usize {
        self.panel_header_len
    }

    /// Bytes of a panel.
    pub fn panel_len(&self) -> usize {
        self.panel_len
    }

    /// Bytes of the packed matrix.
    #[expect(clippy::len_without_is_empty, reason = "a byte count that is never zero, not a collection")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Packs a matrix.
    ///
    /// `nibbles`: `[rows, cols]`, one a byte, 0 to 15. `scales`, `biases`: `[rows, cols / 64]`, bf16 bits. `out`:
    /// [`Self::len`] bytes, wholly overwritten.
    ///
    /// # Panics
    /// When a slice has the wrong length or a nibble is above 15.
    pub fn pack(&self, nibbles: &[u8], scales: &[u16], biases: &[u16], out: &mut [u8]) {
        let n_groups = self.n_groups();
        assert_eq!(nibbles.len(), self.rows * self.cols, "nibbles are [rows, cols]");
        assert_eq!(scales.len(), self.rows * n_groups, "scales are [rows, cols / 64]");
        assert_eq!(biases.len(), self.rows * n_groups, "biases are [rows, cols / 64]");
        assert_eq!(out.len(), self.len, "out is len() bytes");
        assert!(nibbles.iter().all(|&q| q <= 15), "a nibble is 0 to 15");
        out.fill(0);
        for row in 0..self.rows {
            let panel = &mut out[row / PANEL_ROWS * self.panel_len..][..self.panel_len];
            let (header, chunks) = panel.split_at_mut(self.panel_header_len);
            let r = row % PANEL_ROWS;
            for g in 0..n_groups {
                let at = g * GROUP_HEADER + 2 * r;
                header[at..at + 2].copy_from_slice(&scales[row * n_groups + g].to_le_bytes());
                header[at + 8..at + 10].copy_from_slice(&biases[row * n_groups + g].to_le_bytes());
                let (lo, hi) = nibbles[row * self.cols + g * GROUP..][..GROUP].split_at(ROW_BYTES);
                let bytes = &mut chunks[g * CHUNK + r * ROW_BYTES..][..ROW_BYTES];
                for (byte, (lo, hi)) in bytes.iter_mut().zip(lo.iter().zip(hi)) {
                    *byte = lo | (hi << 4);
                }
            }
        }
    }

    /// Reads one row back into `nibbles` (`[cols]`, one a byte), `scales` and `biases` (`[cols / 64]`, bf16 bits).
    ///
    /// # Panics
    /// When a slice has the wrong length or `row` is not below `rows`.
    pub fn unpack_row(
        &self,
        bytes: &[u8],
        row: usize,
        nibbles: &mut [u8],
        scales: &mut [u16],
        biases: &mut [u16],
    ) {
        let n_groups = self.n_groups();
        assert_eq!(bytes.len(), self.len, "bytes are len() bytes");
        assert_eq!(nibbles.len(), self.cols, "nibbles are [cols]");
        assert_eq!((scales.len(), biases.len()), (n_groups, n_groups), "scales and biases are [cols / 64]");
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let panel = &bytes[row / PANEL_ROWS * self.panel_len..][..self.panel_len];
        let (header, chunks) = panel.split_at(self.panel_header_len);
        let r = row % PANEL_ROWS;
        for g in 0..n_groups {
            let at = g * GROUP_HEADER + 2 * r;
            scales[g] = u16::from_le_bytes([header[at], header[at + 1]]);
            biases[g] = u16::from_le_bytes([header[at + 8], header[at + 9]]);
            let (lo, hi) = nibbles[g * GROUP..][..GROUP].split_at_mut(ROW_BYTES);
            let packed = &chunks[g * CHUNK + r * ROW_BYTES..][..ROW_BYTES];
            for (byte, (lo, hi)) in packed.iter().zip(lo.iter_mut().zip(hi)) {
                (*lo, *hi) = (byte & 15, byte >> 4);
            }
        }
    }
}
