//! What an architecture asks the converter to do, as data: metadata, and for each output tensor its geometry and
//! where its rows come from. Nothing outside `arch` knows tensor names, nothing inside it reads weights.

use std::sync::Arc;

use samara_format::{Metadata, TensorSpec};

use crate::error::Error;
use crate::source::{SourceFile, TensorRef};
use crate::ternary::At;

/// A matrix in a source file, `[rows, row_bytes]` bytes.
#[derive(Debug, Clone)]
pub(crate) struct Rows {
    /// Tensor name for messages; one matrix of a stack has its index in brackets.
    pub(crate) name: Arc<str>,
    /// Index of the source file.
    pub(crate) file: usize,
    /// Absolute byte offset of the first row.
    pub(crate) offset: u64,
    pub(crate) rows: usize,
    pub(crate) row_bytes: usize,
}

impl Rows {
    /// All of `tensor` as `rows` equal rows. The tensor's shape was checked before.
    pub(crate) fn whole(name: &str, tensor: &TensorRef, rows: usize) -> Self {
        let len = usize::try_from(tensor.len).expect("64-bit target");
        Self { name: name.into(), file: tensor.file, offset: tensor.offset, rows, row_bytes: len / rows }
    }

    /// Matrix `index` of `n` stacked in `tensor`, each of `rows` rows.
    pub(crate) fn stacked(name: &str, tensor: &TensorRef, n: usize, index: usize, rows: usize) -> Self {
        let each = tensor.len / n as u64;
        let row_bytes = usize::try_from(each).expect("64-bit target") / rows;
        let name = format!("{name}[{index}]").into();
        Self { name, file: tensor.file, offset: tensor.offset + index as u64 * each, rows, row_bytes }
    }

    /// Bytes of all rows.
    pub(crate) fn len(&self) -> usize {
        self.rows * self.row_bytes
    }

    /// Row `row` of a buffer that holds rows of this matrix.
    pub(crate) fn row<'b>(&self, buffer: &'b [u8], row: usize) -> &'b [u8] {
        &buffer[row * self.row_bytes..(row + 1) * self.row_bytes]
    }

    /// The place of row `row`, for messages.
    pub(crate) fn at(&self, row: usize) -> At<'_> {
        At { tensor: &self.name, row }
    }

    /// Reads `n` rows from `first` on into `buffer`, which is resized to fit.
    pub(crate) fn read(
        &self,
        files: &[SourceFile],
        first: usize,
        n: usize,
        buffer: &mut Vec<u8>,
    ) -> Result<(), Error> {
        buffer.resize(n * self.row_bytes, 0);
        files[self.file].read_exact_at(buffer, self.offset + (first * self.row_bytes) as u64)
    }
}

/// Ternary rows in one of the source forms.
#[derive(Debug, Clone)]
pub(crate) enum TernarySource {
    /// 2-bit codes with a scale for each row.
    Words { codes: Rows, scales: Rows },
    /// 2-bit codes with a scale and bias for each group of inputs.
    Groups { codes: Rows, scales: Rows, biases: Rows },
    /// bf16 weights.
    Bf16 { weights: Rows },
}

impl TernarySource {
    /// The matrices to read, in the order of their buffers.
    pub(crate) fn matrices(&self) -> Vec<&Rows> {
        match self {
            Self::Words { codes, scales } => vec![codes, scales],
            Self::Groups { codes, scales, biases } => vec![codes, scales, biases],
            Self::Bf16 { weights } => vec![weights],
        }
    }

    /// Source bytes.
    pub(crate) fn len(&self) -> usize {
        self.matrices().into_iter().map(Rows::len).sum()
    }
}

/// A ternary matrix of the source, `[rows, cols]`.
#[derive(Debug, Clone)]
pub(crate) struct TernaryRows {
    pub(crate) source: TernarySource,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

/// 4-bit rows in one of the source forms.
#[derive(Debug, Clone)]
pub(crate) enum AffineSource {
    /// Nibbles with a bf16 scale and bias for each 64 inputs: copied bit for bit.
    Words { nibbles: Rows, scales: Rows, biases: Rows },
    /// bf16 weights: quantised.
    Bf16 { weights: Rows },
}

impl AffineSource {
    /// The matrices to read, in the order of their buffers.
    pub(crate) fn matrices(&self) -> Vec<&Rows> {
        match self {
            Self::Words { nibbles, scales, biases } => vec![nibbles, scales, biases],
            Self::Bf16 { weights } => vec![weights],
        }
    }

