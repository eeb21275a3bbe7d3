//! The exponential.

const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23, see quantize.rs
const LN2_HIGH: f32 = 0.693_359_4; // 10 significant bits: times an exponent it is exact
const LN2_LOW: f32 = -2.121_944_4e-4;
const LOWEST: f32 = -87.0; // e^-87 is the last whole power with a normal result
const HIGHEST: f32 = 88.0;

/// e^x within 2 units in the last place; below -87 zero, above 88 infinity, NaN for NaN.
///
/// Own code, so that the bits do not depend on a platform's libm: x = n ln 2 + r, a Taylor series to
/// r^7 (its next term is below 6e-9 for |r| <= ln 2 / 2), and 2^n put together from its bits.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut series = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        series = series * r + coefficient;
    }
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127);
    let result = series * f32::from_bits(exponent << 23);
    let result = if x < LOWEST { 0.0 } else { result };
    if x > HIGHEST { f32::INFINITY } else { result }
}
