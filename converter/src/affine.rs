//! 4-bit affine rows: weight = nibble * scale + bias, one bf16 scale and bias for each 64 inputs.
//!
//! Rows that are 4-bit already keep every bit; only their place in the file changes. bf16 rows are quantised in the
//! form the 2-bit release uses, so that both source layouts of one model give the same bytes: the end of a group's
//! range that lies farther from zero is met exactly and becomes the bias, the scale's sign points from there to the
//! other end, and the step is widened or narrowed a little so that zero falls on a whole step. Steps are counted
//! with the f32 scale, before it is rounded to bf16; ties go to the even step.

use crate::error::Error;
use crate::ternary::{bf16_bits, to_f32};

/// Inputs that share a scale and a bias.
pub(crate) const GROUP: usize = 64;
/// Steps between the ends of a group.
const STEPS: f32 = 15.0;
/// 2^23.
const ROUNDER: f32 = 8_388_608.0;
/// Smallest step, so that a group of equal values does not divide by zero.
const MIN_SCALE: f32 = 1e-7;

/// Scale and bias of one group, before they are rounded to bf16.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupEnds {
    scale: f32,
    bias: f32,
}

impl GroupEnds {
    /// Scale and bias as stored, bf16 bits.
    pub(crate) fn stored(self) -> (u16, u16) {
        (half::bf16::from_f32(self.scale).to_bits(), half::bf16::from_f32(self.bias).to_bits())
    }
}

/// Finds scale and bias of one group of finite values.
pub(crate) fn group_ends(values: &[f32; GROUP]) -> GroupEnds {
    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let step = ((high - low) / STEPS).max(MIN_SCALE);
    let (edge, step) = if low.abs() > high.abs() { (low, step) } else { (high, -step) };
    let steps_to_zero = (edge / step).round_ties_even();
    if steps_to_zero == 0.0 {
        GroupEnds { scale: step, bias: 0.0 }
    } else {
        GroupEnds { scale: edge / steps_to_zero, bias: edge }
    }
}

/// Quantises one group of finite values. Returns scale and bias as bf16 bits; `nibbles` is overwritten.
pub(crate) fn quantise_group(values: &[f32; GROUP], nibbles: &mut [u8]) -> (u16, u16) {
    let ends = group_ends(values);
    for (nibble, value) in nibbles.iter_mut().zip(values) {
        let steps = ((value - ends.bias) / ends.scale).clamp(0.0, STEPS);
        // From 2^23 on a float's last bit counts ones, so the sum rounds ties to even and ends in the nibble.
        *nibble = ((steps + ROUNDER).to_bits() & 15) as u8;
    }
    ends.stored()
}

/// Quantises one bf16 row.
///
/// `weights`: `[cols]`, bf16, little endian, cols a multiple of 64. `nibbles`: `[cols]`, one a byte. `scales`,
/// `biases`: `[cols / 64]`, bf16 bits. All three are overwritten.
pub(crate) fn bf16_row(
    tensor: &str,
    row: usize,
    weights: &[u8],
    nibbles: &mut [u8],
    scales: &mut [u16],
    biases: &mut [u16],
) -> Result<(), Error> {
    for (g, (group, out)) in weights.chunks_exact(2 * GROUP).zip(nibbles.chunks_exact_mut(GROUP)).enumerate()
    {
        let mut values = [0.0; GROUP];
        for (value, bits) in values.iter_mut().zip(bf16_bits(group)) {
            *value = to_f32(bits);
        }
        if let Some(j) = values.iter().position(|value| !value.is_finite()) {
            let (column, value) = (g * GROUP + j, values[j]);
            return Err(Error::NotFinite { tensor: tensor.to_owned(), row, column, value });
        }
        (scales[g], biases[g]) = quantise_group(&values, out);
        let value = to_f32(scales[g]);
        if !value.is_finite() {
            return Err(Error::NotFinite { tensor: tensor.to_owned(), row, column: g * GROUP, value });
        }
    }
    Ok(())
}

