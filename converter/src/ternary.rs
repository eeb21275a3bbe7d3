//! Rows of ternary weights: from each source form to one code a byte and one bf16 scale.
//!
//! Code = sign + 1. The canonical form, the same from every layout: the scale is positive and finite, and a row
//! whose weights are all zero has codes 1 and the scale +0, whatever scale its source stores. Both zeros of bf16 are
//! the weight zero. Every row is proven to be ternary before its codes are used: nothing is rounded unless
//! `ternarize` was asked for, and then only rows that are not ternary already.

use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Magnitude bits of a bf16.
const MAGNITUDE: u16 = 0x7fff;
/// Bits of the smallest bf16 magnitude that is not finite.
const INFINITE: u16 = 0x7f80;
/// The bf16 -0.0.
const NEGATIVE_ZERO: u16 = 0x8000;
/// The code of the weight zero.
const ZERO: u8 = 1;
/// Share of a row's mean magnitude that a weight must exceed to be kept by the 0.7-mean rule.
const THRESHOLD: f64 = 0.7;
/// A weight is near the threshold when one bf16 step, 2^-8 of its size, could move it across.
const NEAR: f64 = 1.0 / 256.0;

/// What was seen while rows were converted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Ternary rows converted.
    pub rows: u64,
    /// Rows without a weight other than zero.
    pub zero_rows: u64,
    /// Weights of -0.0, stored as zero.
    pub negative_zeros: u64,
    /// Rows that were not ternary and were rounded by the 0.7-mean rule.
    pub ternarized_rows: u64,
    /// Weights of rounded rows within one bf16 step of the threshold.
    pub near_threshold: u64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        let Self { rows, zero_rows, negative_zeros, ternarized_rows, near_threshold } = other;
        self.rows += rows;
        self.zero_rows += zero_rows;
        self.negative_zeros += negative_zeros;
        self.ternarized_rows += ternarized_rows;
        self.near_threshold += near_threshold;
    }
}

/// A row's place, for messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct At<'a> {
    pub(crate) tensor: &'a str,
    pub(crate) row: usize,
}

impl At<'_> {
    fn not_finite(self, column: usize, bits: u16) -> Error {
        Error::NotFinite { tensor: self.tensor.to_owned(), row: self.row, column, value: to_f32(bits) }
    }
}

pub(crate) fn to_f32(bits: u16) -> f32 {
    half::bf16::from_bits(bits).to_f32()
}

/// The bf16 values of little-endian `bytes`, as bits.
pub(crate) fn bf16_bits(bytes: &[u8]) -> impl Iterator<Item = u16> + '_ {
    bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
}

/// Converts one row of bf16 weights.
///
/// `weights`: `[cols]`, bf16, little endian. `codes`: `[cols]`, one a byte, overwritten. Returns the scale's bits.
pub(crate) fn bf16_row(
    at: At<'_>,
    weights: &[u8],
    ternarize: bool,
    codes: &mut [u8],
    counts: &mut Counts,
) -> Result<u16, Error> {
    debug_assert_eq!(weights.len(), 2 * codes.len());
    let scale = bf16_bits(weights).map(|bits| bits & MAGNITUDE).find(|&bits| bits != 0).unwrap_or(0);
    let mut strangers = false;
    let mut negative_zeros = 0_u32;
    for (code, bits) in codes.iter_mut().zip(bf16_bits(weights)) {
        let magnitude = bits & MAGNITUDE;
        let kept = u16::from(magnitude != 0);
        strangers |= kept != 0 && magnitude != scale;
        negative_zeros += u32::from(bits == NEGATIVE_ZERO);
        *code = (1 + kept - 2 * (kept & (bits >> 15))) as u8;
    }
    counts.rows += 1;
    counts.negative_zeros += u64::from(negative_zeros);
    if !strangers && scale < INFINITE {
        counts.zero_rows += u64::from(scale == 0);
        return Ok(scale);
    }
    if let Some((column, bits)) =
        bf16_bits(weights).enumerate().find(|(_, bits)| bits & MAGNITUDE >= INFINITE)
    {
        return Err(at.not_finite(column, bits));
    }
    if !ternarize {
        return Err(stranger(at, weights));
    }
    counts.ternarized_rows += 1;
    Ok(ternarize_row(weights, codes, counts))
}

