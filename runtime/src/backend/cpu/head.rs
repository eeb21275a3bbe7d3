//! The first and the last block: an embedding row in, logits out.

use samara_pool::Chunks;
use samara_simd::{Affine4Rows, Kernels, PANEL_ROWS};

use super::{Context, flash::Flash, scratch::LOGIT_ROWS};
use crate::{
    backend::{Activations, Step, check_head_input},
    error::Error,
    flash::{Clusters, HeadMode},
    model::Model,
    spec::{EmbedSpec, HeadSpec},
};

/// Rows of a tile when logits of several tokens are wanted.
const TILE: usize = 512;

/// Fewest panels of 4 rows that are worth handing to a thread.
pub(super) const MIN_PANELS: usize = 64;

/// Fewest logits that are worth handing to a thread.
const MIN_LOGITS: usize = 1 << 12;

/// Fills `hidden`, `[n_tokens, hidden_size]`.
pub(super) fn embed(
    cx: &mut Context<'_>,
    kernels: &Kernels,
    spec: &EmbedSpec,
    step: &Step<'_>,
    hidden: &mut [f32],
) {
    let EmbedSpec { weight } = spec;
    let part = cx.model.matrix(weight);
    let rows = Affine4Rows::new(part, weight.rows, weight.cols);
    for ((_, _, token), out) in step.tokens().zip(hidden.chunks_exact_mut(weight.cols)) {
        kernels.affine4_row(&rows, token as usize, out);
    }
    cx.clock.lap("embed", step.n_tokens() * part.len() / weight.rows);
}

/// Norm, projection, and the order of tokens.
pub(super) struct Head {
    spec: HeadSpec,
    kernels: Kernels,
    norm: Vec<f32>,
    /// Row of the weight that holds a token's logit, when rows are not in token order.
    row_of: Option<Vec<u32>>,
    /// What leaves rows out.
    pub(super) flash: Option<Flash>,
}

impl Head {
    pub(super) fn new(
        model: &Model,
        spec: &HeadSpec,
        kernels: Kernels,
        mode: HeadMode,
    ) -> Result<Self, Error> {
        let HeadSpec { norm, weight: _, token_map, flash: _ } = spec;
        let row_of = token_map.as_ref().map(|map| model.row_of(map)).transpose()?;
        let flash = Clusters::of(model, spec, mode)?.map(|clusters| Flash::new(model, clusters, mode));
        Ok(Head { norm: model.vector(&norm.weight), row_of, flash, kernels, spec: spec.clone() })
    }

    /// Fills `io.logits`, `[n_logit_rows, vocab_size]`, from `io.hidden`.
    pub(super) fn forward(
        &mut self,
        cx: &mut Context<'_>,
        step: &Step<'_>,
        io: &mut Activations,
    ) -> Result<(), Error> {
        match step.top() {
            Some(top) => self.top(cx, 0, (top, step.wants_best()), io),
            None => self.all(cx, step.logit_rows(), io),
        }
    }

    /// The logits of row `row` of `io.hidden`, of which the `top` largest matter; those alone if they are enough and rows are left out.
    pub(super) fn top(
        &mut self,
        cx: &mut Context<'_>,
        row: usize,
        (top, alone): (usize, bool),
        io: &mut Activations,
    ) -> Result<(), Error> {
        let Some(mut flash) = self.flash.take() else { return self.all(cx, std::iter::once(row), io) };
        let done = if flash.leaves_out(top) {
            self.normed(cx, row, 0, &io.hidden).map(|()| {
                cx.scratch.act.quantize(
                    &self.kernels,
                    &cx.scratch.normed[..self.norm.len()],
                    self.norm.len(),
                );
                let read = flash.read(cx, &self.kernels, &self.spec.weight, top);
                if alone {
                    flash.best(&cx.scratch.head[..read], top, &mut io.best);
                } else {
                    flash.scatter(&cx.scratch.head[..read], &mut io.logits[..self.spec.weight.rows]);
                }
                cx.clock.lap("logits", 0);
            })
        } else {
            flash.counts.tokens += 1;
            flash.counts.bytes += cx.model.matrix(&self.spec.weight).len() as u64;
            self.all(cx, std::iter::once(row), io)
        };
        self.flash = Some(flash);
        done
    }