    /// Source bytes.
    pub(crate) fn len(&self) -> usize {
        self.matrices().into_iter().map(Rows::len).sum()
    }
}

/// One part of a ternary block: matrices of equal width, stacked by rows.
pub(crate) type TernaryPart = Vec<TernaryRows>;

/// Head rows in clusters of equal size.
#[derive(Debug, Clone)]
pub(crate) struct Clusters {
    pub(crate) head: AffineSource,
    /// Inputs of a row.
    pub(crate) cols: usize,
    /// Token of each row, cluster by cluster.
    pub(crate) order: Arc<[u32]>,
    pub(crate) cluster_size: usize,
    /// The source's centroids; without them they are made of the rows.
    pub(crate) centroids: Option<AffineSource>,
}

/// How the bytes of one output tensor come about.
#[derive(Debug, Clone)]
pub(crate) enum Recipe {
    /// bf16 values as they are.
    Bf16 { values: Rows },
    /// A bf16 matrix in panels.
    Bf16Panels { values: Rows, cols: usize },
    /// Blocks of ternary parts.
    Ternary { blocks: Vec<Vec<TernaryPart>> },
    /// 4-bit rows; output row r is source row `order[r]` if there is an order.
    Affine { source: AffineSource, rows: usize, cols: usize, order: Option<Arc<[u32]>> },
    /// The token of each head row, U32.
    TokenMap { order: Arc<[u32]> },
    /// 4-bit centroids made of the rows of clusters. Their order is made by the conversion too, and stands for
    /// nothing until then.
    Centroids(Clusters),
    /// Bounds on the logits of each cluster.
    Bounds(Clusters),
}

impl Recipe {
    /// Source bytes read, the unit of progress.
    pub(crate) fn source_len(&self) -> u64 {
        let len = match self {
            Self::Bf16 { values } | Self::Bf16Panels { values, .. } => values.len(),
            Self::Ternary { blocks } => blocks.iter().flatten().flatten().map(|rows| rows.source.len()).sum(),
            Self::Affine { source, .. } => source.len(),
            Self::TokenMap { order } => 4 * order.len(),
            Self::Centroids(clusters) | Self::Bounds(clusters) => clusters.source_len(),
        };
        len as u64
    }

    /// Puts head rows in another order, where there is one.
    pub(crate) fn reorder(&mut self, order: &Arc<[u32]>) {
        match self {
            Self::Affine { order: Some(old), .. }
            | Self::TokenMap { order: old }
            | Self::Centroids(Clusters { order: old, .. })
            | Self::Bounds(Clusters { order: old, .. }) => *old = Arc::clone(order),
            Self::Bf16 { .. }
            | Self::Bf16Panels { .. }
            | Self::Ternary { .. }
            | Self::Affine { order: None, .. } => {}
        }
    }
}

impl Clusters {
    pub(crate) fn n_clusters(&self) -> usize {
        self.order.len() / self.cluster_size
    }

    /// Tokens of cluster `index`.
    pub(crate) fn tokens(&self, index: usize) -> &[u32] {
        &self.order[index * self.cluster_size..][..self.cluster_size]
    }

    /// Source bytes.
    fn source_len(&self) -> usize {
        self.head.len() + self.centroids.as_ref().map_or(0, AffineSource::len)
    }
}

/// One tensor of the output.
#[derive(Debug, Clone)]
pub(crate) struct Output {
    pub(crate) spec: TensorSpec,
    pub(crate) recipe: Recipe,
}

/// A checkpoint understood by its architecture.
#[derive(Debug)]
pub(crate) struct Draft {
    /// Human-readable kind of the source, such as "2-bit MLX".
    pub(crate) kind: &'static str,
    pub(crate) vocab_size: u64,
    /// `general.architecture`, `model.*` and `flash.*`.
    pub(crate) metadata: Metadata,
    /// In file order.
    pub(crate) outputs: Vec<Output>,
    /// Things a person may want to know.
    pub(crate) notes: Vec<String>,
}
