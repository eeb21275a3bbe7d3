//! One transformer layer on the CPU.

use rayon::prelude::*;
use samara_simd::{Bf16Rows, Kernels, KvSlice, TernaryRows};

use super::scratch::{Pair, QuantizedRows, Scratch, rows_per_task};
use crate::{
    backend::{Limits, Step},
    error::Error,
    kv::KvCache,
    model::Model,
    spec::{AttnSpec, LayerSpec, MoeSpec, RopeSpec},
};

/// A layer's spec, its widened norms and its KV cache.
pub(super) struct Layer {
    spec: LayerSpec,
    attn_norm: Vec<f32>,
    /// q and k.
    qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    moe_norm: Vec<f32>,
    pub(super) cache: KvCache,
}

impl Layer {
    pub(super) fn new(model: &Model, spec: &LayerSpec, limits: &Limits) -> Self {
        let LayerSpec { index: _, attn, moe } = spec;
        Layer {
            attn_norm: model.vector(&attn.norm.weight),
            qk_norm: attn.qk_norm.map(|norm| (model.vector(&norm.q.weight), model.vector(&norm.k.weight))),
            moe_norm: model.vector(&moe.norm.weight),
            cache: KvCache::for_layer(attn, limits),
            spec: spec.clone(),
        }
    }

    /// Updates `hidden`, `[n_tokens, hidden_size]`.
    pub(super) fn forward(
        &mut self,
        model: &Model,
        kernels: &Kernels,
        scratch: &mut Scratch,
        step: &Step<'_>,
        hidden: &mut [f32],
    ) -> Result<(), Error> {
        let hidden = &mut hidden[..step.n_tokens() * self.spec.attn.o.rows];
        self.attention(model, kernels, scratch, step, hidden);
        self.moe(model, kernels, scratch, hidden)
    }

    fn attention(
        &mut self,
        model: &Model,
        kernels: &Kernels,
        scratch: &mut Scratch,
        step: &Step<'_>,
        hidden: &mut [f32],
    ) {
        let Layer { spec, attn_norm, qk_norm, moe_norm: _, cache } = self;
        let AttnSpec { norm, qkv, qk_norm: qk_spec, o, n_heads, n_kv_heads, head_dim, rope, window: _ } =
            &spec.attn;
        let n_tokens = step.n_tokens();
        let (q_len, kv_len) = (n_heads * head_dim, n_kv_heads * head_dim);

        let normed = &mut scratch.normed[..hidden.len()];
        norm_rows(kernels, hidden, attn_norm, norm.eps, normed);
        scratch.act.quantize(kernels, normed, qkv.cols);
        let rows = TernaryRows::from_part(model.matrix(qkv), qkv.rows, qkv.cols);
        let qkv_out = &mut scratch.qkv[..n_tokens * qkv.rows];
        project(kernels, &rows, &scratch.act, qkv.cols, qkv_out);

        let half = rope.map_or(0, |rope| rope.dim / 2);
        if let Some(rope) = rope {
            angles(rope, step, &mut scratch.cos, &mut scratch.sin);
        }
        for (i, ((slot, position, _), row)) in
            step.tokens().zip(qkv_out.chunks_exact_mut(qkv.rows)).enumerate()
        {
            let (q, kv) = row.split_at_mut(q_len);
            let (k, v) = kv.split_at_mut(kv_len);
            let (cos, sin) = (&scratch.cos[i * half..(i + 1) * half], &scratch.sin[i * half..(i + 1) * half]);
            let finish = |heads: &mut [f32], norm: Option<(&[f32], f32)>| {
                for head in heads.chunks_exact_mut(*head_dim) {
                    if let Some((weight, eps)) = norm {
                        kernels.rms_norm_in_place(head, weight, eps);
                    }
                    if rope.is_some() {
                        kernels.rope(head, cos, sin);
                    }
                }
            };
            let norms = qk_norm.as_ref().zip(qk_spec.as_ref());
            finish(q, norms.map(|((q, _), spec)| (q.as_slice(), spec.q.eps)));
            finish(k, norms.map(|((_, k), spec)| (k.as_slice(), spec.k.eps)));
            cache.write(slot, position, k, v);
        }

        let (cache, qkv_out) = (&*cache, &*qkv_out);
        let context = scratch.scores.len() / n_heads;
        let by_head = &mut scratch.by_head[..n_tokens * q_len];
        by_head
            .par_chunks_exact_mut(n_tokens * head_dim)
            .zip(scratch.scores.par_chunks_exact_mut(context))
            .enumerate()
            .for_each(|(head, (out, scores))| {
                let kv_head = head / (n_heads / n_kv_heads);
                let scale = 1.0 / (*head_dim as f32).sqrt();
                for (i, ((slot, position, _), out)) in
                    step.tokens().zip(out.chunks_exact_mut(*head_dim)).enumerate()
                {
                    let q = &qkv_out[i * qkv.rows + head * head_dim..][..*head_dim];
                    let runs = cache.visible(slot, kv_head, position);
                    let n_keys = position + 1 - cache.first_visible(position);
                    let segments = runs.map(|(keys, values)| KvSlice { keys, values });
                    kernels.attention(q, &segments, scale, &mut scores[..n_keys], out);
                }
            });

        // Back to [tokens, n_heads * head_dim], into the buffer that held q, k and v.
        let mixed = &mut scratch.qkv[..n_tokens * q_len];
        for (i, row) in mixed.chunks_exact_mut(q_len).enumerate() {
            for (head, out) in row.chunks_exact_mut(*head_dim).enumerate() {
                out.copy_from_slice(&by_head[(head * n_tokens + i) * head_dim..][..*head_dim]);
            }
        }
        scratch.act.quantize(kernels, mixed, q_len);
        let rows = TernaryRows::from_part(model.matrix(o), o.rows, o.cols);
        let delta = &mut scratch.delta[..hidden.len()];
        project(kernels, &rows, &scratch.act, o.cols, delta);
        hidden.iter_mut().zip(delta).for_each(|(h, d)| *h += *d);
    }

