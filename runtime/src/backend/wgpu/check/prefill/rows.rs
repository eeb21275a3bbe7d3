//! Norms, and rows of int8.

use samara_simd::{Isa, Kernels, offsets_len, padded_cols, scales_len};

use super::SPARE;
use crate::{
    backend::wgpu::check::trial::{Difference, Trial, floats, words, worst},
    error::Error,
};

/// What an integer sum starts from before the sum of a unit's q is taken off: the bits of 1.5 * 2^23.
const START: u32 = 0x4b40_0000;

/// Quantised rows as the gemms read them, and the numbers they stand for.
pub(in super::super) struct Rows {
    /// int8, `[rows][span][scale][block][plane]` words.
    pub(in super::super) xq: Vec<u32>,
    /// `[rows][span][scale]` of (scale, start).
    pub(in super::super) xs: Vec<u32>,
    /// `[rows, cols]`.
    pub(in super::super) values: Vec<f64>,
}

impl Rows {
    /// Quantises `x`, `[rows, cols]`, as the CPU does.
    pub(in super::super) fn of(x: &[f32], cols: usize) -> Self {
        let kernels = Kernels::for_isa(Isa::Scalar).expect("every machine has it");
        let mut rows = Rows { xq: Vec::new(), xs: Vec::new(), values: Vec::with_capacity(x.len()) };
        for x in x.chunks_exact(cols) {
            let mut q = vec![0; padded_cols(cols)];
            let (mut scales, mut offsets) = (vec![0.0; scales_len(cols)], vec![0.0; offsets_len(cols)]);
            kernels.quantize(x, &mut q, &mut scales, &mut offsets);
            let (xq, xs) = packed(&q, &scales);
            rows.xq.extend(xq);
            rows.xs.extend(xs);
            rows.values.extend((0..cols).map(|c| f64::from(q[c]) * f64::from(scales[unit_of(c)])));
        }
        rows
    }
}

/// Which of a row's scales a column has.
fn unit_of(column: usize) -> usize {
    8 * (column / 256) + column % 32 / 4
}

/// A row's int8 in the order of the gemms, and its scales with what sums start from.
fn packed(q: &[i8], scales: &[f32]) -> (Vec<u32>, Vec<u32>) {
    let byte = |column: usize| q.get(column).map_or(0, |q| *q as u8);
    let (mut xq, mut xs) = (Vec::new(), Vec::new());
    for (unit, scale) in scales.iter().enumerate() {
        let mut sum = 0i32;
        for word in 0..8 {
            let (block, plane) = (word / 4, word % 4);
            let column = unit / 8 * 256 + block * 128 + plane * 32 + unit % 8 * 4;
            let bytes: [u8; 4] = std::array::from_fn(|t| byte(column + t));
            sum += bytes.iter().map(|byte| i32::from(*byte as i8)).sum::<i32>();
            xq.push(u32::from_le_bytes(bytes));
        }
        xs.extend([scale.to_bits(), START.wrapping_sub(sum as u32)]);
    }
    (xq, xs)
}

/// How far the int8 of `x` are from it: beyond half a step, in steps; or the scale from what it should be. Infinity if a start is not
/// what the int8 say, a padding column is not 0, or NaN is hidden.
fn quantized_difference(x: &[f64], cols: usize, xq: &[u32], xs: &[u32]) -> f64 {
    let units = scales_len(cols);
    let mut worst = 0.0f64;
    let rows = x.chunks_exact(cols).zip(xq.chunks_exact(8 * units)).zip(xs.chunks_exact(2 * units));
    for ((x, xq), xs) in rows {
        for (unit, (xq, xs)) in xq.chunks_exact(8).zip(xs.chunks_exact(2)).enumerate() {
            let columns = |word: usize| {
                let first = unit / 8 * 256 + word / 4 * 128 + word % 4 * 32 + unit % 8 * 4;
                (first..first + 4).map(|column| x.get(column).copied())
            };
            let all = || (0..8).flat_map(columns).flatten();
            let largest = all().fold(0.0f64, |largest, x| if x.abs() <= largest { largest } else { x.abs() });
            let bytes: Vec<i32> =
                xq.iter().flat_map(|w| w.to_le_bytes()).map(|b| i32::from(b as i8)).collect();
            if START.wrapping_sub(bytes.iter().sum::<i32>() as u32) != xs[1] {
                return f64::INFINITY;
            }
            let scale = f64::from(f32::from_bits(xs[0]));
            if !all().all(f64::is_finite) {
                if !scale.is_nan() {
                    return f64::INFINITY;
                }
                continue;
            }
            if largest < 2f64.powi(-100) {
                if scale != 0.0 || bytes.iter().any(|byte| *byte != 0) {
                    return f64::INFINITY;
                }
                continue;
            }
            worst = worst.max((scale * 127.0 / largest - 1.0).abs());
            for (x, q) in (0..8).flat_map(columns).zip(&bytes) {
                match x {
                    Some(x) => worst = worst.max(((x / scale - f64::from(*q)).abs() - 0.5) / 127.0),
                    None if *q != 0 => return f64::INFINITY,
                    None => {}
                }
            }
        }
    }
    if worst.is_nan() { f64::INFINITY } else { worst }
}

/// f32 rows `x`, `[n, cols]`, to int8.
pub(in super::super) fn quantize_rows(
    trial: &Trial<'_>,
    x: &[f32],
    cols: usize,
) -> Result<Difference, Error> {
    let n = x.len() / cols;
    let units = scales_len(cols);
    let mut buffers = [words(x), vec![0; n * units * 8], vec![0; n * units * 2]];
    let grid = [(n * units).div_ceil(256) as u32, 1, 1];
    trial.run("quantize_rows", &[("COLS", cols as f64)], &mut buffers, grid)?;
    let expected: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    let found = quantized_difference(&expected, cols, &buffers[1], &buffers[2]);
    Ok(Difference::of("quantize_rows", found))
}

/// The norm of each row of `h`, `[n, cols]`, as f32 and as int8.
pub(in super::super) fn norm_quantize(
    trial: &Trial<'_>,
    h: &[f32],
    norm: &[f32],
    eps: f32,
) -> Result<Difference, Error> {
    let cols = norm.len();
    let n = h.len() / cols;
    let units = scales_len(cols);
    let mut buffers =
        [words(h), words(norm), vec![0; n * units * 8], vec![0; n * units * 2], vec![0; (n + SPARE) * cols]];
    let constants = [("COLS", cols as f64), ("EPS", f64::from(eps)), ("NORMED", 1.0)];
    trial.run("norm_quantize", &constants, &mut buffers, [n as u32, 1, 1])?;
    let expected = h.chunks_exact(cols).flat_map(|h| {
        let mean = h.iter().map(|h| f64::from(*h).powi(2)).sum::<f64>() / cols as f64;
        let inverse = 1.0 / (mean + f64::from(eps)).sqrt();
        h.iter().zip(norm).map(move |(h, norm)| f64::from(*norm) * (f64::from(*h) * inverse))
    });
    let (normed, spare) = buffers[4].split_at(n * cols);
    let mut found = worst(normed, &expected.collect::<Vec<_>>());
    // The int8 are those of the f32 beside them.
    let normed: Vec<f64> = floats(normed).into_iter().map(f64::from).collect();
    found = found.max(quantized_difference(&normed, cols, &buffers[2], &buffers[3]));
    if spare.iter().any(|word| *word != 0) {
        found = f64::INFINITY;
    }
    Ok(Difference::of("norm_quantize", found))
}
