//! Views of weight rows in the file's layouts. The constructors check every length, once, so that the
//! kernels can walk them without looking back.

use std::ops::Range;

pub(crate) use samara_format::layout::CHUNK;
pub use samara_format::layout::PANEL_ROWS;
use samara_format::{Affine4Layout, Bf16PanelLayout, TernaryLayout};

use crate::{activation::ACT_BLOCK, arch::generic};

/// How far ahead of a panel stream to prefetch, bytes (`benches/kernels.rs`), and how much of one that begins. Every line of a stream
/// must be asked for: a gap of one panel header costs half the speed.
pub(crate) const AHEAD: usize = 8192;

/// Asks for [`AHEAD`] bytes from where `panels` begin.
fn ask(panels: &[u8]) {
    (0..AHEAD.min(panels.len())).step_by(64).for_each(|bytes| generic::prefetch(panels.as_ptr(), bytes));
}

/// Columns of a bf16 chunk.
pub(crate) const BF16_COLS: usize = CHUNK / PANEL_ROWS / 2;

/// Ternary rows in 4-row panels of bit planes, with one bf16 scale a row (`TERNARY2`).
///
/// Panel `p`, column block `b`: 128 bytes at `128 * (p * n_blocks + b)`, row `r` of the panel 32 bytes
/// at `32r`; byte `i`, bits `2j..2j+2` hold sign + 1 of column `128b + 32j + i`.
#[derive(Clone, Copy, Debug)]
pub struct TernaryRows<'a> {
    layout: TernaryLayout,
    codes: &'a [u8],
    scales: &'a [u8],
}

impl<'a> TernaryRows<'a> {
    /// Rows over `codes`, u8 `[n_panels, n_blocks, 128]`, and `scales`, bf16 bytes `[n_panels * 4]`.
    ///
    /// # Panics
    /// If a dimension is 0 or a length does not follow from `rows` and `cols`.
    pub fn new(codes: &'a [u8], scales: &'a [u8], rows: usize, cols: usize) -> Self {
        let layout = TernaryLayout::new(rows, cols).expect("a matrix that fits into memory has a layout");
        assert_eq!(codes.len(), layout.codes_len(), "bytes of ternary codes for [{rows}, {cols}]");
        let scales_len = 2 * PANEL_ROWS * layout.n_panels();
        assert_eq!(scales.len(), scales_len, "bytes of row scales for [{rows}, {cols}]");
        Self { layout, codes, scales }
    }

    /// Rows over one `TERNARY2` part: codes, then scales, then padding to 128 bytes.
    ///
    /// # Panics
    /// If a dimension is 0 or `part` is not as long as `rows` and `cols` ask for.
    pub fn from_part(part: &'a [u8], rows: usize, cols: usize) -> Self {
        let layout = TernaryLayout::new(rows, cols).expect("a matrix that fits into memory has a layout");
        assert_eq!(part.len(), layout.len(), "bytes of a ternary part for [{rows}, {cols}]");
        let (codes, scales) = part.split_at(layout.scales_offset());
        Self { layout, codes, scales: &scales[..2 * PANEL_ROWS * layout.n_panels()] }
    }

    /// Asks for the beginning of the panel that has `row`, which is read soon and not after its neighbour.
    ///
    /// # Panics
    /// If there is no such row.
    #[inline]
    pub fn prefetch(&self, row: usize) {
        ask(self.panels_from(row / PANEL_ROWS).as_flattened());
    }

    /// Number of rows, without padding.
    pub fn rows(&self) -> usize {
        self.layout.rows()
    }

    /// Number of columns, padded to 128.
    pub fn padded_cols(&self) -> usize {
        self.layout.n_col_blocks() * ACT_BLOCK
    }

    /// Chunks of panel `p`, u8 `[n_blocks][128]`.
    #[inline(always)]
    pub(crate) fn panel(&self, p: usize) -> &'a [[u8; CHUNK]] {
        &self.panels_from(p)[..self.layout.n_col_blocks()]
    }

    /// Chunks of panel `p` and of those after it.
    #[inline(always)]
    fn panels_from(&self, p: usize) -> &'a [[u8; CHUNK]] {
        &self.codes.as_chunks().0[p * self.layout.n_col_blocks()..]
    }

    /// bf16 scales of panel `p`'s four rows, little endian.
    #[inline(always)]
    pub(crate) fn panel_scales(&self, p: usize) -> &'a [u8; 2 * PANEL_ROWS] {
        &self.scales.as_chunks().0[p]
    }
}

