//! The tensors of a synthetic checkpoint: names, dtypes and shapes of the two layouts, and how each row is made.

use std::sync::Arc;

use rayon::prelude::*;

use super::weights::{AffinePart, Clusters, Dense, Ternary, key, pack_nibbles};
use super::{SynthLayout, SynthSpec};
use crate::affine::{self, GROUP};

/// One tensor, made row by row.
#[derive(Debug, Clone)]
pub(super) struct SynthTensor {
    pub(super) name: String,
    pub(super) dtype: &'static str,
    pub(super) shape: Vec<u64>,
    pub(super) rows: u64,
    pub(super) row_bytes: u64,
    make: Make,
}

/// How a row is made.
#[derive(Debug, Clone)]
enum Make {
    DenseBf16(Arc<Dense>),
    DenseAffine(Arc<Dense>, AffinePart),
    Words(Arc<Ternary>),
    Scales(Arc<Ternary>),
    /// bf16 weights of the rows from `first` on.
    TernaryBf16(Arc<Ternary>, u64),
    /// Rows made before.
    Ready(Arc<[u8]>),
}

impl SynthTensor {
    /// Bytes.
    pub(super) fn len(&self) -> u64 {
        self.rows * self.row_bytes
    }

    /// Makes row `row`, `[row_bytes]`.
    pub(super) fn row(&self, row: u64, out: &mut [u8]) {
        match &self.make {
            Make::DenseBf16(matrix) => matrix.bf16(row, out),
            Make::DenseAffine(matrix, part) => matrix.affine(row, *part, out),
            Make::Words(matrix) => matrix.words(row, out),
            Make::Scales(matrix) => out.copy_from_slice(&matrix.scale(row).to_le_bytes()),
            Make::TernaryBf16(matrix, first) => matrix.bf16(first + row, out),
            Make::Ready(bytes) => out.copy_from_slice(&bytes[row as usize * out.len()..][..out.len()]),
        }
    }
}

/// All tensors but FlashHead's, sorted by name. The sizes were checked.
pub(super) fn model_tensors(spec: &SynthSpec) -> Vec<SynthTensor> {
    let mut list = List { spec, tensors: Vec::new() };
    let hidden = spec.hidden_size;
    list.affine("model.word_embeddings", &Arc::new(dense(spec, "model.word_embeddings", 0.0, 1.0)));
    list.affine("lm_head", &Arc::new(head(spec)));
    list.norm("model.norm.weight", hidden);
    for layer in 0..spec.n_layers {
        list.layer(layer);
    }
    list.tensors.sort_by(|left, right| left.name.cmp(&right.name));
    list.tensors
}

fn dense(spec: &SynthSpec, name: &str, mean: f32, deviation: f32) -> Dense {
    Dense { key: key(spec.seed, name), mean, deviation, clusters: None }
}

/// The head: logits of deviation 2, and with FlashHead data rows that lean towards their cluster's centre.
fn head(spec: &SynthSpec) -> Dense {
    let mut head = dense(spec, "lm_head", 0.0, 2.0 / (spec.hidden_size as f32).sqrt());
    if let Some(flash) = spec.flash {
        let mut cluster_of = vec![0; spec.vocab_size as usize];
        for (place, id) in token_map(spec).into_iter().enumerate() {
            cluster_of[id as usize] = (place as u64 / flash.cluster_size) as u32;
        }
        let n_strong = spec.strong_clusters.map_or(u32::MAX, |n| u32::try_from(n).unwrap_or(u32::MAX));
        let centre_key = key(spec.seed, "lm_head.centres");
        head.clusters = Some(Clusters { cluster_of: cluster_of.into(), centre_key, n_strong });
    }
    head
}

/// Token ids in cluster order: multiples of a number coprime to the vocabulary, from a seeded start.
fn token_map(spec: &SynthSpec) -> Vec<u32> {
    let n = spec.vocab_size;
    let gcd = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let start = key(spec.seed, "token_map") % n;
    let step = (n * 5 / 8..).find(|&step| gcd(step, n) == 1).expect("n + 1 is coprime to n");
    (0..n).map(|i| ((start + i * step) % n) as u32).collect()
}

struct List<'a> {
    spec: &'a SynthSpec,
    tensors: Vec<SynthTensor>,
}