/// Names the first weight whose magnitude is not the row's usual one.
fn stranger(at: At<'_>, weights: &[u8]) -> Error {
    let magnitudes = || bf16_bits(weights).map(|bits| bits & MAGNITUDE).filter(|&bits| bits != 0);
    // Majority vote: one changed weight must be named even if it stands before all others.
    let (mut usual, mut votes) = (0_u16, 0_usize);
    for bits in magnitudes() {
        match votes {
            0 => (usual, votes) = (bits, 1),
            _ if bits == usual => votes += 1,
            _ => votes -= 1,
        }
    }
    let strange = |bits: u16| bits & MAGNITUDE != 0 && bits & MAGNITUDE != usual;
    let found = bf16_bits(weights).enumerate().find(|&(_, bits)| strange(bits));
    let (column, bits) = found.expect("the row was seen to hold two magnitudes");
    let (value, scale) = (to_f32(bits), to_f32(usual));
    Error::NotTernary { tensor: at.tensor.to_owned(), row: at.row, column, value, scale }
}

/// The 0.7-mean rule: weights above 0.7 of the mean magnitude are kept and share the mean of their magnitudes.
///
/// `weights`: `[cols]`, bf16, finite. Sums are f64, columns ascending; the scale is rounded once, to bf16.
pub(crate) fn ternarize_row(weights: &[u8], codes: &mut [u8], counts: &mut Counts) -> u16 {
    let magnitude = |bits: u16| f64::from(to_f32(bits & MAGNITUDE));
    let sum: f64 = bf16_bits(weights).map(magnitude).sum();
    let threshold = THRESHOLD * sum / codes.len().max(1) as f64;
    let (mut kept, mut n_kept) = (0.0_f64, 0_u64);
    for (code, bits) in codes.iter_mut().zip(bf16_bits(weights)) {
        let size = magnitude(bits);
        counts.near_threshold += u64::from((size - threshold).abs() <= threshold * NEAR && size != 0.0);
        *code = ZERO;
        if size > threshold {
            *code = if bits & NEGATIVE_ZERO == 0 { 2 } else { 0 };
            kept += size;
            n_kept += 1;
        }
    }
    if n_kept == 0 {
        counts.zero_rows += 1;
        return 0;
    }
    half::bf16::from_f64(kept / n_kept as f64).to_bits()
}

/// Unpacks one row of 2-bit codes, 16 to a little-endian u32, element j at bits 2j and 2j + 1.
///
/// `words`: `[cols / 4]` bytes. `codes`: `[cols]`, one a byte, overwritten. `scale`: the row's scale, bf16 bits.
/// Returns the canonical scale.
pub(crate) fn words_row(
    at: At<'_>,
    words: &[u8],
    scale: u16,
    codes: &mut [u8],
    counts: &mut Counts,
) -> Result<u16, Error> {
    debug_assert_eq!(4 * words.len(), codes.len());
    // Little-endian words make element j of the row lie in byte j / 4 at bits 2 (j % 4).
    let (mut threes, mut others) = (0_u8, 0_u8);
    for (four, byte) in codes.chunks_exact_mut(4).zip(words) {
        threes |= byte & (byte >> 1) & 0x55;
        others |= byte ^ 0x55;
        let b = u32::from(*byte);
        four.copy_from_slice(&((b | b << 6 | b << 12 | b << 18) & 0x0303_0303).to_le_bytes());
    }
    if threes != 0 {
        let column = codes.iter().position(|&code| code == 3).expect("a code 3 was seen");
        return Err(Error::CodeThree { tensor: at.tensor.to_owned(), row: at.row, column });
    }
    if scale & MAGNITUDE >= INFINITE || (scale & NEGATIVE_ZERO != 0 && scale != NEGATIVE_ZERO) {
        return Err(Error::RowScale { tensor: at.tensor.to_owned(), row: at.row, value: to_f32(scale) });
    }
    counts.rows += 1;
    if others == 0 || scale & MAGNITUDE == 0 {
        counts.zero_rows += 1;
        codes.fill(ZERO);
        return Ok(0);
    }
    Ok(scale)
}

