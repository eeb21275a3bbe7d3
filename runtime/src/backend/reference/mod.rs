//! The definition: every block in f32, one loop after another, dot products summed in f64.
//!
//! Dull and slow on purpose, and it stays so: each faster path is tested against it. Weights are
//! decoded row by row as they are used, so that it runs models of any size.

mod cache;

use std::sync::Arc;

use samara_format::{Affine4Layout, Bf16PanelLayout, TernaryLayout};

use self::cache::KvCache;
use super::{Activations, Backend, Footprint, KernelId, Limits, Placed, Segment, Step, check_head_input};
use crate::{
    error::Error,
    flash::{Clusters, Found, HeadCounts, HeadMode, Search},
    model::Model,
    spec::{
        AttnSpec, BlockSpec, EmbedSpec, FlashSpec, HeadSpec, LayerSpec, MatrixRef, MoeSpec, NormSpec,
        QkNormSpec, RopeSpec,
    },
};

/// The scalar reference backend.
pub(super) struct Reference;

impl Backend for Reference {
    fn name(&self) -> &'static str {
        "reference"
    }

    fn supports(&self, spec: &BlockSpec) -> Result<Vec<KernelId>, String> {
        let op = match spec {
            BlockSpec::Embed(_) => "embed",
            BlockSpec::Layer(_) => "layer",
            BlockSpec::Head(_) => "head",
        };
        Ok(vec![KernelId::new(op, "f32")])
    }

    fn footprint(&self, model: &Model, blocks: &[BlockSpec], limits: &Limits) -> Footprint {
        let hidden_size = model.architecture().hidden_size;
        Footprint {
            kv: cache::bytes_of(blocks, limits),
            scratch: scratch(blocks, hidden_size, limits),
            device: 0,
        }
    }

    fn compile(
        &self,
        model: &Arc<Model>,
        blocks: &[Placed<'_>],
        limits: &Limits,
        _progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Segment>, Error> {
        let blocks = blocks
            .iter()
            .map(|(block, _)| {
                Ok(match block {
                    BlockSpec::Embed(embed) => Block::Embed(embed.clone()),
                    BlockSpec::Layer(layer) => {
                        Block::Layer(Box::new(layer.clone()), KvCache::for_layer(&layer.attn, limits))
                    }
                    BlockSpec::Head(head) => Block::Head(Box::new(Head::new(model, head, limits.head)?)),
                })
            })
            .collect::<Result<_, Error>>()?;
        Ok(Box::new(ReferenceSegment { model: Arc::clone(model), blocks, last_row: 0 }))
    }
}

/// Most bytes of temporary vectors at once: what the widest block holds of one step, in f32.
fn scratch(blocks: &[BlockSpec], hidden_size: usize, limits: &Limits) -> u64 {
    let of = |block: &BlockSpec| match block {
        BlockSpec::Embed(embed) => embed.weight.cols,
        BlockSpec::Layer(LayerSpec { index: _, attn, moe }) => {
            let attention = 2 * hidden_size + attn.qkv.rows + attn.o.cols;
            let mixture = 4 * hidden_size + moe.n_experts + 3 * moe.expert_size;
            limits.max_batch * attention.max(mixture) + limits.context * 2
        }
        BlockSpec::Head(head) => hidden_size + 2 * head.weight.rows,
    };
    blocks.iter().map(|block| 4 * of(block) as u64).max().unwrap_or(0)
}

enum Block {
    Embed(EmbedSpec),
    Layer(Box<LayerSpec>, KvCache),
    Head(Box<Head>),
}

/// The last block.
struct Head {
    spec: HeadSpec,
    /// Row of each token's logit, when rows are not in token order.
    row_of: Option<Vec<u32>>,
    mode: HeadMode,
    clusters: Option<Clusters>,
    counts: HeadCounts,
}

struct ReferenceSegment {
    model: Arc<Model>,
    blocks: Vec<Block>,
    /// Row of the hidden states of the last step's last token.
    last_row: usize,
}

impl Segment for ReferenceSegment {
    fn forward(&mut self, step: &Step<'_>, io: &mut Activations) -> Result<(), Error> {
        self.last_row = step.n_tokens() - 1;
        for block in &mut self.blocks {
            match block {
                Block::Embed(spec) => embed(&self.model, spec, step, &mut io.hidden),
                Block::Layer(spec, cache) => layer(&self.model, spec, cache, step, &mut io.hidden)?,
                Block::Head(head) => {
                    let rows: Vec<usize> = step.logit_rows().collect();
                    head.forward(&self.model, &rows, step.top(), io)?;
                }
            }
        }
        Ok(())
    }

    fn head_again(&mut self, top: Option<usize>, io: &mut Activations) -> Result<(), Error> {
        match self.blocks.last_mut() {
            Some(Block::Head(head)) => head.forward(&self.model, &[self.last_row], top, io),
            _ => Ok(()),
        }
    }

    fn head_counts(&mut self) -> Option<HeadCounts> {
        match self.blocks.last() {
            Some(Block::Head(head)) => head.clusters.as_ref().map(|_| head.counts),
            _ => None,
        }
    }

    fn rewind(&mut self, slot: usize, len: usize) -> bool {
        let mut kept = true;
        for block in &mut self.blocks {
            if let Block::Layer(_, cache) = block {
                kept &= cache.rewind(slot, len);
            }
        }
        kept
    }
}

fn embed(model: &Model, spec: &EmbedSpec, step: &Step<'_>, hidden: &mut [f32]) {
    let EmbedSpec { weight } = spec;
    let rows = Rows::new(model.matrix(weight), weight, Packing::Affine4);
    for ((_, _, token), out) in step.tokens().zip(hidden.chunks_exact_mut(weight.cols)) {
        out.copy_from_slice(&rows.row(token as usize));
    }
}

fn layer(
    model: &Model,
    spec: &LayerSpec,
    cache: &mut KvCache,
    step: &Step<'_>,
    hidden: &mut [f32],
) -> Result<(), Error> {
    let LayerSpec { index, attn, moe: moe_spec } = spec;
    let hidden_size = attn.o.rows;
    let hidden = &mut hidden[..step.n_tokens() * hidden_size];
    let add = |hidden: &mut [f32], delta: Vec<f32>| hidden.iter_mut().zip(delta).for_each(|(h, d)| *h += d);
    let delta = attention(model, attn, cache, step, hidden);
    add(hidden, delta);
    let delta = moe(model, moe_spec, *index, hidden)?;
    add(hidden, delta);
    Ok(())
}

/// `hidden` is `[n_tokens, hidden_size]`; returns the same shape.
fn attention(
    model: &Model,
    spec: &AttnSpec,
    cache: &mut KvCache,
    step: &Step<'_>,
    hidden: &[f32],
) -> Vec<f32> {
    let AttnSpec { norm, qkv, qk_norm, o, n_heads, n_kv_heads, head_dim, rope, window: _ } = spec;
    let normed = rms_norm_rows(model, norm, hidden);
    let mut qkv_out = matmul(&Rows::new(model.matrix(qkv), qkv, Packing::Ternary), &normed);
    let q_len = n_heads * head_dim;
    let kv_len = n_kv_heads * head_dim;

    for ((slot, position, _), row) in step.tokens().zip(qkv_out.chunks_exact_mut(qkv.rows)) {
        let (q, kv) = row.split_at_mut(q_len);
        let (k, v) = kv.split_at_mut(kv_len);
        if let Some(QkNormSpec { q: q_norm, k: k_norm }) = qk_norm {
            for (part, norm) in [(&mut *q, q_norm), (&mut *k, k_norm)] {
                let normed = rms_norm_rows(model, norm, part);
                part.copy_from_slice(&normed);
            }
        }
        if let Some(rope) = rope {
            q.chunks_exact_mut(*head_dim).chain(k.chunks_exact_mut(*head_dim)).for_each(|head| {
                rotate(rope, position, head);
            });
        }
        cache.write(slot, position, k, v);
    }

    let mut mixed = vec![0.0; step.n_tokens() * q_len];
    for (((slot, position, _), row), out) in
        step.tokens().zip(qkv_out.chunks_exact(qkv.rows)).zip(mixed.chunks_exact_mut(q_len))
    {
        for head in 0..*n_heads {
            let q = &row[head * head_dim..(head + 1) * head_dim];
            let kv_head = head / (n_heads / n_kv_heads);
            let out = &mut out[head * head_dim..(head + 1) * head_dim];
            attend(q, cache.visible(slot, kv_head, position), out);
        }
    }
    matmul(&Rows::new(model.matrix(o), o, Packing::Ternary), &mixed)
}

/// softmax(q k / sqrt(head_dim)) v over the visible keys of one head.
fn attend(q: &[f32], runs: [(&[f32], &[f32]); 2], out: &mut [f32]) {
    let head_dim = q.len();
    let scale = 1.0 / (head_dim as f32).sqrt();
    let keys = runs.iter().flat_map(|(k, _)| k.chunks_exact(head_dim));
    let scores: Vec<f32> = keys.map(|k| dot(q, k) * scale).collect();
    let weights = softmax(&scores);
    let values = runs.iter().flat_map(|(_, v)| v.chunks_exact(head_dim));
    let mut sum = vec![0.0f64; head_dim];
    for (weight, v) in weights.iter().zip(values) {
        sum.iter_mut().zip(v).for_each(|(sum, v)| *sum += f64::from(*weight) * f64::from(*v));
    }
    out.iter_mut().zip(sum).for_each(|(out, sum)| *out = sum as f32);
}

/// `hidden` is `[n_tokens, hidden_size]`; returns the same shape.
fn moe(model: &Model, spec: &MoeSpec, layer: usize, hidden: &[f32]) -> Result<Vec<f32>, Error> {
    let MoeSpec { norm, router, experts, n_experts, n_used, expert_size, norm_topk, gate_max, up_abs_max } =
        spec;
    let hidden_size = router.cols;
    let normed = rms_norm_rows(model, norm, hidden);
    let logits = matmul(&Rows::new(model.matrix(router), router, Packing::Bf16Panels), &normed);
    if logits.iter().any(|logit| !logit.is_finite()) {
        return Err(Error::NonFinite { layer, what: "the router's logits" });
    }
    let part = |expert: usize, part: usize, rows: usize, cols: usize| {
        let matrix = MatrixRef { tensor: *experts, part, rows, cols };
        Rows::new(model.expert(*experts, expert, part), &matrix, Packing::Ternary)
    };
    let routes: Vec<Vec<(usize, f32)>> =
        logits.chunks_exact(router.rows).map(|logits| route(logits, *n_used, *norm_topk)).collect();
    let mut out = vec![0.0; hidden.len()];
    // Expert by expert, so that each of its rows is decoded once a step.
    for expert in 0..*n_experts {
        let weight_of =
            |route: &Vec<(usize, f32)>| route.iter().find(|(e, _)| *e == expert).map(|(_, weight)| *weight);
        let tokens: Vec<(usize, f32)> =
            routes.iter().enumerate().filter_map(|(token, route)| Some((token, weight_of(route)?))).collect();
        let row = |token: usize| token * hidden_size..(token + 1) * hidden_size;
        let x: Vec<f32> = tokens.iter().flat_map(|(token, _)| normed[row(*token)].to_vec()).collect();
        let gate = matmul(&part(expert, 0, *expert_size, hidden_size), &x);
        let up = matmul(&part(expert, 1, *expert_size, hidden_size), &x);
        let act: Vec<f32> = gate
            .iter()
            .zip(&up)
            .map(|(gate, up)| silu(gate.min(*gate_max)) * up.clamp(-up_abs_max, *up_abs_max))
            .collect();
        let y = matmul(&part(expert, 2, hidden_size, *expert_size), &act);
        for ((token, weight), y) in tokens.iter().zip(y.chunks_exact(hidden_size)) {
            out[row(*token)].iter_mut().zip(y).for_each(|(out, y)| *out += weight * y);
        }
    }
    Ok(out)
}

/// The `n_used` most probable experts, lower index first on ties, with their weights.
fn route(logits: &[f32], n_used: usize, norm_topk: bool) -> Vec<(usize, f32)> {
    let mut experts: Vec<(usize, f32)> = softmax(logits).into_iter().enumerate().collect();
    experts.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    experts.truncate(n_used);
    if norm_topk {
        let sum = experts.iter().map(|(_, p)| p).sum::<f32>() + 1e-20;
        experts.iter_mut().for_each(|(_, p)| *p /= sum);
    }
    experts
}

impl Head {
    fn new(model: &Model, spec: &HeadSpec, mode: HeadMode) -> Result<Self, Error> {
        let HeadSpec { norm: _, weight: _, token_map, flash: _ } = spec;
        let row_of = token_map.as_ref().map(|map| model.row_of(map)).transpose()?;
        let clusters = Clusters::of(model, spec, mode)?;
        Ok(Head { spec: spec.clone(), row_of, mode, clusters, counts: HeadCounts::default() })
    }

    /// The logits of `wanted` rows of the hidden states; with `top` only so many of the largest matter.
    fn forward(
        &mut self,
        model: &Model,
        wanted: &[usize],
        top: Option<usize>,
        io: &mut Activations,
    ) -> Result<(), Error> {
        let HeadSpec { norm, weight, token_map: _, flash: _ } = &self.spec;
        let rows = Rows::new(model.matrix(weight), weight, Packing::Affine4);
        for (&row, out) in wanted.iter().zip(io.logits.chunks_exact_mut(weight.rows)) {
            let normed = rms_norm_rows(model, norm, &io.hidden[row * weight.cols..(row + 1) * weight.cols]);
            check_head_input(&normed)?;
            let logits = match (&self.clusters, top) {
                (Some(clusters), Some(top)) => {
                    let (logits, counts) = few_logits(model, &rows, clusters, self.mode, top, &normed);
                    self.counts = self.counts.plus(counts);
                    logits
                }
                _ => matmul(&rows, &normed),
            };
            match &self.row_of {
                Some(row_of) => {
                    out.iter_mut().zip(row_of).for_each(|(out, &row)| *out = logits[row as usize]);
                }
                None => out.copy_from_slice(&logits),
            }
        }
        Ok(())
    }
}

/// Logits by row, -infinity of rows left out.
fn few_logits(
    model: &Model,
    rows: &Rows<'_>,
    clusters: &Clusters,
    mode: HeadMode,
    top: usize,
    normed: &[f32],
) -> (Vec<f32>, HeadCounts) {
    let FlashSpec { centroids, cluster_size, n_probes: _, force_tokens: _, bounds: _ } = &clusters.spec;
    let n_rows = centroids.rows * cluster_size;
    let mut search = Search::new(centroids.rows);
    search.scores = matmul(&Rows::new(model.matrix(centroids), centroids, Packing::Affine4), normed);
    let logit = |row: usize| dot(&rows.row(row), normed);
    let mut logits = vec![f32::NEG_INFINITY; n_rows];
    let length = normed.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let Found { n_read, at_once } = search.run(mode, clusters, length, |list| {
        for &cluster in list {
            let rows = cluster as usize * cluster_size..(cluster as usize + 1) * cluster_size;
            rows.for_each(|row| logits[row] = logit(row));
        }
        let mut ranked = logits.clone();
        ranked.sort_unstable_by(|a, b| b.total_cmp(a));
        ranked.get(top.wrapping_sub(1)).copied().unwrap_or(f32::NEG_INFINITY)
    });
    clusters.forced.iter().for_each(|&row| logits[row as usize] = logit(row as usize));
    let row_bytes = model.matrix(centroids).len() / centroids.rows;
    let bytes = clusters.fixed_bytes(model) + row_bytes * (n_read * cluster_size + clusters.forced.len());
    (logits, HeadCounts { tokens: 1, certified: u64::from(at_once), bytes: bytes as u64 })
}

fn rms_norm_rows(model: &Model, norm: &NormSpec, x: &[f32]) -> Vec<f32> {
    let NormSpec { weight, eps } = norm;
    let weight = model.vector(weight);
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(weight.len()) {
        let mean = dot(row, row) / row.len() as f32;
        // Not zeros after an overflow: NaN, which the router reports.
        let scale = if mean.is_finite() { 1.0 / (mean + eps).sqrt() } else { f32::NAN };
        out.extend(row.iter().zip(&weight).map(|(x, w)| w * (x * scale)));
    }
    out
}

fn rotate(rope: &RopeSpec, position: usize, head: &mut [f32]) {
    let half = rope.dim / 2;
    for i in 0..half {
        let (sin, cos) = RopeSpec::sin_cos(position as f64 * rope.frequency(i));
        let (a, b) = (head[i], head[i + half]);
        head[i] = a * cos - b * sin;
        head[i + half] = a * sin + b * cos;
    }
}

fn softmax(x: &[f32]) -> Vec<f32> {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exps: Vec<f32> = x.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = exps.iter().copied().map(f64::from).sum();
    exps.iter().map(|e| (f64::from(*e) / sum) as f32).collect()
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// f32 products, f64 sum.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32
}

/// `x` is `[n, cols]`; returns `[n, rows]`.
fn matmul(weight: &Rows<'_>, x: &[f32]) -> Vec<f32> {
    let n = x.len() / weight.cols;
    if n == 0 {
        return Vec::new();
    }
    let mut out = vec![0.0; n * weight.rows];
    for r in 0..weight.rows {
        let row = weight.row(r);
        for (i, x) in x.chunks_exact(weight.cols).enumerate() {
            out[i * weight.rows + r] = dot(&row, x);
        }
    }
    out
}

enum Packing {
    Ternary,
    Affine4,
    Bf16Panels,
}

/// A packed matrix, read one row at a time as f32.
struct Rows<'a> {
    bytes: &'a [u8],
    packing: Packing,
    rows: usize,
    cols: usize,
}

