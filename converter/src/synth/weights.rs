//! Weights from a seed, one row at a time, in any order and on any thread.
//!
//! A matrix has a key, drawn from ChaCha by the seed and the matrix's name; a row has a state mixed from key and row
//! number; element i comes from that state and i alone. Bulk bits are a counter passed through a 64-bit finaliser,
//! which is fast enough that writing 5 GB waits for the disk.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use xxhash_rust::xxh3::xxh3_64;

use crate::affine::{self, GROUP};

/// An odd number near 2^64 divided by the golden ratio: successive multiples are far apart.
const STRIDE: u64 = 0x9e37_79b9_7f4a_7c15;
/// One row in this many is all zeros.
const ZERO_ROW_EVERY: u64 = 512;
/// Share of weights that are not zero, see [`ternary_word`]: 2 (1/4 + 1/16).
const DENSITY: f32 = 0.625;
/// Standard deviation of the sum of four bytes: sqrt(4 (256^2 - 1) / 12).
const FOUR_BYTES_DEVIATION: f32 = 147.8;
/// Mean of the sum of four bytes.
const FOUR_BYTES_MEAN: f32 = 510.0;
/// Shares of its cluster's centre and of its own direction in a head row; squares sum to 1.
const CENTRE_SHARE: f32 = 0.6;
const OWN_SHARE: f32 = 0.8;
/// Length of rows of weak clusters.
const WEAK: f32 = 1.0 / 16.0;

/// Key of the matrix `name` under `seed`.
pub(super) fn key(seed: u64, name: &str) -> u64 {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(xxh3_64(name.as_bytes()));
    rng.next_u64()
}

/// Spreads every input bit over the output.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn row_state(key: u64, row: u64) -> u64 {
    mix(key ^ mix(row.wrapping_add(1).wrapping_mul(STRIDE)))
}

fn draw(state: u64, i: u64) -> u64 {
    mix(state.wrapping_add(i.wrapping_mul(STRIDE)))
}

/// Sixteen codes without a 3 from 64 random bits: a field that is 3 is drawn again, and if it is 3 again becomes 1.
fn ternary_word(random: u64) -> u32 {
    const LOW: u32 = 0x5555_5555;
    let (first, second) = (random as u32, (random >> 32) as u32);
    let threes = first & (first >> 1) & LOW;
    let again = threes | threes << 1;
    let word = (first & !again) | (second & again);
    let threes = word & (word >> 1) & LOW;
    word & !(threes << 1)
}

/// A ternary matrix.
#[derive(Debug, Clone)]
pub(super) struct Ternary {
    pub(super) key: u64,
    /// Inputs of a row; a multiple of 16.
    pub(super) cols: u64,
    /// Deviation of an output whose inputs have deviation 1.
    pub(super) gain: f32,
}

impl Ternary {
    fn is_zero_row(state: u64) -> bool {
        draw(state, u64::MAX).is_multiple_of(ZERO_ROW_EVERY)
    }

    /// The row's scale, bf16 bits; +0 for a zero row.
    pub(super) fn scale(&self, row: u64) -> u16 {
        let state = row_state(self.key, row);
        if Self::is_zero_row(state) {
            return 0;
        }
        let jitter = 0.75 + (draw(state, u64::MAX - 1) & 0xff) as f32 / 512.0;
        half::bf16::from_f32(jitter * self.gain / (self.cols as f32 * DENSITY).sqrt()).to_bits()
    }

    /// The row's codes as little-endian words, `[cols / 4]` bytes.
    pub(super) fn words(&self, row: u64, out: &mut [u8]) {
        let state = row_state(self.key, row);
        if Self::is_zero_row(state) {
            return out.fill(0x55);
        }
        for (i, word) in (0_u64..).zip(out.chunks_exact_mut(4)) {
            word.copy_from_slice(&ternary_word(draw(state, i)).to_le_bytes());
        }
    }

