//! Matrices times one row.

use super::super::{
    made::{Made, Ternary, matmul},
    trial::{Difference, Trial, words, worst},
};
use super::quantized::{POISON, Quantized, rms_norm, row_values, unwritten_row, worst_within};
use crate::error::Error;

/// What a kernel norms itself.
#[derive(Clone, Copy)]
pub(in crate::backend::wgpu::check) struct Row<'a> {
    /// The residual, `[cols]`.
    pub(in crate::backend::wgpu::check) h: &'a [f32],
    /// `[cols]`.
    pub(in crate::backend::wgpu::check) norm: &'a [f32],
    pub(in crate::backend::wgpu::check) eps: f32,
}

impl Row<'_> {
    pub(super) fn normed(&self) -> Vec<f64> {
        rms_norm(self.h, self.norm, self.eps)
    }
}

/// Length of a normed row as the kernels quantise it.
pub(in crate::backend::wgpu::check) fn length(row: &Row<'_>) -> f64 {
    let values = Quantized::of(&row.normed()).values();
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// `norm_gemv`, `panels` to a workgroup.
///
/// # Errors
/// Those of the device.
pub(in crate::backend::wgpu::check) fn norm_gemv(
    trial: &Trial<'_>,
    w: &Ternary,
    row: &Row<'_>,
    panels: usize,
) -> Result<Difference, Error> {
    let expected = Quantized::of(&row.normed()).times(&w.weights);
    let mut buffers = [words(row.h), words(row.norm), w.words.clone(), vec![0; w.rows]];
    trial.run(
        "norm_gemv",
        &[
            ("COLS", w.cols as f64),
            ("ROWS", w.rows as f64),
            ("EPS", row.eps.into()),
            ("PANELS", panels as f64),
        ],
        &mut buffers,
        [w.rows.div_ceil(4 * panels) as u32, 1, 1],
    )?;
    Ok(Difference::of("norm_gemv", worst_within(&buffers[3], &expected)))
}

/// h that `gemv_add` makes of `h`, a quantised row and a matrix, `panels` to a workgroup.
///
/// # Errors
/// Those of the device.
fn added(trial: &Trial<'_>, w: &Ternary, row: &[u32], h: &[f32], panels: usize) -> Result<Vec<u32>, Error> {
    let mut buffers = [row.to_vec(), w.words.clone(), words(h)];
    trial.run(
        "gemv_add",
        &[("COLS", w.cols as f64), ("ROWS", w.rows as f64), ("PANELS", panels as f64)],
        &mut buffers,
        [w.rows.div_ceil(4 * panels) as u32, 1, 1],
    )?;
    let [_, _, h] = buffers;
    Ok(h)
}

/// `gemv_add` of a made-up row, `panels` to a workgroup.
///
/// # Errors
/// Those of the device.
pub(in crate::backend::wgpu::check) fn gemv_add(
    trial: &Trial<'_>,
    w: &Ternary,
    panels: usize,
    seed: u64,
) -> Result<Difference, Error> {
    let made = &mut Made::new(seed);
    let (row, h) = (Quantized::made(made, w.cols).row(), made.values(w.rows, 1.0));
    let expected: Vec<f64> =
        w.times(&row_values(&row, w.cols)).iter().zip(&h).map(|(y, h)| f64::from(*h) + y).collect();
    Ok(Difference::of("gemv_add", worst(&added(trial, w, &row, &h, panels)?, &expected)))
}

/// Whether all of what `gemv_add` makes of a row with a scale that is no number is none either.
///
/// # Errors
/// Those of the device.
#[cfg(test)]
pub(super) fn gemv_add_keeps_nan(trial: &Trial<'_>, w: &Ternary) -> Result<bool, Error> {
    let made = &mut Made::new(1);
    let mut x = Quantized::made(made, w.cols);
    x.lose_unit(w.cols / 2);
    let h = added(trial, w, &x.row(), &made.values(w.rows, 1.0), 1)?;
    Ok(h.iter().all(|h| f32::from_bits(*h).is_nan()))
}

/// Logits and the row that `norm_router` makes.
///
/// # Errors
/// Those of the device.
pub(super) fn routed(
    trial: &Trial<'_>,
    w: &(Vec<u32>, Vec<f64>),
    row: &Row<'_>,
) -> Result<[Vec<u32>; 2], Error> {
    let cols = row.h.len();
    let rows = w.1.len() / cols;
    let mut buffers = [words(row.h), words(row.norm), w.0.clone(), vec![POISON; rows], unwritten_row(cols)];
    trial.run(
        "norm_router",
        &[("COLS", cols as f64), ("ROWS", rows as f64), ("EPS", row.eps.into())],
        &mut buffers,
        [rows.div_ceil(4) as u32, 1, 1],
    )?;
    let [_, _, _, logits, q] = buffers;
    Ok([logits, q])
}

/// `norm_router`; `w` is a BF16_PANELS part and its values, `[rows, cols]`.
///
/// # Errors
/// Those of the device.
pub(in crate::backend::wgpu::check) fn norm_router(
    trial: &Trial<'_>,
    w: &(Vec<u32>, Vec<f64>),
    row: &Row<'_>,
) -> Result<Difference, Error> {
    let normed = row.normed();
    let [logits, q] = routed(trial, w, row)?;
    let found = worst(&logits, &matmul(&w.1, &normed, row.h.len()));
    Ok(Difference::of("norm_router", found.max(Quantized::of(&normed).worst_written(&q))))
}
