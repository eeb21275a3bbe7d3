//! From a recipe to the bytes of a tensor, in units that any thread can make.
//!
//! A tensor is cut into units (a block of ternary parts, or a batch of whole panels) whose bytes depend on the
//! source alone, so the result is the same for any number of threads. Each unit is made in a slot whose buffers are
//! used again and again: memory in use is the number of slots times the largest unit, whatever the checkpoint's size.

use samara_format::{Affine4Layout, Bf16PanelLayout, Tensor, TernaryLayout};

use crate::affine;
use crate::error::Error;
use crate::recipe::{AffineSource, Recipe, Rows, TernaryPart, TernaryRows, TernarySource};
use crate::source::SourceFile;
use crate::ternary::{self, Counts};

/// Rows of a 4-bit or router matrix in one unit; a multiple of the 4 rows of a panel.
pub(crate) const UNIT_ROWS: usize = 256;

/// Buffers of one unit in the making.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    /// Source bytes: weights or codes, scales, biases.
    source: [Vec<u8>; 3],
    /// Codes or nibbles, one a byte.
    codes: Vec<u8>,
    /// Scales, bf16 bits.
    scales: Vec<u16>,
    /// Biases, bf16 bits.
    pub(crate) biases: Vec<u16>,
    /// The unit's bytes as they go into the file.
    pub(crate) out: Vec<u8>,
}

/// One output tensor to be made.
pub(crate) struct Job<'a> {
    pub(crate) files: &'a [SourceFile],
    pub(crate) recipe: &'a Recipe,
    /// Its place in the file.
    pub(crate) tensor: &'a Tensor,
    pub(crate) ternarize: bool,
}

