//! A bound on the logits of a cluster of head rows, from its centroid's score. SPEC.md has the formula.
//!
//! A row w is a multiple of the centroid C and a rest: w = a C + d with d orthogonal to C. Its logit for a state x is
//! then a (C.x) + d.x, and d.x is at most |d| times the length of what of x is orthogonal to C. A cluster keeps the
//! extremes of a and of |d|. Every number is rounded to the side on which the bound stays one.

use crate::ternary::to_f32;

/// Numbers of a cluster.
pub(crate) const N_WORDS: usize = 6;
/// Columns that share a bias.
const GROUP: f64 = crate::affine::GROUP as f64;

/// What is known of the rows of one cluster.
#[derive(Debug)]
pub(super) struct Bound<'a> {
    centroid: &'a [f64],
    /// Length of the centroid.
    length: f64,
    /// That, and twice the norm of its biases.
    centroid_magnitude: f64,
    /// More than what f64 has rounded in any number made of a row, as a share of the row's norm: a sum of n products is
    /// off by at most n / 2^53 of the sum of their magnitudes, and no number takes four such sums.
    slack: f64,
    a_hi: f64,
    a_lo: f64,
    rho: f64,
    magnitude: f64,
}

impl<'a> Bound<'a> {
    /// Of no rows yet. `centroid`: `[cols]`, as stored, and the biases of its groups, `[cols / 64]`, bf16 bits.
    pub(super) fn new(centroid: &'a [f64], biases: &[u16]) -> Self {
        let slack = (centroid.len() + 16) as f64 * 4.0 * (f64::EPSILON / 2.0);
        let (a_hi, a_lo) = (f64::NEG_INFINITY, f64::INFINITY);
        let length = norm(centroid);
        let centroid_magnitude = magnitude(length, biases, slack);
        Self { centroid, length, centroid_magnitude, slack, a_hi, a_lo, rho: 0.0, magnitude: 0.0 }
    }

    /// Adds a row: its weights, `[cols]`, and the biases of its groups, `[cols / 64]`, bf16 bits.
    pub(super) fn add(&mut self, row: &[f64], biases: &[u16]) {
        let norm = norm(row);
        let slack = self.slack * norm;
        let (a, a_slack, rest) = if self.length > 0.0 {
            let a = dot(row, self.centroid) / (self.length * self.length);
            let rest = row.iter().zip(self.centroid).map(|(w, c)| (w - a * c).powi(2));
            (a, slack / self.length, rest.sum::<f64>().sqrt())
        } else {
            (0.0, 0.0, norm)
        };
        self.a_hi = self.a_hi.max(a + a_slack);
        self.a_lo = self.a_lo.min(a - a_slack);
        self.rho = self.rho.max(rest + slack);
        self.magnitude = self.magnitude.max(magnitude(norm, biases, self.slack));
    }

    /// a_hi, a_lo, rho, |C|, the magnitude of C and that of the rows, as the bits of f32s.
    pub(super) fn words(&self) -> [u32; N_WORDS] {
        let Self { a_hi, a_lo, rho, length, centroid_magnitude, magnitude, .. } = *self;
        let [a_hi, b_lo, rho, length, of_centroid, of_rows] =
            [a_hi, -a_lo, rho, length * (1.0 + self.slack), centroid_magnitude, magnitude].map(round_up);
        [a_hi, -b_lo, rho, length, of_centroid, of_rows].map(f32::to_bits)
    }
}

/// Of weights of this norm, what bounds the terms of their products with a state: SPEC.md says why.
fn magnitude(norm: f64, biases: &[u16], slack: f64) -> f64 {
    let squares = biases.iter().map(|&bias| f64::from(to_f32(bias)).powi(2));
    let bias_norm = (GROUP * squares.sum::<f64>()).sqrt();
    (norm + 2.0 * bias_norm) * (1.0 + slack)
}

/// The smallest f32 that is not below `value`.
fn round_up(value: f64) -> f32 {
    let nearest = value as f32;
    if f64::from(nearest) < value { nearest.next_up() } else { nearest }
}

/// Euclidean norm.
pub(super) fn norm(values: &[f64]) -> f64 {
    dot(values, values).sqrt()
}

fn dot(left: &[f64], right: &[f64]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_goes_up_and_no_farther_than_needed() {
        let check = |value: f64| {
            let up = round_up(value);
            assert!(f64::from(up) >= value && f64::from(up.next_down()) < value, "{value:e} became {up:e}");
        };
        let next = f64::from(1.0_f32.next_up());
        for value in [0.0, 1.0, next, 1.0_f64.next_up(), 1.0_f64.next_down(), next.next_down(), 1e-60, 0.1] {
            check(value);
            check(-value);
        }
        assert_eq!(round_up(1e300), f32::INFINITY);
        assert_eq!(round_up(-1e300), f32::MIN);
    }

    fn floats(words: [u32; N_WORDS]) -> [f32; N_WORDS] {
        words.map(f32::from_bits)
    }

    #[test]
    fn numbers_of_simple_clusters() {
        let at = |i: usize, value: f64| -> Vec<f64> {
            (0..64).map(|j| if i == j { value } else { 0.0 }).collect()
        };
        let near = |found: f32, wanted: f32| found >= wanted && found <= wanted + 1e-6;
        // Rows 3 C, -C / 2 and one of length 4 across C; biases of 1 and 0.
        let centroid = at(0, 2.0);
        let mut bound = Bound::new(&centroid, &[0xbf80]);
        bound.add(&at(0, 6.0), &[0]);
        bound.add(&at(0, -1.0), &[0x3f80]);
        bound.add(&at(1, 4.0), &[0]);
        let [a_hi, a_lo, rho, length, of_centroid, magnitude] = floats(bound.words());
        assert!(
            near(a_hi, 3.0) && near(-a_lo, 0.5) && near(rho, 4.0) && near(length, 2.0),
            "{a_hi} {a_lo} {rho} {length}"
        );
        assert!((18.0..18.00001).contains(&of_centroid), "2 + 2 * 8: {of_centroid}");
        assert!((17.0..17.00001).contains(&magnitude), "1 + 2 * 8 is more than 6: {magnitude}");
        // No direction to measure along.
        let centroid = at(0, 0.0);
        let mut bound = Bound::new(&centroid, &[0]);
        bound.add(&at(5, -3.0), &[0]);
        bound.add(&at(5, 0.0), &[0]);
        let [a_hi, a_lo, rho, length, ..] = floats(bound.words());
        assert!((a_hi, a_lo, length) == (0.0, 0.0, 0.0) && near(rho, 3.0), "{a_hi} {a_lo} {rho}");
    }
}