/// The one scale of a row that is stored as scale and bias for each group.
///
/// `scales`, `biases`: `[n_groups]`, bf16, little endian. All scales must be equal and each bias minus its scale.
pub(crate) fn row_scale(at: At<'_>, scales: &[u8], biases: &[u8]) -> Result<u16, Error> {
    let first = bf16_bits(scales).next().unwrap_or(0);
    let tensor = || at.tensor.to_owned();
    for (group, (scale, bias)) in bf16_bits(scales).zip(bf16_bits(biases)).enumerate() {
        let both_zero = (scale | bias) & MAGNITUDE == 0;
        if scale != bias ^ NEGATIVE_ZERO && !both_zero {
            let (bias, scale) = (to_f32(bias), to_f32(scale));
            return Err(Error::BiasNotMinusScale { tensor: tensor(), row: at.row, group, bias, scale });
        }
        if scale != first && (scale | first) & MAGNITUDE != 0 {
            let (found, first) = (to_f32(scale), to_f32(first));
            return Err(Error::UnequalGroups { tensor: tensor(), row: at.row, group, found, first });
        }
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;

    const AT: At<'_> = At { tensor: "t", row: 7 };

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|&value| bf16::from_f32(value).to_bits().to_le_bytes()).collect()
    }

    fn convert(values: &[f32], ternarize: bool) -> Result<(Vec<u8>, f32, Counts), Error> {
        let mut codes = vec![9; values.len()];
        let mut counts = Counts::default();
        let scale = bf16_row(AT, &bytes(values), ternarize, &mut codes, &mut counts)?;
        Ok((codes, to_f32(scale), counts))
    }

    #[test]
    fn ternary_bf16_rows_convert_exactly() {
        let check = |values: &[f32], codes: &[u8], scale: f32, zero_rows: u64, negative_zeros: u64| {
            let wanted = Counts { rows: 1, zero_rows, negative_zeros, ..Counts::default() };
            assert_eq!(convert(values, false).unwrap(), (codes.to_vec(), scale, wanted), "{values:?}");
        };
        check(&[], &[], 0.0, 1, 0);
        check(&[0.0], &[1], 0.0, 1, 0);
        check(&[-0.0], &[1], 0.0, 1, 1);
        check(&[-0.5], &[0], 0.5, 0, 0);
        check(&[0.5, -0.0, 0.0, -0.5], &[2, 1, 1, 0], 0.5, 0, 1);
        check(&[f32::from_bits(1 << 16), 0.0], &[2, 1], f32::from_bits(1 << 16), 0, 0);
    }

    #[test]
    fn a_stranger_is_named_wherever_it_stands() {
        let ulp = to_f32(bf16::from_f32(0.5).to_bits() + 1);
        let check = |values: &[f32], column: usize| match convert(values, false) {
            Err(Error::NotTernary { tensor, row: 7, column: found, value, scale: 0.5 }) => {
                assert_eq!((tensor.as_str(), found, value.abs()), ("t", column, ulp), "{values:?}");
            }
            other => panic!("{values:?}: {other:?}"),
        };
        check(&[ulp, 0.5, -0.5, 0.0], 0);
        check(&[0.5, ulp, -0.5, 0.0], 1);
        check(&[0.5, 0.0, -0.5, -ulp], 3);
    }

    #[test]
    fn values_that_are_not_finite_are_named_even_with_ternarize() {
        let check = |value: f32, column: usize, values: &[f32]| match convert(values, true) {
            Err(Error::NotFinite { column: found, value: is, .. }) => {
                assert!(found == column && (is == value || is.is_nan() && value.is_nan()), "{values:?}");
            }
            other => panic!("{values:?}: {other:?}"),
        };
        check(f32::NAN, 1, &[0.5, f32::NAN]);
        check(f32::INFINITY, 0, &[f32::INFINITY, f32::INFINITY]);
        check(f32::NEG_INFINITY, 2, &[0.0, -0.0, f32::NEG_INFINITY]);
    }

    #[test]
    fn the_threshold_is_strict_and_near_weights_are_counted() {
        // Mean 0.5, threshold 0.35 in f64: nothing here is equal to it, 0.349609375 is within one bf16 step.
        let (codes, scale, counts) = convert(&[1.0, -0.650_390_6, 0.349_609_4, -0.0], true).unwrap();
        assert_eq!(codes, [2, 0, 1, 1]);
        assert_eq!(scale, bf16::from_f32((1.0 + 0.650_390_6) / 2.0).to_f32());
        assert_eq!((counts.ternarized_rows, counts.near_threshold, counts.negative_zeros), (1, 1, 1));
    }

    #[test]
    fn words_become_codes_with_the_canonical_scale() {
        let half = bf16::from_f32(0.5).to_bits();
        let check = |words: &[u8], scale: u16, wanted: Option<(&[u8], u16)>| {
            let mut codes = vec![9; 4 * words.len()];
            let got = words_row(AT, words, scale, &mut codes, &mut Counts::default());
            assert_eq!(got.ok().map(|scale| (codes.as_slice(), scale)), wanted, "{words:?} {scale:#x}");
        };
        check(&[0b10_01_00_10], half, Some((&[2, 0, 1, 2], half)));
        check(&[0x55, 0x55], half, Some((&[1; 8], 0)));
        check(&[0b10_01_00_10], 0, Some((&[1; 4], 0)));
        check(&[0b10_01_00_10], NEGATIVE_ZERO, Some((&[1; 4], 0)));
        check(&[0b10_01_00_10], half | NEGATIVE_ZERO, None);
        check(&[0b10_01_00_10], INFINITE, None);
        check(&[0b10_01_00_10], INFINITE + 1, None);
        check(&[0x55, 0b01_11_01_01], half, None);
    }

    #[test]
    fn code_three_is_named() {
        let mut codes = [0; 16];
        let error =
            words_row(AT, &[0x55, 0x55, 0x55, 0b01_11_01_01], 0x3f00, &mut codes, &mut Counts::default());
        assert!(matches!(error, Err(Error::CodeThree { row: 7, column: 14, .. })), "{error:?}");
    }

    #[test]
    fn groups_must_agree() {
        let check =
            |scales: &[f32], biases: &[f32]| row_scale(AT, &bytes(scales), &bytes(biases)).map(to_f32);
        assert_eq!(check(&[0.5], &[-0.5]).unwrap(), 0.5);
        assert_eq!(check(&[0.5, 0.5], &[-0.5, -0.5]).unwrap(), 0.5);
        assert_eq!(check(&[0.0, 0.0], &[0.0, -0.0]).unwrap(), 0.0);
        assert!(matches!(check(&[0.5, 0.25], &[-0.5, -0.25]), Err(Error::UnequalGroups { group: 1, .. })));
        assert!(matches!(check(&[0.5, 0.0], &[-0.5, 0.0]), Err(Error::UnequalGroups { group: 1, .. })));
        assert!(matches!(check(&[0.5, 0.5], &[-0.5, 0.5]), Err(Error::BiasNotMinusScale { group: 1, .. })));
    }

    proptest! {
        /// On a row that is ternary already, the rounding rule changes nothing.
        #[test]
        fn the_rule_is_exact_on_ternary_rows(signs in prop::collection::vec(-1_i8..=1, 1..300), exponent in -20_i32..20) {
            let scale = bf16::from_f32(1.171875 * 2.0_f32.powi(exponent)).to_f32();
            let values: Vec<f32> = signs.iter().map(|&sign| f32::from(sign) * scale).collect();
            let (codes, exact, _) = convert(&values, false).unwrap();
            let mut ruled = vec![9; values.len()];
            let bits = ternarize_row(&bytes(&values), &mut ruled, &mut Counts::default());
            prop_assert_eq!((codes, exact), (ruled, to_f32(bits)));
        }
    }
}
