//! An opened model: the mapped file, its architecture and the settings it carries.

use std::path::Path;

use samara_format::{Access, Dtype, SamaraFile};

use crate::{
    arch::Architecture,
    error::Error,
    flash::Bound,
    spec::{BlockSpec, MatrixRef},
    text::{ChatTemplate, Tokenizer},
};

/// Sampling settings the model's makers recommend, as the file records them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GenerationDefaults {
    /// Softmax temperature.
    pub temperature: f32,
    /// Nucleus mass.
    pub top_p: f32,
    /// Candidates kept.
    pub top_k: usize,
}

/// A model ready to be compiled.
#[derive(Debug)]
pub struct Model {
    file: SamaraFile,
    architecture: Architecture,
    generation: GenerationDefaults,
    stop_ids: Vec<u32>,
}

impl Model {
    /// Opens a file and checks its architecture. Weights are not read.
    ///
    /// # Errors
    /// Whatever is wrong with the container, the metadata or the tensors' shapes.
    pub fn open(path: &Path, access: Access) -> Result<Self, Error> {
        let file = SamaraFile::open(path, access)?;
        let architecture = Architecture::from_index(file.index())?;
        let metadata = file.index().metadata();
        let generation = GenerationDefaults {
            temperature: metadata.f64("generation.temperature")? as f32,
            top_p: metadata.f64("generation.top_p")? as f32,
            top_k: metadata.u64("generation.top_k")? as usize,
        };
        let stop_ids = metadata
            .u64s("tokenizer.stop_ids")?
            .iter()
            .map(|&id| {
                u32::try_from(id).map_err(|_| Error::InvalidMetadata {
                    key: "tokenizer.stop_ids",
                    found: format!("{id} is not a token id"),
                })
            })
            .collect::<Result<_, _>>()?;
        Ok(Model { file, architecture, generation, stop_ids })
    }

    /// The container.
    pub fn file(&self) -> &SamaraFile {
        &self.file
    }

    /// Blocks and dimensions.
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// The makers' sampling settings.
    pub fn generation(&self) -> GenerationDefaults {
        self.generation
    }

    /// Tokens that end an answer.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// The tokenizer in the file. Takes a moment: vocabularies are large.
    ///
    /// # Errors
    /// A tokenizer of another kind than this version reads.
    pub fn tokenizer(&self) -> Result<Tokenizer, Error> {
        Ok(Tokenizer::from_json(self.file.index().metadata().str("tokenizer.json")?)?)
    }

    /// The chat template in the file; `tokenizer` says which texts are control tokens.
    ///
    /// # Errors
    /// A template that does not parse.
    pub fn chat_template(&self, tokenizer: &Tokenizer) -> Result<ChatTemplate, Error> {
        Ok(ChatTemplate::new(self.file.index().metadata().str("tokenizer.chat_template")?, tokenizer)?)
    }

    /// Bytes of a matrix of a tensor with one block.
    pub(crate) fn matrix(&self, matrix: &MatrixRef) -> &[u8] {
        self.file.part(&self.file.index().tensors()[matrix.tensor], 0, matrix.part)
    }

    /// Bytes of one part of one expert.
    pub(crate) fn expert(&self, tensor: usize, expert: usize, part: usize) -> &[u8] {
        self.file.part(&self.file.index().tensors()[tensor], expert, part)
    }

    /// Says that a matrix is going to be read.
    pub(crate) fn will_need(&self, matrix: &MatrixRef) {
        self.file.will_need(&self.file.index().tensors()[matrix.tensor], 0);
    }

    /// Says that an expert is going to be read.
    pub(crate) fn will_need_expert(&self, tensor: usize, expert: usize) {
        self.file.will_need(&self.file.index().tensors()[tensor], expert);
    }

