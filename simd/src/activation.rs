//! int8 activations, laid out so that one scale belongs to one integer lane.

use std::ops::Range;

/// Columns of a block: what a ternary chunk of 32 bytes covers, and the unit activations are padded to.
pub const ACT_BLOCK: usize = 128;

/// Columns of a span: consecutive blocks that share their scales, one for each lane. The last span of a row
/// may be shorter.
pub const ACT_SPAN: usize = 256;

/// Columns covered by one offset: half a block, one group of an affine 4-bit row.
pub const ACT_HALF: usize = ACT_BLOCK / 2;

/// i32 and f32 lanes of a block. In each block, lane `l` owns columns `32j + 4l + t`, `j, t` in 0..4.
pub(crate) const LANES: usize = 8;

/// Blocks of a whole span.
pub(crate) const SPAN_BLOCKS: usize = ACT_SPAN / ACT_BLOCK;

/// `cols` rounded up to whole blocks of [`ACT_BLOCK`].
pub fn padded_cols(cols: usize) -> usize {
    cols.next_multiple_of(ACT_BLOCK)
}

/// Scales of a row: eight for each span.
pub fn scales_len(cols: usize) -> usize {
    LANES * cols.div_ceil(ACT_SPAN)
}

/// Offsets of a row: one for each [`ACT_HALF`] columns of whole blocks, and their sum.
pub fn offsets_len(cols: usize) -> usize {
    padded_cols(cols) / ACT_HALF + 1
}

/// One token's activations, quantised: a view of buffers the caller owns.
///
/// Value of column `c` is `q[c] * scales[8 * (c / 256) + c % 32 / 4]`. Padding columns hold 0.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedRow<'a> {
    q: &'a [i8],
    scales: &'a [f32],
    offsets: &'a [f32],
}

impl<'a> QuantizedRow<'a> {
    /// Views buffers that [`Kernels::quantize`](crate::Kernels::quantize) has filled.
    ///
    /// * `q`: i8 `[padded_cols]`
    /// * `scales`: f32 `[scales_len]`, eight for each 256 columns, by lane
    /// * `offsets`: f32 `[offsets_len]`, for each 64 columns the sum of scale * q, then the sum of those
    ///
    /// # Panics
    /// If `q` is not whole blocks of 128 or the other lengths do not follow from it.
    pub fn new(q: &'a [i8], scales: &'a [f32], offsets: &'a [f32]) -> Self {
        assert!(q.len().is_multiple_of(ACT_BLOCK), "{} activations are not whole blocks of 128", q.len());
        assert_eq!(scales.len(), scales_len(q.len()), "scales of {} activations", q.len());
        assert_eq!(offsets.len(), offsets_len(q.len()), "offsets of {} activations", q.len());
        Self { q, scales, offsets }
    }

    /// int8 values, `[padded_cols]`.
    pub fn q(&self) -> &'a [i8] {
        self.q
    }

    /// f32 scales, `[scales_len]`.
    pub fn scales(&self) -> &'a [f32] {
        self.scales
    }

    /// f32 sums of scale * q, `[padded_cols / 64]`.
    pub fn offsets(&self) -> &'a [f32] {
        &self.offsets[..self.offsets.len() - 1]
    }

    /// The sum of all offsets, ascending: what a ternary row with every code 1 would give.
    pub fn correction(&self) -> f32 {
        self.offsets[self.offsets.len() - 1]
    }

    /// The length of the vector, in f64.
    pub fn norm(&self) -> f64 {
        let spans = self.q.chunks(ACT_SPAN).zip(self.span_scales());
        let squares = spans.flat_map(|(q, scales)| {
            q.chunks_exact(4).enumerate().map(|(word, q)| {
                let square: i32 = q.iter().map(|&q| i32::from(q) * i32::from(q)).sum();
                f64::from(scales[word % LANES]).powi(2) * f64::from(square)
            })
        });
        squares.sum::<f64>().sqrt()
    }

    /// The values by block, i8 `[n_blocks][128]`.
    #[inline(always)]
    pub(crate) fn q_blocks(&self) -> &'a [[i8; ACT_BLOCK]] {
        self.q.as_chunks().0
    }

    /// The scales by span, f32 `[n_spans][8]`.
    #[inline(always)]
    pub(crate) fn span_scales(&self) -> &'a [[f32; LANES]] {
        self.scales.as_chunks().0
    }
}

/// Quantised activations of several tokens, rows of equal width: a view of buffers the caller owns.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedRows<'a> {
    q: &'a [i8],
    scales: &'a [f32],
    offsets: &'a [f32],
    n_rows: usize,
    padded: usize,
}

impl<'a> QuantizedRows<'a> {
    /// Views `n_rows` rows of `cols` columns, each as in [`QuantizedRow::new`], one after the other.
    ///
    /// # Panics
    /// If a length does not follow from `n_rows` and `cols`.
    pub fn new(q: &'a [i8], scales: &'a [f32], offsets: &'a [f32], n_rows: usize, cols: usize) -> Self {
        let padded = padded_cols(cols);
        assert_eq!(q.len(), n_rows * padded, "{n_rows} rows of {padded} activations");
        assert_eq!(scales.len(), n_rows * scales_len(cols), "scales of {n_rows} rows of {cols}");
        assert_eq!(offsets.len(), n_rows * offsets_len(cols), "offsets of {n_rows} rows of {cols}");
        Self { q, scales, offsets, n_rows, padded }
    }

    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Number of columns, padded to 128.
    pub fn padded_cols(&self) -> usize {
        self.padded
    }

    /// Row `i`.
    ///
    /// # Panics
    /// If there is no such row.
    #[inline(always)]
    pub fn row(&self, i: usize) -> QuantizedRow<'a> {
        let of = |len: usize| Range { start: i * len, end: (i + 1) * len };
        QuantizedRow {
            q: &self.q[of(self.padded)],
            scales: &self.scales[of(scales_len(self.padded))],
            offsets: &self.offsets[of(offsets_len(self.padded))],
        }
    }
}
