//! Dispatches of the first and the last block, and of drawing a token.

mod flash;

use std::ops::Range;

pub(super) use self::flash::{Flash, flash};
#[cfg(test)]
pub(super) use self::flash::{PROBE_CLUSTERS, shares};
use super::{
    ahead::RING,
    inventory::BufferId,
    layer::per_split,
    ops::{Extent, Maker, Op},
    plan::{AheadPlan, EmbedPlan, HeadPlan, Scratch},
    weights::Split,
};
use crate::{
    error::Error,
    spec::{EmbedSpec, HeadSpec, MatrixRef, NormSpec},
};

/// Panels of a workgroup.
pub(super) const HEAD_PANELS: usize = 16;

/// Rows of a panel.
const PANEL_ROWS: usize = 4;

/// Token ids to hidden states.
///
/// # Errors
/// A kernel that does not compile.
pub(super) fn embed(maker: &Maker<'_>, scratch: &Scratch, plan: &EmbedPlan) -> Result<Op, Error> {
    let EmbedPlan { spec: EmbedSpec { weight }, weight: split } = plan;
    let [e0, e1] = split.buffers;
    let panels = weight.rows.div_ceil(PANEL_ROWS);
    let rows = match per_split(split, panels) {
        all if split.per_split >= panels => all - (PANEL_ROWS - 1) as f64,
        some => some * PANEL_ROWS as f64,
    };
    let row_bytes = (weight.cols / 2 + weight.cols / 16) as u64;
    maker.op(
        "embed",
        &[("COLS", weight.cols as f64), ("PER_SPLIT", rows)],
        &[scratch.rows, e0, e1, scratch.h],
        |extent: &Extent| [extent.n_tokens, 1, 1],
        move |extent| row_bytes * u64::from(extent.n_tokens),
    )
}

/// Norm and logits of the rows wanted, and the largest of each 32; a dispatch for each buffer of the weight.
///
/// # Errors
/// A kernel that does not compile.
pub(super) fn head(maker: &Maker<'_>, scratch: &Scratch, plan: &HeadPlan) -> Result<Vec<Op>, Error> {
    let HeadPlan { spec, norm, weight, panel_bytes, flash: _ } = plan;
    let panel_bytes = *panel_bytes;
    let of = |(w, range): (BufferId, Range<usize>)| {
        let n = range.len();
        maker.op(
            "head",
            &constants(&spec.norm, &spec.weight, &range, HEAD_PANELS),
            &[scratch.logit_rows, scratch.h, *norm, w, scratch.logits, scratch.maxima],
            move |extent| [n.div_ceil(HEAD_PANELS) as u32, extent.n_logit_rows, 1],
            move |_| n as u64 * panel_bytes,
        )
    };
    parts(&spec.weight, weight).map(of).collect()
}

/// The buffers of a matrix, and which panels each has.
fn parts(weight: &MatrixRef, split: &Split) -> impl Iterator<Item = (BufferId, Range<usize>)> {
    let panels = weight.rows.div_ceil(PANEL_ROWS);
    let ranges = [0..split.per_split.min(panels), split.per_split..panels];
    split.buffers.into_iter().zip(ranges).filter(|(_, range)| !range.is_empty())
}

/// What `lib/head_rows` has to know.
fn constants(
    norm: &NormSpec,
    weight: &MatrixRef,
    range: &Range<usize>,
    panels: usize,
) -> [(&'static str, f64); 6] {
    [
        ("COLS", weight.cols as f64),
        ("ROWS", weight.rows as f64),
        ("EPS", norm.eps.into()),
        ("FIRST_PANEL", range.start as f64),
        ("END_PANEL", range.end as f64),
        ("PANELS", panels as f64),
    ]
}

/// The next token, from the logits of row 0.
///
/// # Errors
/// A kernel that does not compile.
pub(super) fn select(
    maker: &Maker<'_>,
    scratch: &Scratch,
    plan: &AheadPlan,
    spec: &HeadSpec,
) -> Result<Op, Error> {
    let Scratch { logits, maxima, rows, status, .. } = *scratch;
    let AheadPlan { token_map, draw, uniforms, results } = *plan;
    maker.op(
        "select_token",
        &[
            ("ROWS", spec.weight.rows as f64),
            ("RING", RING as f64),
            ("MAPPED", f64::from(u8::from(spec.token_map.is_some()))),
        ],
        &[logits, maxima, token_map, draw, uniforms, rows, results, status],
        |_| [1, 1, 1],
        |_| 0,
    )
}
