//! int8 activations of one token, laid out so that one scale belongs to one integer lane.

/// Columns of a block: what a ternary chunk of 32 bytes covers, and the unit activations are padded to.
pub const ACT_BLOCK: usize = 128;

/// Inputs that share one f32 scale. In each block, lane `l` owns columns `32j + 4l + t`, `j, t` in 0..4.
pub const ACT_GROUP: usize = 16;

/// Columns covered by one offset: half a block, one group of an affine 4-bit row.
pub const ACT_HALF: usize = ACT_BLOCK / 2;

/// i32 and f32 lanes of a block.
pub(crate) const LANES: usize = ACT_BLOCK / ACT_GROUP;

/// `cols` rounded up to whole blocks of [`ACT_BLOCK`].
pub fn padded_cols(cols: usize) -> usize {
    cols.next_multiple_of(ACT_BLOCK)
}

/// One token's activations, quantised: a view of buffers the caller owns.
///
/// Value of column `c` is `q[c] * scales[8 * (c / 128) + c % 32 / 4]`. Padding columns hold 0.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedRow<'a> {
    q: &'a [i8],
    scales: &'a [f32],
    offsets: &'a [f32],
    correction: f32,
}

impl<'a> QuantizedRow<'a> {
    /// Views buffers that [`Kernels::quantize`](crate::Kernels::quantize) has filled.
    ///
    /// * `q`: i8 `[padded_cols]`
    /// * `scales`: f32 `[padded_cols / 16]`, eight a block, by lane
    /// * `offsets`: f32 `[padded_cols / 64]`, for each 64 columns the sum of scale * q
    ///
    /// # Panics
    /// If `q` is not whole blocks of 128 or the other lengths do not follow from it.
    pub fn new(q: &'a [i8], scales: &'a [f32], offsets: &'a [f32]) -> Self {
        assert!(q.len().is_multiple_of(ACT_BLOCK), "{} activations are not whole blocks of 128", q.len());
        assert_eq!(scales.len(), q.len() / ACT_GROUP, "one scale for 16 activations");
        assert_eq!(offsets.len(), q.len() / ACT_HALF, "one offset for 64 activations");
        let correction = offsets.iter().fold(0.0, |sum, offset| sum + offset); // ascending
        Self { q, scales, offsets, correction }
    }

    /// int8 values, `[padded_cols]`.
    pub fn q(&self) -> &'a [i8] {
        self.q
    }

    /// f32 scales, `[padded_cols / 16]`.
    pub fn scales(&self) -> &'a [f32] {
        self.scales
    }

    /// f32 sums of scale * q, `[padded_cols / 64]`.
    pub fn offsets(&self) -> &'a [f32] {
        self.offsets
    }

    /// The sum of all offsets, groups ascending: what a ternary row with every code 1 would give.
    pub fn correction(&self) -> f32 {
        self.correction
    }

    /// The values by block, i8 `[n_blocks][128]`.
    #[inline(always)]
    pub(crate) fn q_blocks(&self) -> &'a [[i8; ACT_BLOCK]] {
        self.q.as_chunks().0
    }

    /// The scales by block, f32 `[n_blocks][8]`.
    #[inline(always)]
    pub(crate) fn scale_blocks(&self) -> &'a [[f32; LANES]] {
        self.scales.as_chunks().0
    }
}
