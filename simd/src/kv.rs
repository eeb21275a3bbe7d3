//! Keys and values of one kv head, as the attention kernels read them.

use crate::arch::generic::quantize::{ROUND, scale_of};

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

/// Dimensions of 8-bit keys and values come in such groups, the last one filled up.
pub const Q8_DIMS: usize = 16;

/// Most dimensions of a head with 8-bit keys and values.
pub const Q8_MAX_DIM: usize = 256;

/// Dimensions of a head as 8-bit keys and values have them.
pub fn q8_dims(head_dim: usize) -> usize {
    head_dim.next_multiple_of(Q8_DIMS)
}

/// Where dimension `d` of position `position`'s 8-bit key is among the bytes of a part, `[n_blocks, dims / 4, 16, 4]`.
pub fn q8_key_at(position: usize, d: usize, head_dim: usize) -> usize {
    let block = position / KV_BLOCK * KV_BLOCK * q8_dims(head_dim);
    block + (d / 4 * KV_BLOCK + position % KV_BLOCK) * 4 + d % 4
}

/// Where dimension `d` of position `position`'s 8-bit value is among the bytes of a part, `[dims / 16, KV_PART / 4, 16, 4]`.
pub fn q8_value_at(position: usize, d: usize) -> usize {
    (d / Q8_DIMS * (KV_PART / 4) + position / 4) * 4 * Q8_DIMS + d % Q8_DIMS * 4 + position % 4
}

/// Puts a head's key, f32 `[head_dim]`, at position `position` of a part's 8-bit keys, and returns its scale: the largest magnitude to
/// 127. A head below 2^-100 is zeros; one that holds NaN or infinity has the scale NaN, which every score then shows.
///
/// # Panics
/// If `part` does not hold the position.
pub fn put_q8_key(key: &[f32], position: usize, part: &mut [u8]) -> f32 {
    let (scale, inverse) = scale_of(key, 127.0);
    for (i, four) in key.chunks(4).enumerate() {
        let at = q8_key_at(position, 4 * i, key.len());
        for (to, x) in part[at..].iter_mut().zip(four) {
            *to = q8(x * inverse);
        }
    }
    scale
}

/// The same with a value.
///
/// # Panics
/// If `part` does not hold the position.
pub fn put_q8_value(value: &[f32], position: usize, part: &mut [u8]) -> f32 {
    let (scale, inverse) = scale_of(value, 127.0);
    for (i, group) in value.chunks(Q8_DIMS).enumerate() {
        let at = q8_value_at(position, Q8_DIMS * i);
        for (to, x) in part[at..].iter_mut().step_by(4).zip(group) {
            *to = q8(x * inverse);
        }
    }
    scale
}

/// Nearest of -127..=127, half to even, plus 128.
fn q8(x: f32) -> u8 {
    (x + ROUND).to_bits() as u8 ^ 128
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
    /// int8, from -127 on, plus 128, with an f32 scale for each position. Of at most [`Q8_MAX_DIM`] dimensions.
    Q8 {
        /// Keys, where [`q8_key_at`] says.
        keys: &'a [u8],
        /// Scales of the keys, `[n_blocks * 16]`.
        key_scales: &'a [f32],
        /// Values, where [`q8_value_at`] says: always the whole part.
        values: &'a [u8],
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
        let (keys, values) = match kv {
            Kv::F32 { keys, values } => (keys.len(), values.len()),
            Kv::Bf16 { keys, values } => (keys.len(), values.len()),
            Kv::Q8 { keys, key_scales, values, value_scales } => {
                assert!(head_dim <= Q8_MAX_DIM, "{head_dim} dimensions of 8 bits");
                let scales = (key_scales.len(), value_scales.len());
                assert!(scales.0 >= positions && scales.1 >= positions, "scales for {n_keys} keys");
                let dims = q8_dims(head_dim);
                assert_eq!(values.len(), KV_PART * dims, "a part's values of {head_dim} dimensions");
                assert!(
                    keys.len() >= positions * dims,
                    "{} bytes for {n_keys} keys of {head_dim}",
                    keys.len()
                );
                return;
            }
        };
        assert!(
            keys >= positions * head_dim && values >= positions * head_dim,
            "{keys} and {values} elements for {n_keys} keys of {head_dim}"
        );
    }
}

/// The least magnitude of a bf16 element that is not zero, 2^-64. With smaller ones the last bits of attention may depend on the
/// instruction set.
pub const KV_LEAST: f32 = f32::from_bits((127 - 64) << 23);

/// f32 elements of the running softmax of `n_queries` query heads.
pub fn attention_state_len(n_queries: usize, head_dim: usize) -> usize {
    n_queries * (head_dim + 2)
}