    /// The row's weights, bf16, little endian, `[2 cols]` bytes. Half of the zeros are negative.
    pub(super) fn bf16(&self, row: u64, out: &mut [u8]) {
        let state = row_state(self.key, row);
        let scale = self.scale(row);
        let zero_row = Self::is_zero_row(state);
        for (i, weights) in (0_u64..).zip(out.chunks_exact_mut(32)) {
            let random = draw(state, i);
            let word = if zero_row { 0x5555_5555 } else { ternary_word(random) };
            let signs = mix(random);
            for (j, weight) in weights.chunks_exact_mut(2).enumerate() {
                let zero = (signs >> j & 1) as u16 * 0x8000;
                let values = [scale | 0x8000, zero, scale];
                weight.copy_from_slice(&values[(word >> (2 * j) & 3) as usize].to_le_bytes());
            }
        }
    }
}

/// A dense matrix of bell-shaped bf16 values.
#[derive(Debug, Clone)]
pub(super) struct Dense {
    pub(super) key: u64,
    pub(super) mean: f32,
    pub(super) deviation: f32,
    /// For a head with FlashHead data.
    pub(super) clusters: Option<Clusters>,
}

/// The clusters that rows belong to.
#[derive(Debug, Clone)]
pub(super) struct Clusters {
    /// Cluster of each row.
    pub(super) cluster_of: std::sync::Arc<[u32]>,
    /// Key of the clusters' centres.
    pub(super) centre_key: u64,
    /// Rows of clusters from this one on are [`WEAK`] times as long.
    pub(super) n_strong: u32,
}

/// 64 bell-shaped values of deviation 1: each is the sum of four random bytes.
fn bell(state: u64, group: u64) -> [f32; GROUP] {
    let mut values = [0.0; GROUP];
    for (i, pair) in (0_u64..).zip(values.chunks_exact_mut(2)) {
        let random = draw(state, group * (GROUP as u64 / 2) + i);
        let pairs = (random & 0x00ff_00ff_00ff_00ff) + (random >> 8 & 0x00ff_00ff_00ff_00ff);
        let sums = (pairs & 0x0000_ffff_0000_ffff) + (pairs >> 16 & 0x0000_ffff_0000_ffff);
        pair[0] = (sums as u32 as f32 - FOUR_BYTES_MEAN) / FOUR_BYTES_DEVIATION;
        pair[1] = ((sums >> 32) as f32 - FOUR_BYTES_MEAN) / FOUR_BYTES_DEVIATION;
    }
    values
}

/// The nearest bf16 of a finite value, ties to even. Without the branches that a NaN needs, loops stay vectors.
fn round_to_bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

impl Dense {
    /// 64 values of a row, rounded to bf16.
    fn group(&self, row: u64, group: u64) -> [f32; GROUP] {
        let mut values = bell(row_state(self.key, row), group);
        if let Some(Clusters { cluster_of, centre_key, n_strong }) = &self.clusters {
            let cluster = cluster_of[row as usize];
            let centre = bell(row_state(*centre_key, u64::from(cluster)), group);
            let length = if cluster < *n_strong { 1.0 } else { WEAK };
            for (value, centre) in values.iter_mut().zip(centre) {
                *value = length * (CENTRE_SHARE * centre + OWN_SHARE * *value);
            }
        }
        values.map(|value| round_to_bf16(self.mean + self.deviation * value))
    }

    /// The row's values, bf16, little endian, `[2 cols]` bytes; cols may end inside a group.
    pub(super) fn bf16(&self, row: u64, out: &mut [u8]) {
        for (g, bytes) in (0_u64..).zip(out.chunks_mut(2 * GROUP)) {
            for (bytes, value) in bytes.chunks_exact_mut(2).zip(self.group(row, g)) {
                bytes.copy_from_slice(&((value.to_bits() >> 16) as u16).to_le_bytes());
            }
        }
    }

    /// The row quantised: `nibbles` gets `[cols]`, one a byte; returns one scale and bias a group.
    fn quantised(&self, row: u64, nibbles: &mut [u8]) -> Vec<(u16, u16)> {
        let groups = (0_u64..).zip(nibbles.chunks_exact_mut(GROUP));
        groups.map(|(g, nibbles)| affine::quantise_group(&self.group(row, g), nibbles)).collect()
    }