impl<'a> Rows<'a> {
    fn new(bytes: &'a [u8], matrix: &MatrixRef, packing: Packing) -> Self {
        Rows { bytes, packing, rows: matrix.rows, cols: matrix.cols }
    }

    fn row(&self, row: usize) -> Vec<f32> {
        const CHECKED: &str = "the parser has accepted this shape";
        let bf16 = |bits: u16| half::bf16::from_bits(bits).to_f32();
        match self.packing {
            Packing::Ternary => {
                let mut codes = vec![0; self.cols];
                let layout = TernaryLayout::new(self.rows, self.cols).expect(CHECKED);
                let scale = bf16(layout.unpack_row(self.bytes, row, &mut codes));
                codes.iter().map(|code| (f32::from(*code) - 1.0) * scale).collect()
            }
            Packing::Affine4 => {
                let n_groups = self.cols / 64;
                let (mut nibbles, mut scales, mut biases) =
                    (vec![0; self.cols], vec![0; n_groups], vec![0; n_groups]);
                let layout = Affine4Layout::new(self.rows, self.cols).expect(CHECKED);
                layout.unpack_row(self.bytes, row, &mut nibbles, &mut scales, &mut biases);
                let weight =
                    |(i, q): (usize, &u8)| f32::from(*q) * bf16(scales[i / 64]) + bf16(biases[i / 64]);
                nibbles.iter().enumerate().map(weight).collect()
            }
            Packing::Bf16Panels => {
                let mut values = vec![0; self.cols];
                let layout = Bf16PanelLayout::new(self.rows, self.cols).expect(CHECKED);
                layout.unpack_row(self.bytes, row, &mut values);
                values.into_iter().map(bf16).collect()
            }
        }
    }
}