impl Job<'_> {
    /// How many units the tensor is cut into.
    pub(crate) fn n_units(&self) -> usize {
        match self.recipe {
            Recipe::Bf16 { .. } | Recipe::TokenMap { .. } => 1,
            Recipe::Bf16Panels { values, .. } => values.rows.div_ceil(UNIT_ROWS),
            Recipe::Ternary { blocks } => blocks.len(),
            Recipe::Affine { rows, .. } => rows.div_ceil(UNIT_ROWS),
            Recipe::Centroids(clusters) | Recipe::Bounds(clusters) => clusters.n_units(),
        }
    }

    /// Memory of one unit's slot, bytes.
    pub(crate) fn unit_memory(&self) -> u64 {
        if let Recipe::Centroids(clusters) | Recipe::Bounds(clusters) = self.recipe {
            return clusters.unit_memory() + self.tensor.len / self.n_units() as u64;
        }
        let source = self.recipe.source_len() / self.n_units() as u64;
        let out = self.tensor.len / self.n_units() as u64;
        let unpacked = match self.recipe {
            Recipe::Bf16 { .. } | Recipe::TokenMap { .. } => 0,
            Recipe::Bf16Panels { .. } => source,
            Recipe::Ternary { blocks } => {
                let parts = blocks.first().into_iter().flatten();
                let cells = parts.map(|part| part.iter().map(|rows| rows.rows * rows.cols).sum::<usize>());
                cells.max().unwrap_or(0) as u64
            }
            Recipe::Affine { cols, .. } => affine_memory(*cols),
            Recipe::Centroids(_) | Recipe::Bounds(_) => 0,
        };
        source + unpacked + out
    }

    /// Makes unit `index` in `slot.out`. Returns what was seen and the source bytes used.
    pub(crate) fn unit(&self, index: usize, slot: &mut Slot) -> Result<(Counts, u64), Error> {
        match self.recipe {
            Recipe::Bf16 { values } => {
                values.read(self.files, 0, values.rows, &mut slot.out)?;
                refuse_not_finite(values, 0, &slot.out)?;
                Ok((Counts::default(), values.len() as u64))
            }
            Recipe::TokenMap { order } => {
                slot.out.clear();
                slot.out.extend(order.iter().flat_map(|token| token.to_le_bytes()));
                Ok((Counts::default(), 4 * order.len() as u64))
            }
            Recipe::Bf16Panels { values, cols } => self.panels(values, *cols, index, slot),
            Recipe::Ternary { blocks } => self.block(&blocks[index], slot),
            Recipe::Affine { source, rows, cols, order } => {
                let first = index * UNIT_ROWS;
                let n = UNIT_ROWS.min(rows - first);
                let rows = match order {
                    Some(order) => RowSet::Listed(&order[first..first + n]),
                    None => RowSet::Range(first, n),
                };
                let source_len = slot.read_affine(source, *cols, rows, self.files)?;
                slot.pack_affine(*cols);
                Ok((Counts::default(), source_len))
            }
            Recipe::Centroids(clusters) => {
                Ok((Counts::default(), clusters.centroids_unit(self.files, index, slot)?))
            }
            Recipe::Bounds(clusters) => {
                Ok((Counts::default(), clusters.bounds_unit(self.files, index, slot)?))
            }
        }
    }

    fn panels(
        &self,
        values: &Rows,
        cols: usize,
        index: usize,
        slot: &mut Slot,
    ) -> Result<(Counts, u64), Error> {
        let first = index * UNIT_ROWS;
        let n = UNIT_ROWS.min(values.rows - first);
        values.read(self.files, first, n, &mut slot.source[0])?;
        refuse_not_finite(values, first, &slot.source[0])?;
        slot.scales.clear();
        slot.scales.extend(ternary::bf16_bits(&slot.source[0]));
        let layout = Bf16PanelLayout::new(n, cols).expect("the file's layout was planned from these sizes");
        slot.out.resize(layout.len(), 0);
        layout.pack(&slot.scales, &mut slot.out);
        Ok((Counts::default(), slot.source[0].len() as u64))
    }

    fn block(&self, parts: &[TernaryPart], slot: &mut Slot) -> Result<(Counts, u64), Error> {
        let stride = usize::try_from(self.tensor.block_stride).expect("64-bit target");
        let mut counts = Counts::default();
        let mut source_len = 0;
        slot.out.clear();
        slot.out.resize(stride, 0);
        for (pieces, part) in parts.iter().zip(&self.tensor.parts) {
            slot.codes.clear();
            slot.scales.clear();
            for piece in pieces {
                self.ternary(piece, slot, &mut counts)?;
                source_len += piece.source.len() as u64;
            }
            let (rows, cols) = (slot.scales.len(), slot.codes.len() / slot.scales.len());
            let layout =
                TernaryLayout::new(rows, cols).expect("the file's layout was planned from these sizes");
            let offset = usize::try_from(part.offset).expect("64-bit target");
            layout.pack(&slot.codes, &slot.scales, &mut slot.out[offset..offset + layout.len()]);
        }
        Ok((counts, source_len))
    }

    /// Appends the codes and scales of one source matrix to the slot's.
    fn ternary(&self, matrix: &TernaryRows, slot: &mut Slot, counts: &mut Counts) -> Result<(), Error> {
        let TernaryRows { source, rows, cols } = matrix;
        let Slot { source: buffers, codes, scales, .. } = slot;
        for (from, buffer) in source.matrices().into_iter().zip(buffers.iter_mut()) {
            from.read(self.files, 0, *rows, buffer)?;
        }
        let start = codes.len();
        codes.resize(start + rows * cols, 0);
        for (row, codes) in codes[start..].chunks_exact_mut(*cols).enumerate() {
            scales.push(self.ternary_row(source, buffers, row, codes, counts)?);
        }
        Ok(())
    }

    /// Converts one row; returns its scale, bf16 bits.
    fn ternary_row(
        &self,
        source: &TernarySource,
        [first, second, third]: &[Vec<u8>; 3],
        row: usize,
        codes: &mut [u8],
        counts: &mut Counts,
    ) -> Result<u16, Error> {
        match source {
            TernarySource::Bf16 { weights } => {
                ternary::bf16_row(weights.at(row), weights.row(first, row), self.ternarize, codes, counts)
            }
            TernarySource::Words { codes: words, scales } => {
                let scale = ternary::bf16_bits(scales.row(second, row)).next().unwrap_or(0);
                ternary::words_row(words.at(row), words.row(first, row), scale, codes, counts)
            }
            TernarySource::Groups { codes: words, scales, biases } => {
                let scale =
                    ternary::row_scale(scales.at(row), scales.row(second, row), biases.row(third, row))?;
                ternary::words_row(words.at(row), words.row(first, row), scale, codes, counts)
            }
        }
    }
}

/// Memory of nibbles, scales and biases of one unit's rows, bytes.
pub(crate) fn affine_memory(cols: usize) -> u64 {
    (UNIT_ROWS * cols) as u64 * 5 / 4
}

impl Slot {
    /// Reads rows into the slot's codes, scales and biases, in place of what was there. Returns the source bytes.
    pub(crate) fn read_affine(
        &mut self,
        source: &AffineSource,
        cols: usize,
        rows: RowSet<'_>,
        files: &[SourceFile],
    ) -> Result<u64, Error> {
        let (n, n_groups) = (rows.len(), cols / affine::GROUP);
        let Self { source: buffers, codes, scales, biases, out: _ } = self;
        let mut source_len = 0;
        for (from, buffer) in source.matrices().into_iter().zip(buffers.iter_mut()) {
            rows.read(from, files, buffer)?;
            source_len += buffer.len() as u64;
        }
        codes.resize(n * cols, 0);
        scales.resize(n * n_groups, 0);
        biases.resize(n * n_groups, 0);
        let groups = scales.chunks_exact_mut(n_groups).zip(biases.chunks_exact_mut(n_groups));
        for (i, (nibbles, (scales, biases))) in codes.chunks_exact_mut(cols).zip(groups).enumerate() {
            affine_row(source, buffers, (i, rows.get(i)), nibbles, scales, biases)?;
        }
        Ok(source_len)
    }

