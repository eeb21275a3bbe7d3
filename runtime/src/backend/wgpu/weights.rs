//! Weights on a device: the file's bytes as they are, in one buffer or in two.
//!
//! A binding may be shorter than a tensor (128 MiB is what every adapter grants, and a layer's experts or the head take
//! more), so a tensor of equal units (expert blocks, panels of 4 rows) may be cut in two after a whole unit. Kernels that read such
//! tensors bind both halves.

use std::ops::Range;

use samara_format::{Affine4Layout, SamaraFile, Tensor};

use super::{
    device::{Gpu, bytes_of},
    inventory::{BufferId, Buffers, Inventory},
};
use crate::{
    error::Error,
    model::Model,
    spec::{MatrixRef, RopeSpec},
};

/// Bytes of one write. Each is copied to memory that the device can read.
const PIECE: usize = 4 << 20;

/// Bytes written before the device is waited for, which bounds the copies that are under way.
const UNDER_WAY: u64 = 64 << 20;

/// A tensor of equal units in one buffer or two.
#[derive(Clone, Copy, Debug)]
pub(super) struct Split {
    /// The second is a dummy where all fits the first.
    pub(super) buffers: [BufferId; 2],
    /// Units in the first.
    pub(super) per_split: usize,
}

/// What a buffer is filled with.
#[derive(Clone, Debug)]
enum Source {
    /// Bytes of a tensor.
    File { tensor: usize, range: Range<usize> },
    /// A BF16 vector, as f32.
    Vectors(Vec<MatrixRef>),
    /// Cosine and sine of each position and pair, computed in f64.
    Rope { rope: RopeSpec, context: usize },
    /// These words.
    Words(Vec<u32>),
}

/// Buffers to fill, and with what.
#[derive(Debug, Default)]
pub(super) struct Uploads {
    entries: Vec<(BufferId, Source)>,
}

fn tensor_of(model: &Model, tensor: usize) -> &Tensor {
    &model.file().index().tensors()[tensor]
}

/// Panels of the first buffer of two are a multiple of this: kernels give 32 rows to a maximum.
const PANEL_GRANULE: usize = 8;

/// Units of `unit` bytes that go to the first buffer, a multiple of `granule` if there is a second, and to the second.
///
/// # Errors
/// Why two buffers do not do.
fn cut(
    what: &str,
    (n_units, unit, granule): (usize, u64, usize),
    max_buffer: u64,
) -> Result<[usize; 2], String> {
    let fit = usize::try_from(max_buffer / unit.max(1)).unwrap_or(usize::MAX);
    if n_units <= fit {
        return Ok([n_units, 0]);
    }
    let first = fit - fit % granule;
    if n_units > first + fit {
        let (bytes, most) = (n_units as u64 * unit, (first + fit) as u64 * unit);
        return Err(format!("{what} takes {bytes} bytes, and two buffers hold {most} there"));
    }
    Ok([first, n_units - first])
}

impl Uploads {
    /// A matrix of a tensor with one block.
    pub(super) fn matrix(
        &mut self,
        list: &mut Inventory,
        label: &'static str,
        model: &Model,
        m: &MatrixRef,
    ) -> BufferId {
        let part = &tensor_of(model, m.tensor).parts[m.part];
        let start = part.offset as usize;
        let id = list.add(label, part.len);
        let range = start..start + part.len as usize;
        self.entries.push((id, Source::File { tensor: m.tensor, range }));
        id
    }

    /// All blocks of a tensor, cut between blocks.
    ///
    /// # Errors
    /// A tensor too long for two buffers.
    pub(super) fn blocks(
        &mut self,
        list: &mut Inventory,
        gpu: &Gpu,
        model: &Model,
        tensor: usize,
        dummy: BufferId,
    ) -> Result<Split, Error> {
        let of = tensor_of(model, tensor);
        let (stride, n) = (of.block_stride, of.n_blocks as usize);
        self.units(list, gpu, "experts", tensor, 0, (n, stride, 1), dummy)
    }

    /// An AFFINE4 matrix, cut between panels of 4 rows.
    ///
    /// # Errors
    /// A matrix too long for two buffers.
    pub(super) fn panels(
        &mut self,
        list: &mut Inventory,
        gpu: &Gpu,
        label: &'static str,
        model: &Model,
        m: &MatrixRef,
        dummy: BufferId,
    ) -> Result<Split, Error> {
        let layout = Affine4Layout::new(m.rows, m.cols).expect("a shape that the file has");
        let start = tensor_of(model, m.tensor).parts[m.part].offset as usize;
        let units = (layout.n_panels(), layout.panel_len() as u64, PANEL_GRANULE);
        self.units(list, gpu, label, m.tensor, start, units, dummy)
    }

    #[expect(clippy::too_many_arguments, reason = "called twice, above")]
    fn units(
        &mut self,
        list: &mut Inventory,
        gpu: &Gpu,
        label: &'static str,
        tensor: usize,
        start: usize,
        units: (usize, u64, usize),
        dummy: BufferId,
    ) -> Result<Split, Error> {
        let parts = cut(label, units, gpu.max_buffer()).map_err(|reason| gpu.error(reason))?;
        let mut buffers = [dummy; 2];
        let mut at = start;
        let (_, unit, _) = units;
        for (n, buffer) in parts.into_iter().zip(&mut buffers) {
            if n == 0 {
                continue;
            }
            let bytes = n * unit as usize;
            *buffer = list.add(label, bytes as u64);
            self.entries.push((*buffer, Source::File { tensor, range: at..at + bytes }));
            at += bytes;
        }
        Ok(Split { buffers, per_split: parts[0] })
    }

