//! Keys and values of one kv head, as the attention kernels read them.

/// Keys whose dimensions are interleaved: a block of keys is `[head_dim, 16]`, so that a vector holds the same
/// dimension of 16 positions and a score needs no sum across lanes.
pub const KV_BLOCK: usize = 16;

/// Dimensions of values that are added up together: a block of values is `[ceil(head_dim / 32), 16, 32]`, the last of
/// the three shorter where dimensions run out. So values are read in the order in which they are stored.
pub const KV_DIMS: usize = 32;

/// Where dimension `d` of position `position`'s value is among the elements of a part, in a head of `head_dim`.
pub fn value_at(position: usize, d: usize, head_dim: usize) -> usize {
    let columns = d / KV_DIMS * KV_DIMS;
    let width = KV_DIMS.min(head_dim - columns);
    (position / KV_BLOCK * head_dim + columns) * KV_BLOCK + position % KV_BLOCK * width + d - columns
}

/// Positions that are looked at together; a part starts at a multiple of this.
pub const KV_PART: usize = 256;

/// Positions of one part, the first a multiple of [`KV_PART`].
#[derive(Clone, Copy, Debug)]
pub struct KvSlice<'a> {
    /// The elements.
    pub kv: Kv<'a>,
    /// Positions that hold keys.
    pub n_keys: usize,
    /// Dimensions of a head.
    pub head_dim: usize,
}

/// Elements of keys, `[n_blocks, head_dim, 16]`, and values, blocks as [`KV_DIMS`] says.
#[derive(Clone, Copy, Debug)]
pub enum Kv<'a> {
    /// As computed.
    F32 {
        /// Keys.
        keys: &'a [f32],
        /// Values.
        values: &'a [f32],
    },
    /// Upper halves of f32, rounded; [`KV_LEAST`] and more, or zero.
    Bf16 {
        /// Keys.
        keys: &'a [u16],
        /// Values.
        values: &'a [u16],
    },
    /// int8 with an f32 scale for each position.
    Q8 {
        /// Keys.
        keys: &'a [i8],
        /// Scales of the keys, `[n_blocks * 16]`.
        key_scales: &'a [f32],
        /// Values.
        values: &'a [i8],
        /// Scales of the values, `[n_blocks * 16]`.
        value_scales: &'a [f32],
    },
}

impl KvSlice<'_> {
    /// Whether every length fits whole blocks that hold `n_keys`.
    pub(crate) fn check(&self) {
        let KvSlice { kv, n_keys, head_dim } = *self;
        assert!(head_dim > 0 && n_keys <= KV_PART, "{n_keys} keys of {head_dim} dimensions in a part");
        let positions = n_keys.next_multiple_of(KV_BLOCK);
        let (keys, values, scales) = match kv {
            Kv::F32 { keys, values } => (keys.len(), values.len(), None),
            Kv::Bf16 { keys, values } => (keys.len(), values.len(), None),
            Kv::Q8 { keys, key_scales, values, value_scales } => {
                (keys.len(), values.len(), Some((key_scales.len(), value_scales.len())))
            }
        };
        assert!(
            keys >= positions * head_dim && values >= positions * head_dim,
            "{keys} and {values} elements for {n_keys} keys of {head_dim}"
        );
        assert!(scales.is_none_or(|(k, v)| k >= positions && v >= positions), "scales for {n_keys} keys");
    }
}

/// The least magnitude of a bf16 element that is not zero, 2^-64. With smaller ones the last bits of attention may depend on the
/// instruction set.
pub const KV_LEAST: f32 = f32::from_bits((127 - 64) << 23);

/// f32 elements of the running softmax of `n_queries` query heads.
pub fn attention_state_len(n_queries: usize, head_dim: usize) -> usize {
    n_queries * (head_dim + 2)
}