    fn moe(
        &self,
        model: &Model,
        kernels: &Kernels,
        scratch: &mut Scratch,
        hidden: &mut [f32],
    ) -> Result<(), Error> {
        let MoeSpec {
            norm,
            router,
            experts,
            n_experts: _,
            n_used,
            expert_size,
            norm_topk,
            gate_max,
            up_abs_max,
        } = &self.spec.moe;
        let (hidden_size, expert_size) = (router.cols, *expert_size);
        let n_tokens = hidden.len() / hidden_size;
        let normed = &mut scratch.normed[..hidden.len()];
        norm_rows(kernels, hidden, &self.moe_norm, norm.eps, normed);
        scratch.act.quantize(kernels, normed, hidden_size);

        let rows = Bf16Rows::new(model.matrix(router), router.rows, router.cols);
        let logits = &mut scratch.router[..n_tokens * router.rows];
        let chunk = rows_per_task(router.rows);
        logits.par_chunks_exact_mut(router.rows).zip(normed.par_chunks_exact(hidden_size)).for_each(
            |(out, x)| {
                out.par_chunks_mut(chunk)
                    .enumerate()
                    .for_each(|(i, out)| kernels.bf16_gemv(&rows, x, i * chunk..i * chunk + out.len(), out));
            },
        );
        if logits.iter().any(|logit| !logit.is_finite()) {
            return Err(Error::NonFinite { layer: self.spec.index, what: "the router's logits" });
        }

        let pairs = &mut scratch.pairs[..n_tokens * n_used];
        for (token, (logits, pairs)) in
            (0u32..).zip(logits.chunks_exact_mut(router.rows).zip(pairs.chunks_exact_mut(*n_used)))
        {
            kernels.top_k_router(logits, *norm_topk, &mut scratch.experts, &mut scratch.weights);
            for ((pair, &expert), &weight) in pairs.iter_mut().zip(&scratch.experts).zip(&scratch.weights) {
                *pair = Pair { expert, token, weight };
            }
        }
        let place = &mut scratch.place[..pairs.len()];
        sort_by_expert(pairs, place, *n_used);

        let (pairs, act) = (&*pairs, &scratch.act);
        let expert_rows = |pair: &Pair, part: usize, rows: usize, cols: usize| {
            TernaryRows::from_part(model.expert(*experts, pair.expert as usize, part), rows, cols)
        };
        let chunk = rows_per_task(expert_size);
        let gate_up = &mut scratch.gate_up[..pairs.len() * 2 * expert_size];
        gate_up.par_chunks_exact_mut(expert_size).enumerate().for_each(|(i, out)| {
            let pair = &pairs[i / 2];
            let rows = expert_rows(pair, i % 2, expert_size, hidden_size);
            rows_in_tasks(kernels, &rows, act, pair.token as usize, hidden_size, chunk, out);
        });
        let inner = &mut scratch.inner[..pairs.len() * expert_size];
        gate_up.par_chunks_exact(2 * expert_size).zip(inner.par_chunks_exact_mut(expert_size)).for_each(
            |(gate_up, inner)| {
                let (gate, up) = gate_up.split_at(expert_size);
                kernels.swiglu_clamped(gate, up, *gate_max, *up_abs_max, inner);
            },
        );
        scratch.inner_act.quantize(kernels, inner, expert_size);
        let inner_act = &scratch.inner_act;
        let chunk = rows_per_task(hidden_size);
        let y = &mut scratch.y[..pairs.len() * hidden_size];
        y.par_chunks_exact_mut(hidden_size).enumerate().for_each(|(i, out)| {
            let rows = expert_rows(&pairs[i], 2, hidden_size, expert_size);
            rows_in_tasks(kernels, &rows, inner_act, i, expert_size, chunk, out);
        });

        // Experts of a token in the router's order, whatever else the step holds.
        let y = &*y;
        hidden.par_chunks_exact_mut(hidden_size).zip(place.par_chunks_exact(*n_used)).for_each(
            |(hidden, place)| {
                for (column, h) in hidden.iter_mut().enumerate() {
                    let sum = place.iter().fold(0.0, |sum, &i| {
                        sum + pairs[i as usize].weight * y[i as usize * hidden_size + column]
                    });
                    *h += sum;
                }
            },
        );
        Ok(())
    }
}