    /// BF16 vectors one after another, as f32.
    pub(super) fn vectors(
        &mut self,
        list: &mut Inventory,
        label: &'static str,
        vectors: Vec<MatrixRef>,
    ) -> BufferId {
        let id = list.words(label, vectors.iter().map(|m| m.cols).sum());
        self.entries.push((id, Source::Vectors(vectors)));
        id
    }

    /// `[context, dim / 2]` of (cos, sin).
    pub(super) fn rope(&mut self, list: &mut Inventory, rope: RopeSpec, context: usize) -> BufferId {
        let id = list.words("rope", context * rope.dim);
        self.entries.push((id, Source::Rope { rope, context }));
        id
    }

    /// These words.
    pub(super) fn words(&mut self, list: &mut Inventory, label: &'static str, words: Vec<u32>) -> BufferId {
        let id = list.words(label, words.len());
        self.entries.push((id, Source::Words(words)));
        id
    }

    /// Bytes to upload from the file.
    pub(super) fn bytes(&self) -> u64 {
        let of = |source: &Source| match source {
            Source::File { range, .. } => range.len() as u64,
            Source::Vectors(_) | Source::Rope { .. } | Source::Words(_) => 0,
        };
        self.entries.iter().map(|(_, source)| of(source)).sum()
    }

    /// Fills the buffers. `progress` is told the bytes of the file written so far, and those in all.
    ///
    /// # Errors
    /// A device that is lost meanwhile.
    pub(super) fn fill(
        &self,
        gpu: &Gpu,
        model: &Model,
        buffers: &Buffers,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Error> {
        let all = self.bytes();
        let (mut done, mut under_way) = (0, 0);
        progress(0, all);
        for (id, source) in &self.entries {
            match source {
                Source::File { tensor, range } => {
                    let bytes = file_bytes(model.file(), *tensor, range);
                    for (i, piece) in bytes.chunks(PIECE).enumerate() {
                        gpu.queue().write_buffer(&buffers[*id], (i * PIECE) as u64, piece);
                        under_way += piece.len() as u64;
                        done += piece.len() as u64;
                        if under_way >= UNDER_WAY {
                            under_way = 0;
                            flush(gpu)?;
                            progress(done, all);
                        }
                    }
                }
                Source::Vectors(vectors) => {
                    let words: Vec<u32> =
                        vectors.iter().flat_map(|m| model.vector(m)).map(f32::to_bits).collect();
                    gpu.queue().write_buffer(&buffers[*id], 0, &bytes_of(&words));
                }
                Source::Rope { rope, context } => write_rope(gpu, &buffers[*id], rope, *context),
                Source::Words(words) => gpu.queue().write_buffer(&buffers[*id], 0, &bytes_of(words)),
            }
        }
        flush(gpu)?;
        progress(done, all);
        Ok(())
    }
}

fn file_bytes<'a>(file: &'a SamaraFile, tensor: usize, range: &Range<usize>) -> &'a [u8] {
    &file.bytes(&file.index().tensors()[tensor])[range.clone()]
}

fn flush(gpu: &Gpu) -> Result<(), Error> {
    let submission = gpu.queue().submit([]);
    gpu.wait(Some(submission))
}

fn write_rope(gpu: &Gpu, buffer: &wgpu::Buffer, rope: &RopeSpec, context: usize) {
    let half = rope.dim / 2;
    let frequencies: Vec<f64> = (0..half).map(|i| rope.frequency(i)).collect();
    let rows = (PIECE / (8 * half)).max(1);
    for first in (0..context).step_by(rows) {
        let positions = first..context.min(first + rows);
        let words: Vec<u32> = positions
            .flat_map(|position| {
                frequencies.iter().flat_map(move |frequency| {
                    let (sin, cos) = RopeSpec::sin_cos(position as f64 * frequency);
                    [cos.to_bits(), sin.to_bits()]
                })
            })
            .collect();
        gpu.queue().write_buffer(buffer, (8 * half * first) as u64, &bytes_of(&words));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_is_cut_between_units_or_refused() {
        for (n_units, granule, max, expected) in [
            (1, 1, 10, Some([1, 0])),
            (10, 1, 100, Some([10, 0])),
            (11, 1, 100, Some([10, 1])),
            (11, 1, 109, Some([10, 1])),
            (20, 1, 100, Some([10, 10])),
            (21, 1, 100, None),
            (1, 1, 9, None),
            (10, 8, 100, Some([10, 0])),
            (11, 8, 100, Some([8, 3])),
            (18, 8, 100, Some([8, 10])),
            (19, 8, 100, None),
        ] {
            assert_eq!(cut("w", (n_units, 10, granule), max).ok(), expected, "{n_units} by {granule}, {max}");
        }
    }
}