impl List<'_> {
    fn push(&mut self, name: String, dtype: &'static str, shape: Vec<u64>, rows: u64, make: Make) {
        let element = if dtype == "BF16" { 2 } else { 4 };
        let row_bytes = shape.iter().product::<u64>() * element / rows;
        self.tensors.push(SynthTensor { name, dtype, shape, rows, row_bytes, make });
    }

    fn norm(&mut self, name: &str, len: u64) {
        let matrix = Arc::new(dense(self.spec, name, 1.0, 0.1));
        self.push(name.to_owned(), "BF16", vec![len], 1, Make::DenseBf16(matrix));
    }

    fn affine(&mut self, name: &str, matrix: &Arc<Dense>) {
        let (rows, cols) = (self.spec.vocab_size, self.spec.hidden_size);
        if self.spec.layout == SynthLayout::HuggingFace {
            let make = Make::DenseBf16(Arc::clone(matrix));
            return self.push(format!("{name}.weight"), "BF16", vec![rows, cols], rows, make);
        }
        let parts = [
            ("weight", "U32", cols / 8, AffinePart::Words),
            ("scales", "BF16", cols / GROUP as u64, AffinePart::Scales),
            ("biases", "BF16", cols / GROUP as u64, AffinePart::Biases),
        ];
        for (suffix, dtype, cols, part) in parts {
            let make = Make::DenseAffine(Arc::clone(matrix), part);
            self.push(format!("{name}.{suffix}"), dtype, vec![rows, cols], rows, make);
        }
    }

    fn layer(&mut self, layer: u64) {
        let SynthSpec { hidden_size, n_heads, n_kv_heads, head_dim, n_experts, expert_size, .. } = *self.spec;
        let name = |rest: &str| format!("model.layers.{layer}.{rest}");
        for norm in ["input_layernorm.weight", "post_attention_layernorm.weight"] {
            self.norm(&name(norm), hidden_size);
        }
        for norm in ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] {
            self.norm(&name(norm), head_dim);
        }
        let router =
            Arc::new(dense(self.spec, &name("mlp.gate.weight"), 0.0, 1.0 / (hidden_size as f32).sqrt()));
        self.push(
            name("mlp.gate.weight"),
            "BF16",
            vec![n_experts, hidden_size],
            n_experts,
            Make::DenseBf16(router),
        );
        // Outputs of a branch are small against the residual, so that it grows slowly over the layers.
        let branch = 1.0 / (2.0 * self.spec.n_layers as f32).sqrt();
        let (q_size, kv_size) = (n_heads * head_dim, n_kv_heads * head_dim);
        self.ternary(&name("self_attn.q_proj"), q_size, hidden_size, 1.0);
        self.ternary(&name("self_attn.k_proj"), kv_size, hidden_size, 1.0);
        self.ternary(&name("self_attn.v_proj"), kv_size, hidden_size, 1.0);
        self.ternary(&name("self_attn.o_proj"), hidden_size, q_size, branch);
        self.experts(&name("mlp"), "gate_proj", expert_size, hidden_size, 2.0);
        self.experts(&name("mlp"), "up_proj", expert_size, hidden_size, 2.0);
        self.experts(&name("mlp"), "down_proj", hidden_size, expert_size, branch);
    }

    fn ternary(&mut self, name: &str, rows: u64, cols: u64, gain: f32) {
        let matrix = Arc::new(Ternary { key: key(self.spec.seed, name), cols, gain });
        match self.spec.layout {
            SynthLayout::Mlx2Bit => {
                let words = Make::Words(Arc::clone(&matrix));
                self.push(format!("{name}.weight"), "U32", vec![rows, cols / 16], rows, words);
                self.push(format!("{name}.row_alpha"), "BF16", vec![rows], rows, Make::Scales(matrix));
            }
            SynthLayout::HuggingFace => {
                self.push(
                    format!("{name}.weight"),
                    "BF16",
                    vec![rows, cols],
                    rows,
                    Make::TernaryBf16(matrix, 0),
                );
            }
        }
    }

    /// One matrix a layout: expert e has rows e * rows and on of it in both.
    fn experts(&mut self, mlp: &str, part: &str, rows: u64, cols: u64, gain: f32) {
        let n = self.spec.n_experts;
        let matrix = Arc::new(Ternary { key: key(self.spec.seed, &format!("{mlp}.{part}")), cols, gain });
        match self.spec.layout {
            SynthLayout::Mlx2Bit => {
                let name = format!("{mlp}.switch_mlp.{part}");
                let words = Make::Words(Arc::clone(&matrix));
                self.push(format!("{name}.weight"), "U32", vec![n, rows, cols / 16], n * rows, words);
                self.push(format!("{name}.row_alpha"), "BF16", vec![n, rows], n * rows, Make::Scales(matrix));
            }
            SynthLayout::HuggingFace => {
                for expert in 0..n {
                    let make = Make::TernaryBf16(Arc::clone(&matrix), expert * rows);
                    self.push(
                        format!("{mlp}.experts.{expert}.{part}.weight"),
                        "BF16",
                        vec![rows, cols],
                        rows,
                        make,
                    );
                }
            }
        }
    }
}

