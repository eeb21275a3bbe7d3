//! Rows of activations as the kernels quantise them, and what their rounding may do.
//!
//! Where x * 127 / max lies so near the middle between two integers that f32 may round it either way, one step of the scale is allowed
//! to that column, and to no other.

use samara_simd::{ACT_BLOCK, ACT_SPAN, padded_cols, scales_len};

use super::super::{made::Made, trial::equal};

/// How near the middle, in steps: what an error of 3 millionths makes of 127.
const NEAR: f64 = 4e-4;

/// Bits that nobody may read, or that nobody has written: a NaN.
pub(super) const POISON: u32 = 0xffc0_dead;

/// Words past a row that a kernel must leave alone.
const SPARE: usize = 8;

/// A row of int8 times scales, not yet rounded.
pub(super) struct Quantized {
    /// `[cols]`: multiples of the scale. Zeros where there is no scale.
    steps: Vec<f64>,
    /// `[spans, 8]`: NaN where a value is no number, 0 where all are next to nothing.
    scales: Vec<f64>,
}

/// A result and how far off it may be beside the kernel's tolerance.
#[derive(Clone, Copy, Debug)]
pub(super) struct Within {
    pub(super) value: f64,
    pub(super) slack: f64,
}

/// Which scale a column has.
fn unit_of(column: usize) -> usize {
    column / ACT_SPAN * 8 + column % 32 / 4
}

/// The word that a column is in, in a row that one kernel leaves to the next, and which byte of it.
fn place_of(column: usize) -> (usize, usize) {
    let (block, plane, w) = (column / ACT_BLOCK, column % ACT_BLOCK / 32, column % 32 / 4);
    ((block * 8 + w) * 4 + plane, column % 4)
}

/// Words of such a row before its scales.
fn code_words(cols: usize) -> usize {
    padded_cols(cols) / 4
}

/// Words of such a row.
fn row_words(cols: usize) -> usize {
    code_words(cols) + scales_len(cols)
}

/// A buffer for such a row and some words.
pub(super) fn unwritten_row(cols: usize) -> Vec<u32> {
    vec![POISON; row_words(cols) + SPARE]
}

/// int8 of a column of such a row.
fn code_at(row: &[u32], column: usize) -> f64 {
    let (word, byte) = place_of(column);
    f64::from(row[word].to_le_bytes()[byte].cast_signed())
}

/// The values of such a row, `[cols]`.
pub(super) fn row_values(row: &[u32], cols: usize) -> Vec<f64> {
    let scale = |column| f64::from(f32::from_bits(row[code_words(cols) + unit_of(column)]));
    (0..cols).map(|column| code_at(row, column) * scale(column)).collect()
}

impl Quantized {
    pub(super) fn of(x: &[f64]) -> Self {
        let mut largest = vec![0.0f64; scales_len(x.len())];
        for (column, x) in x.iter().enumerate() {
            let largest = &mut largest[unit_of(column)];
            let lost = largest.is_nan() || !x.is_finite();
            *largest = if lost { f64::NAN } else { largest.max(x.abs()) };
        }
        let usable = |largest: f64| largest >= (-100f64).exp2();
        let step = |(column, x): (usize, &f64)| match largest[unit_of(column)] {
            largest if usable(largest) => x * 127.0 / largest,
            _ => 0.0,
        };
        Quantized {
            steps: x.iter().enumerate().map(step).collect(),
            scales: largest
                .iter()
                .map(|largest| if usable(*largest) || largest.is_nan() { largest / 127.0 } else { 0.0 })
                .collect(),
        }
    }

    /// A made-up one.
    pub(super) fn made(made: &mut Made, cols: usize) -> Self {
        let x: Vec<f64> = made.values(cols, 2.0).into_iter().map(f64::from).collect();
        Quantized::of(&x)
    }

    /// The columns that share a scale with this one are no numbers any more.
    #[cfg(test)]
    pub(super) fn lose_unit(&mut self, column: usize) {
        self.scales[unit_of(column)] = f64::NAN;
        let own = |other: &usize| unit_of(*other) == unit_of(column);
        (0..self.steps.len()).filter(own).for_each(|column| self.steps[column] = 0.0);
    }

    fn scaled(&self, of: fn(f64) -> f64) -> Vec<f64> {
        let steps = self.steps.iter().enumerate();
        steps.map(|(column, step)| of(*step) * self.scales[unit_of(column)]).collect()
    }

    /// The rounded values, `[cols]`.
    pub(super) fn values(&self) -> Vec<f64> {
        self.scaled(f64::round_ties_even)
    }

    /// Times each row of `weights` `[rows, cols]`.
    pub(super) fn times(&self, weights: &[f64]) -> Vec<Within> {
        let values = self.values();
        let slack = self.scaled(|step| f64::from(u8::from(((step - step.floor()) - 0.5).abs() < NEAR)));
        let row = |row: &[f64]| Within {
            value: row.iter().zip(&values).map(|(w, x)| w * x).sum(),
            slack: row.iter().zip(&slack).map(|(w, x)| w.abs() * x).sum(),
        };
        weights.chunks_exact(self.steps.len()).map(row).collect()
    }

    /// As one kernel leaves it to the next: int8 by block, w and plane, then the scales.
    pub(super) fn row(&self) -> Vec<u32> {
        let mut row = vec![0; code_words(self.steps.len())];
        for (column, step) in self.steps.iter().enumerate() {
            let (word, byte) = place_of(column);
            row[word] |= u32::from((step.round_ties_even() as i8).cast_unsigned()) << (8 * byte);
        }
        row.extend(self.scales.iter().map(|scale| (*scale as f32).to_bits()));
        row
    }