    /// One part of the quantised row as the 4-bit layout stores it.
    pub(super) fn affine(&self, row: u64, part: AffinePart, out: &mut [u8]) {
        match part {
            AffinePart::Words => {
                let mut nibbles = vec![0; 2 * out.len()];
                self.quantised(row, &mut nibbles);
                pack_nibbles(&nibbles, out);
            }
            AffinePart::Scales | AffinePart::Biases => {
                for (g, out) in (0_u64..).zip(out.chunks_exact_mut(2)) {
                    let (scale, bias) = affine::group_ends(&self.group(row, g)).stored();
                    let value = if part == AffinePart::Scales { scale } else { bias };
                    out.copy_from_slice(&value.to_le_bytes());
                }
            }
        }
    }

    /// The row after quantisation, `[cols]`, f32.
    pub(super) fn dequantised(&self, row: u64, out: &mut [f32]) {
        let mut nibbles = vec![0; out.len()];
        let groups = self.quantised(row, &mut nibbles);
        for ((out, nibbles), (scale, bias)) in
            out.chunks_exact_mut(GROUP).zip(nibbles.chunks_exact(GROUP)).zip(groups)
        {
            let (scale, bias) = (half::bf16::from_bits(scale).to_f32(), half::bf16::from_bits(bias).to_f32());
            for (out, nibble) in out.iter_mut().zip(nibbles) {
                *out = f32::from(*nibble) * scale + bias;
            }
        }
    }
}

/// Which tensor of a 4-bit matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AffinePart {
    Words,
    Scales,
    Biases,
}

/// Two nibbles a byte, the earlier one in the low bits.
pub(super) fn pack_nibbles(nibbles: &[u8], out: &mut [u8]) {
    for (byte, pair) in out.iter_mut().zip(nibbles.chunks_exact(2)) {
        *byte = pair[0] | pair[1] << 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_ternary_with_the_density_that_scales_assume() {
        let matrix = Ternary { key: key(1, "m"), cols: 4096, gain: 1.0 };
        let mut counts = [0_u32; 4];
        let mut zero_rows = 0;
        for row in 0..2000 {
            let mut words = vec![0; 1024];
            matrix.words(row, &mut words);
            assert_eq!(matrix.scale(row) == 0, words.iter().all(|&byte| byte == 0x55), "row {row}");
            zero_rows += u32::from(matrix.scale(row) == 0);
            if matrix.scale(row) != 0 {
                words
                    .iter()
                    .flat_map(|byte| [0, 2, 4, 6].map(|s| byte >> s & 3))
                    .for_each(|c| counts[usize::from(c)] += 1);
            }
        }
        let total = f64::from(counts.iter().sum::<u32>());
        let share = |i: usize| f64::from(counts[i]) / total;
        assert_eq!(counts[3], 0);
        assert!((share(1) - 0.375).abs() < 0.002, "{counts:?}");
        assert!((share(0) - share(2)).abs() < 0.002, "{counts:?}");
        assert!((1..20).contains(&zero_rows), "{zero_rows}");
    }

    #[test]
    fn rounding_is_that_of_bf16() {
        let value = |i: u32| f32::from_bits(i.wrapping_mul(0x0001_2345) & 0xbf7f_ffff);
        for value in (0..200_000).map(value).chain([
            0.0,
            -0.0,
            1.0,
            f32::from_bits(0x3f80_8000),
            f32::from_bits(0x3f81_8000),
        ]) {
            assert_eq!(
                round_to_bf16(value).to_bits(),
                half::bf16::from_f32(value).to_f32().to_bits(),
                "{value:e}"
            );
        }
    }

    #[test]
    fn dense_values_have_the_mean_and_deviation_asked_for() {
        let matrix = Dense { key: key(1, "m"), mean: 1.0, deviation: 0.5, clusters: None };
        let values: Vec<f64> = (0..500).flat_map(|row| matrix.group(row, 3)).map(f64::from).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let deviation = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt();
        assert!((mean - 1.0).abs() < 0.02 && (deviation - 0.5).abs() < 0.02, "{mean} {deviation}");
    }
}