/// 4-bit affine rows in 4-row panels, bf16 scale and bias for 64 columns (`AFFINE4`).
///
/// A panel is a header, for each group the four rows' scales and then their biases, padded to 128 bytes;
/// then one 128 byte chunk a group: row `r` 32 bytes at `32r`, byte `i` the nibbles of columns `64g + i`
/// (low) and `64g + 32 + i` (high).
#[derive(Clone, Copy, Debug)]
pub struct Affine4Rows<'a> {
    layout: Affine4Layout,
    panels: &'a [u8],
}

impl<'a> Affine4Rows<'a> {
    /// Rows over `panels`, an `AFFINE4` part or the contiguous bytes of a range of its panels.
    ///
    /// # Panics
    /// If a dimension is 0, `cols` is not a multiple of 64 or the length does not follow from `rows` and `cols`.
    pub fn new(panels: &'a [u8], rows: usize, cols: usize) -> Self {
        let layout = Affine4Layout::new(rows, cols).expect("whole groups of 64 columns that fit into memory");
        assert_eq!(panels.len(), layout.len(), "bytes of affine 4-bit panels for [{rows}, {cols}]");
        Self { layout, panels }
    }

    /// Number of rows, without padding.
    pub fn rows(&self) -> usize {
        self.layout.rows()
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.layout.cols()
    }

    /// Asks for the beginning of the panel that has `row`, which is read soon and not after its neighbour.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn prefetch(&self, row: usize) {
        ask(&self.panels[row / PANEL_ROWS * self.layout.panel_len()..]);
    }

    /// Panel `p`: for each group its scales and biases, bf16 `[4]` and `[4]`, and its chunk of nibbles.
    #[inline(always)]
    pub(crate) fn panel(&self, p: usize) -> (&'a [[u8; 16]], &'a [[u8; CHUNK]]) {
        let panel_len = self.layout.panel_len();
        let panel = &self.panels[p * panel_len..][..panel_len];
        let (header, chunks) = panel.split_at(self.layout.panel_header_len());
        (&header.as_chunks().0[..self.layout.n_groups()], chunks.as_chunks().0)
    }
}

/// bf16 rows in 4-row panels (`BF16_PANELS`): 128 byte chunks of 16 columns, row `r` at `32r`.
#[derive(Clone, Copy, Debug)]
pub struct Bf16Rows<'a> {
    layout: Bf16PanelLayout,
    panels: &'a [u8],
}

impl<'a> Bf16Rows<'a> {
    /// Rows over `panels`, a `BF16_PANELS` part or the contiguous bytes of a range of its panels.
    ///
    /// # Panics
    /// If a dimension is 0 or the length does not follow from `rows` and `cols`.
    pub fn new(panels: &'a [u8], rows: usize, cols: usize) -> Self {
        let layout = Bf16PanelLayout::new(rows, cols).expect("a matrix that fits into memory has a layout");
        assert_eq!(panels.len(), layout.len(), "bytes of bf16 panels for [{rows}, {cols}]");
        Self { layout, panels }
    }

    /// Number of rows, without padding.
    pub fn rows(&self) -> usize {
        self.layout.rows()
    }

    /// Number of columns, without padding.
    pub fn cols(&self) -> usize {
        self.layout.cols()
    }

    /// Chunks of panel `p`, u8 `[ceil(cols / 16)][128]`.
    #[inline(always)]
    pub(crate) fn panel(&self, p: usize) -> &'a [[u8; CHUNK]] {
        let n_chunks = self.layout.n_col_blocks();
        &self.panels.as_chunks().0[p * n_chunks..][..n_chunks]
    }
}

/// The panels of `row_range`.
///
/// # Panics
/// If the range leaves `rows` or cuts a panel.
pub(crate) fn panels_of(rows: usize, row_range: &Range<usize>) -> Range<usize> {
    let Range { start, end } = *row_range;
    assert!(start <= end && end <= rows, "rows {start}..{end} of {rows}");
    assert!(
        start.is_multiple_of(PANEL_ROWS) && (end.is_multiple_of(PANEL_ROWS) || end == rows),
        "rows {start}..{end} cut a panel of {PANEL_ROWS} rows"
    );
    start / PANEL_ROWS..end.div_ceil(PANEL_ROWS)
}

/// f32 value of a little-endian bf16.
#[inline(always)]
pub(crate) fn bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}