/// The weights of a row. They are exact unless a group's scale and bias are very far apart.
///
/// `nibbles`: `[cols]`, one a byte. `scales`, `biases`: `[cols / 64]`, bf16 bits. `out`: `[cols]`, overwritten.
pub(crate) fn dequantise(nibbles: &[u8], scales: &[u16], biases: &[u16], out: &mut [f64]) {
    let groups = nibbles.chunks_exact(GROUP).zip(scales.iter().zip(biases));
    for (out, (nibbles, (&scale, &bias))) in out.chunks_exact_mut(GROUP).zip(groups) {
        let (scale, bias) = (f64::from(to_f32(scale)), f64::from(to_f32(bias)));
        for (out, nibble) in out.iter_mut().zip(nibbles) {
            *out = f64::from(*nibble) * scale + bias;
        }
    }
}

/// Unpacks one row of nibbles, 8 to a little-endian u32, element j at bits 4j to 4j + 3.
///
/// `words`: `[cols / 2]` bytes. `nibbles`: `[cols]`, one a byte, overwritten.
pub(crate) fn words_row(words: &[u8], nibbles: &mut [u8]) {
    for (pair, byte) in nibbles.chunks_exact_mut(2).zip(words) {
        pair.copy_from_slice(&[byte & 15, byte >> 4]);
    }
}

/// Copies bf16 scales or biases of one row to bits, refusing what is not finite. `column` counts groups.
pub(crate) fn group_values(tensor: &str, row: usize, bytes: &[u8], out: &mut [u16]) -> Result<(), Error> {
    for (column, (out, bits)) in out.iter_mut().zip(bf16_bits(bytes)).enumerate() {
        let value = to_f32(bits);
        if !value.is_finite() {
            return Err(Error::NotFinite { tensor: tensor.to_owned(), row, column, value });
        }
        *out = bits;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_meet_their_far_end_and_zero() {
        let check = |low: f32, high: f32, scale: f32, bias: f32| {
            let mut values = [0.0; GROUP];
            (values[0], values[63]) = (low, high);
            let mut nibbles = [99; GROUP];
            let (s, b) = quantise_group(&values, &mut nibbles);
            assert_eq!((to_f32(s), to_f32(b)), (scale, bias), "{low} {high}");
            assert_eq!(f32::from(nibbles[1]) * scale + bias, 0.0, "{low} {high}: zero is a step");
        };
        check(-8.0, 7.0, 1.0, -8.0);
        check(-7.0, 8.0, -1.0, 8.0);
        check(0.0, 15.0, -1.0, 15.0);
        check(-15.0, 0.0, 1.0, -15.0);
    }

    #[test]
    fn a_group_of_equal_values_survives() {
        let check = |value: f32| {
            let mut nibbles = [99; GROUP];
            let (s, b) = quantise_group(&[value; GROUP], &mut nibbles);
            let back = f32::from(nibbles[0]) * to_f32(s) + to_f32(b);
            assert!((back - value).abs() <= 1e-6 * value.abs().max(1.0), "{value} came back as {back}");
        };
        check(0.0);
        check(1.0);
        check(-1.0);
        check(1e-7);
    }

    #[test]
    fn values_that_are_not_finite_are_named() {
        let mut weights: Vec<u8> = [0x3f00_u16; 128].iter().flat_map(|bits| bits.to_le_bytes()).collect();
        weights[2 * 70..2 * 71].copy_from_slice(&0x7f80_u16.to_le_bytes());
        let error = bf16_row("t", 3, &weights, &mut [0; 128], &mut [0; 2], &mut [0; 2]);
        assert!(matches!(error, Err(Error::NotFinite { row: 3, column: 70, .. })), "{error:?}");
        let error = group_values("t", 3, &[0, 0, 0xc0, 0x7f], &mut [0; 2]);
        assert!(matches!(error, Err(Error::NotFinite { row: 3, column: 1, .. })), "{error:?}");
    }

    #[test]
    fn nibbles_come_out_in_order() {
        let mut nibbles = [0; 8];
        words_row(&0x8765_4321_u32.to_le_bytes(), &mut nibbles);
        assert_eq!(nibbles, [1, 2, 3, 4, 5, 6, 7, 8]);
    }
}
