//! Embedding rows and the head.

use std::ops::Range;

use samara_format::Affine4Layout;

use super::super::{
    made::bf16,
    trial::{Difference, Trial, equal, words},
};
use super::gemv::Row;
use super::quantized::{Quantized, Within, worst_within};
use crate::{backend::wgpu::device::words_of, error::Error};

/// An AFFINE4 matrix as the GPU gets it, and as numbers.
pub(in crate::backend::wgpu::check) struct Affine {
    /// The part, or its first panels.
    pub(in crate::backend::wgpu::check) words: Vec<u32>,
    pub(in crate::backend::wgpu::check) rows: usize,
    pub(in crate::backend::wgpu::check) cols: usize,
    /// `[rows, cols]`.
    pub(in crate::backend::wgpu::check) weights: Vec<f64>,
}

impl Affine {
    /// The first `rows` rows, whole panels or all, of an AFFINE4 part.
    pub(in crate::backend::wgpu::check) fn of(part: &[u8], rows: usize, cols: usize) -> Self {
        let layout = Affine4Layout::new(rows, cols).expect("a matrix of a file");
        let part = &part[..layout.len()];
        let (mut nibbles, mut scales) = (vec![0; cols], vec![0; cols / 64]);
        let mut biases = scales.clone();
        let mut weights = Vec::with_capacity(rows * cols);
        for row in 0..rows {
            layout.unpack_row(part, row, &mut nibbles, &mut scales, &mut biases);
            weights.extend(nibbles.iter().enumerate().map(|(i, nibble)| {
                let [scale, bias] = [scales[i / 64], biases[i / 64]].map(|bits| f64::from(bf16(bits.into())));
                f64::from(*nibble) * scale + bias
            }));
        }
        Affine { words: words_of(part), rows, cols, weights }
    }

    /// A made-up one, with scales of both signs.
    #[cfg(test)]
    pub(in crate::backend::wgpu::check) fn made(
        made: &mut super::super::made::Made,
        rows: usize,
        cols: usize,
    ) -> Self {
        let layout = Affine4Layout::new(rows, cols).expect("a small matrix");
        let nibbles: Vec<u8> = (0..rows * cols).map(|_| made.below(16) as u8).collect();
        let mut bits = |size| (made.value(size).to_bits() >> 16) as u16;
        let (scales, biases): (Vec<u16>, Vec<u16>) =
            (0..rows * cols / 64).map(|_| (bits(0.01), bits(0.05))).unzip();
        let mut part = vec![0; layout.len()];
        layout.pack(&nibbles, &scales, &biases, &mut part);
        Affine::of(&part, rows, cols)
    }

    fn panel_words(&self) -> usize {
        self.words.len() / self.rows.div_ceil(4)
    }

    /// Some panels' words.
    pub(super) fn part(&self, panels: &Range<usize>) -> Vec<u32> {
        self.words[panels.start * self.panel_words()..panels.end * self.panel_words()].to_vec()
    }

    /// Constants of the head's arithmetic (`lib/head_rows`) for these panels, so many to a workgroup.
    pub(super) fn constants(&self, eps: f32, panels: &Range<usize>, each: usize) -> [(&'static str, f64); 6] {
        [
            ("COLS", self.cols as f64),
            ("ROWS", self.rows as f64),
            ("EPS", eps.into()),
            ("FIRST_PANEL", panels.start as f64),
            ("END_PANEL", panels.end as f64),
            ("PANELS", each as f64),
        ]
    }

    /// All panels, `split` at a time.
    pub(super) fn splits(&self, split: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let n_panels = self.rows.div_ceil(4);
        (0..n_panels).step_by(split).map(move |first| first..n_panels.min(first + split))
    }
}

/// `embed` of `tokens`, with the rows from `per_split` on, a multiple of 4, in a second buffer.
///
/// # Errors
/// Those of the device.
pub(in crate::backend::wgpu::check) fn embed(
    trial: &Trial<'_>,
    w: &Affine,
    tokens: &[u32],
    per_split: usize,
) -> Result<Difference, Error> {
    let rows = tokens.iter().flat_map(|token| [*token, 0, 0, 0]).collect();
    let (first, second) = w.words.split_at((per_split / 4 * w.panel_words()).min(w.words.len()));
    let second = if second.is_empty() { &[0; 4] } else { second };
    let mut buffers = [rows, first.to_vec(), second.to_vec(), vec![0; tokens.len() * w.cols]];
    let per_split = if per_split >= w.rows { u32::MAX - 3 } else { per_split as u32 };
    let constants = [("COLS", w.cols as f64), ("PER_SPLIT", per_split.into())];
    trial.run("embed", &constants, &mut buffers, [tokens.len() as u32, 1, 1])?;
    let expected: Vec<Within> = tokens
        .iter()
        .flat_map(|token| &w.weights[*token as usize * w.cols..][..w.cols])
        .map(|value| Within { value: *value, slack: 0.0 })
        .collect();
    Ok(Difference::of("embed", worst_within(&buffers[3], &expected)))
}

/// Orders as f32 values do.
pub(super) fn order_key(bits: u32) -> u32 {
    match bits {
        0x8000_0000 => 0x8000_0000,
        bits if bits >> 31 == 1 => !bits,
        bits => bits ^ 0x8000_0000,
    }
}

/// The f32 of a key, as bits.
pub(in crate::backend::wgpu::check) fn key_bits(key: u32) -> u32 {
    if key >> 31 == 1 { key ^ 0x8000_0000 } else { !key }
}

/// Keys of the largest of each 32 logits.
pub(super) fn maxima_of(logits: &[u32]) -> Vec<u32> {
    logits.chunks(32).map(|l| l.iter().copied().map(order_key).fold(0, u32::max)).collect()
}

/// `head` for the rows `wanted` of the hidden states of `row.h`, `[n, cols]`, in dispatches of `split` panels; `panels` to a
/// workgroup.
///
/// # Errors
/// Those of the device.
pub(in crate::backend::wgpu::check) fn head(
    trial: &Trial<'_>,
    w: &Affine,
    row: &Row<'_>,
    wanted: &[u32],
    split: usize,
    panels: usize,
) -> Result<Difference, Error> {
    let n_blocks = w.rows.div_ceil(32);
    let mut logits = vec![0; wanted.len() * w.rows];
    let mut maxima = vec![0; wanted.len() * n_blocks];
    for range in w.splits(split) {
        let mut buffers = [wanted.to_vec(), words(row.h), words(row.norm), w.part(&range), logits, maxima];
        let grid = [range.len().div_ceil(panels) as u32, wanted.len() as u32, 1];
        trial.run("head", &w.constants(row.eps, &range, panels), &mut buffers, grid)?;
        [.., logits, maxima] = buffers;
    }
    let mut found = 0.0f64;
    for ((logits, maxima), &at) in logits.chunks_exact(w.rows).zip(maxima.chunks_exact(n_blocks)).zip(wanted)
    {
        let h = &row.h[at as usize * w.cols..][..w.cols];
        let normed = Row { h, ..*row }.normed();
        found = found.max(worst_within(logits, &Quantized::of(&normed).times(&w.weights)));
        found = found.max(equal(maxima, &maxima_of(logits)[..]));
    }
    Ok(Difference::of("head", found))
}