    /// [`Self::worst_row`] of what was [`unwritten_row`]; infinity if anything past the row was written.
    pub(super) fn worst_written(&self, buffer: &[u32]) -> f64 {
        let (row, spare) = buffer.split_at(buffer.len() - SPARE);
        self.worst_row(row).max(equal(spare, &[POISON; SPARE][..]))
    }

    /// The largest difference of a scale that a kernel has left, divided by that scale. Infinity if one is no number where it should be
    /// one or the other way round, or if an int8 is another than rounding allows, padding included.
    fn worst_row(&self, row: &[u32]) -> f64 {
        let cols = self.steps.len();
        assert_eq!(row.len(), row_words(cols), "words compared");
        let difference = |(expected, found): (&f64, &u32)| match (*expected, f32::from_bits(*found)) {
            (expected, found) if expected.is_nan() => equal(found.is_nan(), true),
            (0.0, _) => equal(*found, 0),
            (expected, found) => ((f64::from(found) - expected) / expected).abs(),
        };
        let worst = self
            .scales
            .iter()
            .zip(&row[code_words(cols)..])
            .map(difference)
            .fold(0.0f64, |worst, own| if own.is_finite() { worst.max(own) } else { f64::INFINITY });
        let right = |column: usize| {
            let step = self.steps.get(column).copied().unwrap_or_default();
            (code_at(row, column) - step).abs() <= 0.5 + NEAR
        };
        if (0..padded_cols(cols)).all(right) { worst } else { f64::INFINITY }
    }
}

/// `weight * x / sqrt(mean(x^2) + eps)`.
pub(super) fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let x: Vec<f64> = x.iter().copied().map(f64::from).collect();
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let inverse = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(x, weight)| f64::from(*weight) * x * inverse).collect()
}

/// The largest difference of f32 words from what was expected, beyond its slack, divided by the largest value expected.
/// Infinity if one of them is no number.
pub(super) fn worst_within(found: &[u32], expected: &[Within]) -> f64 {
    assert_eq!(found.len(), expected.len(), "results compared");
    let largest = expected.iter().fold(f64::MIN_POSITIVE, |largest, within| largest.max(within.value.abs()));
    let worst = found.iter().zip(expected).fold(0.0f64, |worst, (found, within)| {
        let difference = (f64::from(f32::from_bits(*found)) - within.value).abs() - within.slack;
        if difference.is_finite() { worst.max(difference) } else { f64::INFINITY }
    });
    worst / largest
}

#[cfg(test)]
mod tests {
    use samara_simd::{Kernels, offsets_len};

    use super::*;

    #[test]
    fn rows_are_quantised_as_on_the_cpu() {
        for cols in [4, 64, 100, 128, 132, 256, 384, 640, 2048] {
            let x = Made::new(cols as u64).values(cols, 3.0);
            let wide: Vec<f64> = x.iter().copied().map(f64::from).collect();
            let quantized = Quantized::of(&wide);
            let (mut q, mut scales, mut offsets) =
                (vec![0; padded_cols(cols)], vec![0.0; scales_len(cols)], vec![0.0; offsets_len(cols)]);
            Kernels::scalar().quantize(&x, &mut q, &mut scales, &mut offsets);
            for (column, (q, step)) in q.iter().zip(&quantized.steps).enumerate() {
                let difference = (f64::from(*q) - step).abs();
                assert!(difference <= 0.5 + NEAR, "column {column} of {cols}: {difference}");
            }
            for (scale, expected) in scales.iter().zip(&quantized.scales) {
                assert!((f64::from(*scale) - expected).abs() <= 1e-6 * expected, "{scale} is not {expected}");
            }
            let row = quantized.row();
            for (column, (value, step)) in row_values(&row, cols).iter().zip(&quantized.steps).enumerate() {
                let expected = step.round_ties_even() * f64::from(scales[unit_of(column)]);
                assert!((value - expected).abs() <= 1e-6 * expected.abs(), "column {column} of {cols}");
            }
        }
    }

    #[test]
    fn a_row_is_right_as_it_is_and_not_otherwise() {
        let mut x: Vec<f64> = Made::new(1).values(300, 3.0).into_iter().map(f64::from).collect();
        // Unit 0 of the first span has no number in it, unit 1 is zeros.
        x[32] = f64::NAN;
        (0..256).filter(|column| unit_of(*column) == 1).for_each(|column| x[column] = 0.0);
        let quantized = Quantized::of(&x);
        let row = quantized.row();
        assert!(quantized.worst_row(&row) <= 1e-7);
        let flipped = |word: usize, bits: u32| {
            let mut row = row.clone();
            row[word] ^= bits;
            quantized.worst_row(&row)
        };
        // An int8, padding, a scale's last bits, zero's sign, NaN's exponent, a number's.
        assert_eq!(flipped(2 * 4, 1 << 8), f64::INFINITY);
        assert_eq!(flipped(95, 1), f64::INFINITY);
        assert!(flipped(96 + 2, 1 << 6) > 5e-6);
        assert_eq!(flipped(96 + 1, 1 << 31), f64::INFINITY);
        assert_eq!(flipped(96, 0x7f80_0000), f64::INFINITY);
        assert_eq!(flipped(96 + 2, row[96 + 2] ^ f32::NAN.to_bits()), f64::INFINITY);
    }
}