/// The tensors of the FlashHead file; empty if the layout or the spec has none.
pub(super) fn flash_tensors(spec: &SynthSpec) -> Vec<SynthTensor> {
    let Some(flash) = spec.flash.filter(|_| spec.layout == SynthLayout::Mlx2Bit) else { return Vec::new() };
    let map = token_map(spec);
    let n_clusters = spec.vocab_size / flash.cluster_size;
    let centroids = centroids(&head(spec), &map, flash.cluster_size as usize, spec.hidden_size as usize);
    let mut list = List { spec, tensors: Vec::new() };
    let cols = spec.hidden_size;
    let parts = [
        ("centroids.weight", "U32", vec![n_clusters, cols / 8], centroids.words),
        ("centroids.scales", "BF16", vec![n_clusters, cols / GROUP as u64], centroids.scales),
        ("centroids.biases", "BF16", vec![n_clusters, cols / GROUP as u64], centroids.biases),
        (
            "token_map",
            "I32",
            vec![n_clusters, flash.cluster_size],
            map.iter().flat_map(|id| id.to_le_bytes()).collect(),
        ),
        ("cluster_scale", "BF16", vec![n_clusters], centroids.largest_norms),
    ];
    for (name, dtype, shape, bytes) in parts {
        list.push(format!("lm_head_flash.{name}"), dtype, shape, n_clusters, Make::Ready(bytes.into()));
    }
    list.tensors
}

/// Quantised centroids and the largest row norm of each cluster, as tensor bytes.
#[derive(Default)]
struct Centroids {
    words: Vec<u8>,
    scales: Vec<u8>,
    biases: Vec<u8>,
    largest_norms: Vec<u8>,
}

/// Scaled centroids: the mean direction of a cluster's rows times the largest norm among them.
fn centroids(head: &Dense, map: &[u32], cluster_size: usize, cols: usize) -> Centroids {
    let clusters: Vec<(Vec<f32>, f32)> =
        map.par_chunks(cluster_size).map(|ids| scaled_centroid(head, ids, cols)).collect();
    let mut all = Centroids::default();
    for (centroid, largest) in clusters {
        let mut nibbles = vec![0; cols];
        for (values, nibbles) in centroid.chunks_exact(GROUP).zip(nibbles.chunks_exact_mut(GROUP)) {
            let values = values.try_into().expect("chunks of one group");
            let (scale, bias) = affine::quantise_group(values, nibbles);
            all.scales.extend(scale.to_le_bytes());
            all.biases.extend(bias.to_le_bytes());
        }
        let start = all.words.len();
        all.words.resize(start + cols / 2, 0);
        pack_nibbles(&nibbles, &mut all.words[start..]);
        all.largest_norms.extend(half::bf16::from_f32(largest).to_bits().to_le_bytes());
    }
    all
}

fn scaled_centroid(head: &Dense, ids: &[u32], cols: usize) -> (Vec<f32>, f32) {
    let norm = |values: &[f32]| values.iter().map(|value| value * value).sum::<f32>().sqrt();
    let mut sum = vec![0.0_f32; cols];
    let mut row = vec![0.0_f32; cols];
    let mut largest = 0.0_f32;
    for &id in ids {
        head.dequantised(u64::from(id), &mut row);
        let length = norm(&row).max(f32::MIN_POSITIVE);
        largest = largest.max(length);
        sum.iter_mut().zip(&row).for_each(|(sum, value)| *sum += value / length);
    }
    let scale = largest / norm(&sum).max(f32::MIN_POSITIVE);
    sum.iter_mut().for_each(|value| *value *= scale);
    (sum, largest)
}