    /// Row `row` of `hidden`, normed, as row `to` of the scratch.
    fn normed(&self, cx: &mut Context<'_>, row: usize, to: usize, hidden: &[f32]) -> Result<(), Error> {
        let n = self.norm.len();
        let normed = &mut cx.scratch.normed[to * n..(to + 1) * n];
        self.kernels.rms_norm(&hidden[row * n..(row + 1) * n], &self.norm, self.spec.norm.eps, normed);
        check_head_input(normed)
    }

    /// Every logit of the rows wanted, ascending.
    pub(super) fn all(
        &self,
        cx: &mut Context<'_>,
        mut wanted: impl Iterator<Item = usize>,
        io: &mut Activations,
    ) -> Result<(), Error> {
        let HeadSpec { norm: _, weight, token_map: _, flash: _ } = &self.spec;
        let (vocab_size, hidden_size) = (weight.rows, weight.cols);
        let part = cx.model.matrix(weight);
        let rows = Affine4Rows::new(part, vocab_size, hidden_size);
        for logits in io.logits.chunks_mut(LOGIT_ROWS * vocab_size) {
            let mut n = 0;
            for row in wanted.by_ref().take((logits.len() / vocab_size).min(cx.scratch.tokens.len())) {
                self.normed(cx, row, n, &io.hidden)?;
                n += 1;
            }
            if n == 0 {
                break;
            }
            cx.scratch.act.quantize(&self.kernels, &cx.scratch.normed[..n * hidden_size], hidden_size);
            let acts = cx.scratch.act.rows(n, hidden_size);
            let tokens = &cx.scratch.tokens[..n];
            let out = &mut cx.scratch.head[..n * vocab_size];
            let (tile, min_run) = if n == 1 { (PANEL_ROWS, MIN_PANELS) } else { (TILE, 1) };
            cx.pool.run(
                Chunks::new(&mut *out, tile * n),
                min_run,
                &mut cx.scratch.workers,
                |_, first, out: &mut [f32]| {
                    if n == 1 {
                        let from = first * tile;
                        self.kernels.affine4_gemv(&rows, &acts.row(0), from..from + out.len(), out);
                        return;
                    }
                    for (i, out) in (first..).zip(out.chunks_mut(tile * n)) {
                        self.kernels.affine4_gemm(
                            &rows,
                            &acts,
                            tokens,
                            i * tile..i * tile + out.len() / n,
                            out,
                        );
                    }
                },
            );
            cx.clock.lap("head", part.len());

            // To token order, and out of the tiles.
            let out = &*out;
            let value = |i: usize, row: usize| {
                let start = row / TILE * TILE;
                out[start * n + i * TILE.min(vocab_size - start) + row % TILE]
            };
            for (i, logits) in logits.chunks_exact_mut(vocab_size).take(n).enumerate() {
                cx.pool.run(
                    Chunks::new(logits, 1),
                    MIN_LOGITS,
                    &mut cx.scratch.workers,
                    |_, first, run: &mut [f32]| match &self.row_of {
                        Some(row_of) if n == 1 => {
                            run.iter_mut().zip(&row_of[first..]).for_each(|(l, &row)| *l = out[row as usize]);
                        }
                        Some(row_of) => {
                            run.iter_mut()
                                .zip(&row_of[first..])
                                .for_each(|(l, &row)| *l = value(i, row as usize));
                        }
                        None if n == 1 => run.copy_from_slice(&out[first..][..run.len()]),
                        None => run.iter_mut().zip(first..).for_each(|(l, row)| *l = value(i, row)),
                    },
                );
            }
            cx.clock.lap("logits", 0);
        }
        Ok(())
    }
}