    /// Each row in the slot: nibbles `[cols]`, scales and biases `[cols / 64]`.
    pub(crate) fn affine_rows(&self, cols: usize) -> impl Iterator<Item = (&[u8], &[u16], &[u16])> {
        let n_groups = cols / affine::GROUP;
        let groups = self.scales.chunks_exact(n_groups).zip(self.biases.chunks_exact(n_groups));
        self.codes.chunks_exact(cols).zip(groups).map(|(nibbles, (scales, biases))| (nibbles, scales, biases))
    }

    /// Quantises `values`, `[rows, cols]`, finite, into the slot's codes, scales and biases.
    pub(crate) fn quantise(&mut self, values: &[f32]) {
        self.codes.resize(values.len(), 0);
        self.scales.clear();
        self.biases.clear();
        let (groups, _) = values.as_chunks::<{ affine::GROUP }>();
        for (group, nibbles) in groups.iter().zip(self.codes.chunks_exact_mut(affine::GROUP)) {
            let (scale, bias) = affine::quantise_group(group, nibbles);
            self.scales.push(scale);
            self.biases.push(bias);
        }
    }

    /// Packs the slot's codes, scales and biases into its bytes.
    pub(crate) fn pack_affine(&mut self, cols: usize) {
        let Self { source: _, codes, scales, biases, out } = self;
        let layout = Affine4Layout::new(codes.len() / cols, cols)
            .expect("the file's layout was planned from these sizes");
        out.resize(layout.len(), 0);
        layout.pack(codes, scales, biases, out);
    }
}

/// Copies or quantises row `i` of the buffers, which is row `row` of the source.
fn affine_row(
    source: &AffineSource,
    [first, second, third]: &[Vec<u8>; 3],
    (i, row): (usize, usize),
    nibbles: &mut [u8],
    out_scales: &mut [u16],
    out_biases: &mut [u16],
) -> Result<(), Error> {
    match source {
        AffineSource::Bf16 { weights } => {
            affine::bf16_row(&weights.name, row, weights.row(first, i), nibbles, out_scales, out_biases)
        }
        AffineSource::Words { nibbles: words, scales, biases } => {
            affine::words_row(words.row(first, i), nibbles);
            affine::group_values(&scales.name, row, scales.row(second, i), out_scales)?;
            affine::group_values(&biases.name, row, biases.row(third, i), out_biases)
        }
    }
}

/// Rows of a source matrix: consecutive, or as listed.
#[derive(Clone, Copy)]
pub(crate) enum RowSet<'a> {
    Range(usize, usize),
    Listed(&'a [u32]),
}

impl RowSet<'_> {
    fn len(self) -> usize {
        match self {
            Self::Range(_, n) => n,
            Self::Listed(rows) => rows.len(),
        }
    }

    fn get(self, i: usize) -> usize {
        match self {
            Self::Range(first, _) => first + i,
            Self::Listed(rows) => rows[i] as usize,
        }
    }

    fn read(self, from: &Rows, files: &[SourceFile], buffer: &mut Vec<u8>) -> Result<(), Error> {
        let rows = match self {
            Self::Range(first, n) => return from.read(files, first, n, buffer),
            Self::Listed(rows) => rows,
        };
        buffer.resize(rows.len() * from.row_bytes, 0);
        for (buffer, &row) in buffer.chunks_exact_mut(from.row_bytes).zip(rows) {
            files[from.file].read_exact_at(buffer, from.offset + u64::from(row) * from.row_bytes as u64)?;
        }
        Ok(())
    }
}

/// Refuses NaN and infinities in plain bf16 tensors. `bytes` starts at row `first`.
fn refuse_not_finite(values: &Rows, first: usize, bytes: &[u8]) -> Result<(), Error> {
    let bad =
        ternary::bf16_bits(bytes).map(ternary::to_f32).enumerate().find(|(_, value)| !value.is_finite());
    let Some((i, value)) = bad else { return Ok(()) };
    let cols = values.row_bytes / 2;
    Err(Error::NotFinite { tensor: values.name.to_string(), row: first + i / cols, column: i % cols, value })
}