    /// A BF16 vector, widened.
    pub(crate) fn vector(&self, matrix: &MatrixRef) -> Vec<f32> {
        debug_assert_eq!(
            self.file.index().tensors()[matrix.tensor].parts[matrix.part].spec.dtype,
            Dtype::Bf16
        );
        self.matrix(matrix)
            .chunks_exact(2)
            .take(matrix.cols)
            .map(|pair| half::bf16::from_le_bytes([pair[0], pair[1]]).to_f32())
            .collect()
    }

    /// Tokens of the head's rows, checked to be a permutation.
    pub(crate) fn token_map(&self, matrix: &MatrixRef) -> Result<Vec<u32>, Error> {
        let map: Vec<u32> = self
            .matrix(matrix)
            .chunks_exact(4)
            .take(matrix.cols)
            .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect();
        let mut seen = vec![false; map.len()];
        for (row, &token) in map.iter().enumerate() {
            match seen.get_mut(token as usize) {
                Some(seen) if !*seen => *seen = true,
                _ => return Err(Error::TokenMap { row, token }),
            }
        }
        Ok(map)
    }

    /// Row of the head that holds each token's logit: the inverse of [`token_map`](Self::token_map).
    pub(crate) fn row_of(&self, matrix: &MatrixRef) -> Result<Vec<u32>, Error> {
        let map = self.token_map(matrix)?;
        let mut row_of = vec![0; map.len()];
        map.iter().zip(0..).for_each(|(&token, row)| row_of[token as usize] = row);
        Ok(row_of)
    }

    /// Bounds of the head's clusters, each checked to be one.
    pub(crate) fn bounds(&self, matrix: &MatrixRef) -> Result<Vec<Bound>, Error> {
        let words = self.matrix(matrix).as_chunks::<4>().0;
        let values: Vec<f32> =
            words[..matrix.cols].iter().map(|word| f32::from_bits(u32::from_le_bytes(*word))).collect();
        let of = |(cluster, values): (usize, &[f32; Bound::WORDS])| {
            let [high, low, radius, norm, centroid_magnitude, row_magnitude] = *values;
            let sound = values.iter().all(|value| value.is_finite())
                && high >= low
                && radius >= 0.0
                && norm >= 0.0
                && centroid_magnitude >= norm * (1.0 - f32::EPSILON)
                && row_magnitude >= radius;
            if !sound {
                return Err(Error::HeadBounds { cluster, found: format!("{values:?}") });
            }
            Ok(Bound { high, low, radius, norm, centroid_magnitude, row_magnitude })
        };
        values.as_chunks().0.iter().enumerate().map(of).collect()
    }

    /// Bytes of the head's rows.
    pub fn head_bytes(&self) -> u64 {
        let len = |block: &BlockSpec| match block {
            BlockSpec::Head(head) => self.matrix(&head.weight).len() as u64,
            BlockSpec::Embed(_) | BlockSpec::Layer(_) => 0,
        };
        self.architecture.blocks.iter().map(len).sum()
    }

    /// Weight bytes one decoded token reads: every dense tensor once, one embedding row, and
    /// `n_used` experts a layer. Padding inside tensors counts, since it is read.
    pub fn decode_bytes(&self) -> u64 {
        let tensors = self.file.index().tensors();
        let part = |m: &MatrixRef| tensors[m.tensor].parts[m.part].len;
        self.architecture
            .blocks
            .iter()
            .map(|block| match block {
                BlockSpec::Embed(embed) => part(&embed.weight) / embed.weight.rows as u64,
                BlockSpec::Layer(layer) => {
                    let attn = &layer.attn;
                    let norms = attn.qk_norm.map_or(0, |n| part(&n.q.weight) + part(&n.k.weight));
                    let moe = &layer.moe;
                    let expert: u64 = tensors[moe.experts].parts.iter().map(|p| p.len).sum();
                    part(&attn.norm.weight)
                        + part(&attn.qkv)
                        + norms
                        + part(&attn.o)
                        + part(&moe.norm.weight)
                        + part(&moe.router)
                        + moe.n_used as u64 * expert
                }
                BlockSpec::Head(head) => part(&head.norm.weight) + part(&head.weight),
            })
            .sum()
    }
}