/// Orders pairs by expert, so that its weights are read once while they are in cache, and notes where
/// each went: `place[token * n_used + rank]`.
fn sort_by_expert(pairs: &mut [Pair], place: &mut [u32], n_used: usize) {
    let key = |pair: &Pair| (pair.expert, pair.token);
    // Until it is looked up below, each place holds its pair's expert.
    place.iter_mut().zip(&*pairs).for_each(|(slot, pair)| *slot = pair.expert);
    pairs.sort_unstable_by_key(key);
    for (token, experts) in (0u32..).zip(place.chunks_exact_mut(n_used)) {
        for slot in experts {
            let at = pairs.binary_search_by_key(&(*slot, token), key);
            *slot = at.expect("every pair is in the sorted list") as u32;
        }
    }
}

/// `x` and `out` are `[n, weight.len()]`.
fn norm_rows(kernels: &Kernels, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    x.par_chunks_exact(weight.len())
        .zip(out.par_chunks_exact_mut(weight.len()))
        .for_each(|(x, out)| kernels.rms_norm(x, weight, eps, out));
}

/// `out`, `[n, rows]`, from the first n rows of `act`.
fn project(kernels: &Kernels, rows: &TernaryRows<'_>, act: &QuantizedRows, cols: usize, out: &mut [f32]) {
    let chunk = rows_per_task(rows.rows());
    out.par_chunks_exact_mut(rows.rows())
        .enumerate()
        .for_each(|(i, out)| rows_in_tasks(kernels, rows, act, i, cols, chunk, out));
}

/// `out`, `[rows]`, from row `i` of `act`, in tasks of `chunk` rows.
fn rows_in_tasks(
    kernels: &Kernels,
    rows: &TernaryRows<'_>,
    act: &QuantizedRows,
    i: usize,
    cols: usize,
    chunk: usize,
    out: &mut [f32],
) {
    let act = act.row(i, cols);
    out.par_chunks_mut(chunk).enumerate().for_each(|(task, out)| {
        kernels.ternary_gemv(rows, &act, task * chunk..task * chunk + out.len(), out);
    });
}

/// Cosines and sines of the step's positions, `[n_tokens, dim / 2]`, angles in f64.
fn angles(rope: &RopeSpec, step: &Step<'_>, cos: &mut [f32], sin: &mut [f32]) {
    let RopeSpec { theta, dim } = *rope;
    let half = dim / 2;
    for ((_, position, _), (cos, sin)) in
        step.tokens().zip(cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half)))
    {
        for (i, (cos, sin)) in cos.iter_mut().zip(sin).enumerate() {
            let angle = position as f64 * theta.powf(-2.0 * i as f64 / dim as f64);
            (*sin, *cos) = (angle.sin() as f32, angle.cos() as f32);
        }
    }
}
