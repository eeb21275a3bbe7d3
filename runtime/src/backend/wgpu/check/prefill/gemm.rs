//! Matrices times a step's tokens.

use super::{Rows, SPARE, plain_rows};
use crate::{
    backend::wgpu::check::{
        made::{Made, Ternary, matmul},
        trial::{Difference, Trial, equal, words, worst},
    },
    error::Error,
};

/// Tokens for a matrix, and what is there before it.
fn inputs(matrix: &Ternary, n_tokens: usize) -> (Rows, Vec<f32>) {
    let mut made = Made::new(n_tokens as u64);
    let x = Rows::of(&made.values(n_tokens * matrix.cols, 2.0), matrix.cols);
    (x, made.values((n_tokens + SPARE) * matrix.rows, 1.0))
}

fn run(
    trial: &Trial<'_>,
    matrix: &Ternary,
    (x, before): (&Rows, &[f32]),
    n_tokens: usize,
    tile: [usize; 2],
    add: bool,
) -> Result<Vec<u32>, Error> {
    let Ternary { words: w, rows: n_rows, cols, .. } = matrix;
    let mut buffers = [x.xq.clone(), x.xs.clone(), plain_rows(n_tokens), w.clone(), words(before)];
    let constants = [
        ("ROWS", *n_rows as f64),
        ("COLS", *cols as f64),
        ("ADD", f64::from(u8::from(add))),
        ("PANELS", tile[0] as f64),
        ("TOKENS", tile[1] as f64),
    ];
    let grid = [n_rows.div_ceil(4 * tile[0]) as u32, n_tokens.div_ceil(tile[1]) as u32, 1];
    trial.run("ternary_gemm", &constants, &mut buffers, grid)?;
    let [.., out] = buffers;
    Ok(out)
}

/// `tile` is panels and tokens of a workgroup; with `add` the result is added to what is there.
pub(in super::super) fn ternary_gemm(
    trial: &Trial<'_>,
    matrix: &Ternary,
    n_tokens: usize,
    tile: [usize; 2],
    add: bool,
) -> Result<Difference, Error> {
    let (x, before) = inputs(matrix, n_tokens);
    let out = run(trial, matrix, (&x, &before), n_tokens, tile, add)?;
    let mut expected = matrix.times(&x.values);
    if add {
        expected.iter_mut().zip(&before).for_each(|(sum, before)| *sum += f64::from(*before));
    }
    let (out, spare) = out.split_at(expected.len());
    let found = worst(out, &expected).max(equal(spare, &words(&before[expected.len()..])));
    Ok(Difference::of("ternary_gemm", found))
}

/// The result as it is.
#[cfg(test)]
pub(super) fn ternary_gemm_bits(
    trial: &Trial<'_>,
    matrix: &Ternary,
    n_tokens: usize,
    tile: [usize; 2],
) -> Result<Vec<u32>, Error> {
    let (x, before) = inputs(matrix, n_tokens);
    run(trial, matrix, (&x, &before), n_tokens, tile, false)
}

/// `matrix` is the words of a router, BF16_PANELS, and its values, `[n_experts, cols]`.
pub(in super::super) fn router_gemm(
    trial: &Trial<'_>,
    matrix: (&[u32], &[f64]),
    cols: usize,
    n_tokens: usize,
) -> Result<Difference, Error> {
    let (w, values) = matrix;
    let n_experts = values.len() / cols;
    let normed = Made::new(n_tokens as u64).values(n_tokens * cols, 1.0);
    let mut buffers = [
        plain_rows(n_tokens),
        words(&normed),
        w.to_vec(),
        vec![0; (n_tokens + SPARE) * n_experts],
        vec![7; n_experts + SPARE],
        vec![0, 4],
    ];
    let constants = [("COLS", cols as f64), ("N_EXPERTS", n_experts as f64)];
    let grid = [n_experts.div_ceil(64) as u32, n_tokens.div_ceil(32) as u32, 1];
    trial.run("router_gemm", &constants, &mut buffers, grid)?;
    let x: Vec<f64> = normed.iter().map(|x| f64::from(*x)).collect();
    let (logits, spare) = buffers[3].split_at(n_tokens * n_experts);
    let found = worst(logits, &matmul(values, &x, cols));
    let counts = buffers[4].iter().enumerate().all(|(i, count)| *count == if i < n_experts { 0 } else { 7 });
    let rest = counts && spare.iter().all(|word| *word == 0) && buffers[5] == [0, 5];
    Ok(Difference::of("router_gemm", found.max(equal(rest, true))))
}
