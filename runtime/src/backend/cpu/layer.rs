//! One transformer layer on the CPU.
//!
//! A step of one token (decode) cuts each matrix among the threads; in a step of several (prefill) a thread takes a
//! tile of rows, or a whole expert with the tokens routed to it, so that weights are unpacked once for many tokens. What
//! is computed is the same to the bit.

use samara_pool::{At, Chunks, Pool};
use samara_simd::{Bf16Rows, KV_PART, Kernels, PANEL_ROWS, QuantizedRows, TernaryRows, attention_state_len};

use super::{
    Context,
    cache::Cache,
    scratch::{ActRun, PAIRS, Pair, Scratch, TILE, Worker, piece_of, quantize_rows, rows_of},
};
use crate::{
    backend::{Limits, Step},
    error::Error,
    model::Model,
    spec::{AttnSpec, LayerSpec, MoeSpec},
};

/// Fewest pieces of a matrix, of 4 rows each, that are worth handing to a thread.
const MIN_PANELS: usize = 16;

/// A layer's spec, its kernels, its widened norms and its KV cache.
pub(super) struct Layer {
    spec: LayerSpec,
    kernels: Kernels,
    attn_norm: Vec<f32>,
    /// q and k.
    qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    moe_norm: Vec<f32>,
    /// Experts that have been asked for, by their index.
    asked: Vec<bool>,
    pub(super) cache: Cache,
}

impl Layer {
    pub(super) fn new(model: &Model, spec: &LayerSpec, kernels: Kernels, limits: &Limits) -> Self {
        let LayerSpec { index: _, attn, moe } = spec;
        Layer {
            attn_norm: model.vector(&attn.norm.weight),
            qk_norm: attn.qk_norm.map(|norm| (model.vector(&norm.q.weight), model.vector(&norm.k.weight))),
            moe_norm: model.vector(&moe.norm.weight),
            asked: vec![false; moe.n_experts],
            cache: Cache::new(attn, limits),
            kernels,
            spec: spec.clone(),
        }
    }

    /// The output projection of as many tokens as there is room for, some dozens at most: work to time.
    pub(super) fn multiply(&self, model: &Model, pool: &mut Pool, scratch: &mut Scratch) {
        let o = &self.spec.attn.o;
        let n = scratch.tokens.len().min(PAIRS);
        let rows = TernaryRows::from_part(model.matrix(o), o.rows, o.cols);
        let (acts, out) = (scratch.act.rows(n, o.cols), &mut scratch.delta[..n * o.rows]);
        matmul(pool, &mut scratch.workers, &self.kernels, &rows, &acts, &scratch.tokens[..n], out);
    }

    /// Updates `hidden`, `[n_tokens, hidden_size]`.
    pub(super) fn forward(
        &mut self,
        cx: &mut Context<'_>,
        step: &Step<'_>,
        hidden: &mut [f32],
    ) -> Result<(), Error> {
        let hidden = &mut hidden[..step.n_tokens() * self.spec.attn.o.rows];
        self.project(cx, step, hidden);
        self.attend(cx, step);
        self.output(cx, hidden);
        self.route(cx, hidden)?;
        if step.n_tokens() == 1 {
            self.experts_of_one(cx)
        } else {
            self.experts_of_many(cx, step.n_tokens())
        }
        self.combine(cx, hidden);
        Ok(())
    }

    /// Norm, then q, k and v, normed and rotated, and the cache.
    fn project(&mut self, cx: &mut Context<'_>, step: &Step<'_>, hidden: &[f32]) {
        let Layer { spec, kernels, attn_norm, qk_norm, moe_norm: _, asked: _, cache } = self;
        let AttnSpec { norm, qkv, qk_norm: qk_spec, o: _, n_heads, n_kv_heads, head_dim, rope, window: _ } =
            &spec.attn;
        let (n_tokens, head_dim) = (step.n_tokens(), *head_dim);
        let normed = Chunks::new(&mut cx.scratch.normed[..hidden.len()], qkv.cols);
        let pieces = (normed, cx.scratch.act.pieces(n_tokens, qkv.cols));
        let hidden = hidden.chunks_exact(qkv.cols);
        let work = |_: &mut Worker, first: usize, (normed, act): (&mut [f32], ActRun<'_>)| {
            for (x, out) in hidden.clone().skip(first).zip(normed.chunks_exact_mut(qkv.cols)) {
                kernels.rms_norm(x, attn_norm, norm.eps, out);
            }
            quantize_rows(kernels, normed, qkv.cols, act);
        };
        cx.pool.run(pieces, 1, &mut cx.scratch.workers, work);
        cx.clock.lap("norm", 0);

        let half = rope.map_or(0, |rope| rope.dim / 2);
        if let Some(rope) = rope {
            cx.scratch.angles.want(rope, step);
        }
        let part = cx.model.matrix(qkv);
        let rows = TernaryRows::from_part(part, qkv.rows, qkv.cols);
        let acts = cx.scratch.act.rows(n_tokens, qkv.cols);
        let tokens = &cx.scratch.tokens[..n_tokens];
        let angles = &cx.scratch.angles;
        let norms = qk_norm.as_ref().zip(qk_spec.as_ref());
        let finish = |head: usize, out: &mut [f32]| {
            let norm = if head < *n_heads {
                norms.map(|((q, _), spec)| (q, spec.q.eps))
            } else if head < n_heads + n_kv_heads {
                norms.map(|((_, k), spec)| (k, spec.k.eps))
            } else {
                return;
            };
            for (t, x) in out.chunks_exact_mut(head_dim).enumerate() {
                if let Some((weight, eps)) = norm {
                    kernels.rms_norm_in_place(x, weight, eps);
                }
                if rope.is_some() {
                    let of = t * half..(t + 1) * half;
                    kernels.rope(x, &angles.cos[of.clone()], &angles.sin[of]);
                }
            }
        };
        let heads = &mut cx.scratch.qkv[..n_tokens * qkv.rows];
        let piece = n_tokens * head_dim;
        cx.pool.run(Chunks::new(heads, piece), 1, &mut cx.scratch.workers, |_, first, out: &mut [f32]| {
            if n_tokens == 1 {
                let from = first * head_dim;
                kernels.ternary_gemv(&rows, &acts.row(0), from..from + out.len(), out);
            }
            for (head, out) in (first..).zip(out.chunks_exact_mut(piece)) {
                if n_tokens > 1 {
                    let range = head * head_dim..(head + 1) * head_dim;
                    kernels.ternary_gemm(&rows, &acts, tokens, range, out);
                }
                finish(head, out);
            }
        });
        cx.clock.lap("qkv", part.len());

        let (q_len, kv_len) = (n_heads * piece, n_kv_heads * piece);
        let (keys, values) = cx.scratch.qkv[q_len..q_len + 2 * kv_len].split_at(kv_len);
        cache.write(cx.pool, &mut cx.scratch.workers, step, keys, values);
        cx.clock.lap("kv write", 0);
    }

    /// Fills `scratch.mixed` and its quantised rows.
    fn attend(&mut self, cx: &mut Context<'_>, step: &Step<'_>) {
        let Layer { spec, kernels, cache, .. } = self;
        let AttnSpec { n_heads, n_kv_heads, head_dim, o, .. } = &spec.attn;
        let (n_tokens, group, head_dim) = (step.n_tokens(), n_heads / n_kv_heads, *head_dim);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let cache = &*cache;
        let (qkv, width) = (&cx.scratch.qkv, group * head_dim);
        let gather = |kv_head: usize, token: usize, queries: &mut [f32]| {
            for (g, query) in queries.chunks_exact_mut(head_dim).enumerate() {
                let from = ((kv_head * group + g) * n_tokens + token) * head_dim;
                query.copy_from_slice(&qkv[from..from + head_dim]);
            }
        };
        let len = attention_state_len(group, head_dim);
        let parts_of = |position: usize| {
            let first = cache.ring.first_visible(position);
            (first, first / KV_PART..position / KV_PART + 1)
        };
        let run_part = |w: &mut Worker, slot, position: usize, kv_head, part: usize, state: &mut [f32]| {
            let first = parts_of(position).0.saturating_sub(part * KV_PART);
            let kv = cache.part(slot, kv_head, part, position + 1);
            let (queries, weights) = (&w.queries[..width], &mut w.weights[..group * KV_PART]);
            kernels.attention_part(queries, &kv, first, scale, weights, state);
        };
        let mixed = &mut cx.scratch.mixed[..n_tokens * n_heads * head_dim];
        let mut n_keys = 0;
        if n_tokens == 1 {
            let (slot, position, _) = step.tokens().next().expect("a step has a token");
            let (first, parts) = parts_of(position);
            n_keys = position + 1 - first;
            let states = &mut cx.scratch.states[..n_kv_heads * parts.len() * len];
            let work = |w: &mut Worker, first: usize, states: &mut [f32]| {
                for (i, state) in (first..).zip(states.chunks_exact_mut(len)) {
                    let (kv_head, part) = (i / parts.len(), parts.start + i % parts.len());
                    gather(kv_head, 0, &mut w.queries[..width]);
                    run_part(w, slot, position, kv_head, part, state);
                }
            };
            cx.pool.run(Chunks::new(states, len), 1, &mut cx.scratch.workers, work);
            for (states, out) in states.chunks_exact_mut(parts.len() * len).zip(mixed.chunks_exact_mut(width))
            {
                let (state, rest) = states.split_at_mut(len);
                rest.chunks_exact(len).for_each(|part| kernels.attention_merge(state, part, head_dim));
                kernels.attention_finish(state, head_dim, out);
            }
        } else {
            let work = |w: &mut Worker, first: usize, out: &mut [f32]| {
                let (mut state, mut part_state) = (std::mem::take(&mut w.state), std::mem::take(&mut w.part));
                for (i, out) in (first..).zip(out.chunks_exact_mut(width)) {
                    let (kv_head, token) = (i / n_tokens, i % n_tokens);
                    let (slot, position) = cx.scratch.rows[token];
                    gather(kv_head, token, &mut w.queries[..width]);
                    let (_, parts) = parts_of(position);
                    run_part(w, slot, position, kv_head, parts.start, &mut state[..len]);
                    for part in parts.skip(1) {
                        run_part(w, slot, position, kv_head, part, &mut part_state[..len]);
                        kernels.attention_merge(&mut state[..len], &part_state[..len], head_dim);
                    }
                    kernels.attention_finish(&state[..len], head_dim, out);
                }
                (w.state, w.part) = (state, part_state);
            };
            cx.pool.run(Chunks::new(mixed, width), 8, &mut cx.scratch.workers, work);
        }
        cx.clock.lap("attention", n_keys * cache.bytes_per_position());

        let (mixed, q_len) = (&*mixed, o.cols);
        let work = |w: &mut Worker, first: usize, act: ActRun<'_>| {
            for (token, (q, scales, offsets)) in (first..).zip(rows_of(act, q_len)) {
                let row = &mut w.row[..q_len];
                for (kv_head, row) in row.chunks_exact_mut(width).enumerate() {
                    row.copy_from_slice(&mixed[(kv_head * n_tokens + token) * width..][..width]);
                }
                kernels.quantize(row, q, scales, offsets);
            }
        };
        cx.pool.run(cx.scratch.act.pieces(n_tokens, q_len), 1, &mut cx.scratch.workers, work);
        cx.clock.lap("norm", 0);
    }

    /// The output projection, added to `hidden`; then the norm for the experts, and its quantised rows.
    fn output(&mut self, cx: &mut Context<'_>, hidden: &mut [f32]) {
        let Layer { spec, kernels, moe_norm, .. } = self;
        let (o, eps) = (&spec.attn.o, spec.moe.norm.eps);
        let n_tokens = hidden.len() / o.rows;
        let part = cx.model.matrix(o);
        let rows = TernaryRows::from_part(part, o.rows, o.cols);
        let acts = cx.scratch.act.rows(n_tokens, o.cols);
        let delta = &mut cx.scratch.delta[..hidden.len()];
        matmul(
            cx.pool,
            &mut cx.scratch.workers,
            kernels,
            &rows,
            &acts,
            &cx.scratch.tokens[..n_tokens],
            delta,
        );
        cx.clock.lap("o", part.len());

        let delta = &*delta;
        let normed = Chunks::new(&mut cx.scratch.normed[..hidden.len()], o.rows);
        let pieces = (Chunks::new(hidden, o.rows), normed, cx.scratch.act.pieces(n_tokens, o.rows));
        type Run<'a> = (&'a mut [f32], &'a mut [f32], ActRun<'a>);
        let work = |_: &mut Worker, first: usize, (hidden, normed, act): Run<'_>| {
            let rows = hidden.chunks_exact_mut(o.rows).zip(normed.chunks_exact_mut(o.rows));
            for (token, (hidden, normed)) in (first..).zip(rows) {
                for (tile, hidden) in hidden.chunks_mut(TILE).enumerate() {
                    let from = tile * TILE * n_tokens + token * hidden.len();
                    hidden.iter_mut().zip(&delta[from..]).for_each(|(h, d)| *h += d);
                }
                kernels.rms_norm(hidden, moe_norm, eps, normed);
            }
            quantize_rows(kernels, normed, o.rows, act);
        };
        cx.pool.run(pieces, 1, &mut cx.scratch.workers, work);
        cx.clock.lap("norm", 0);
    }

    /// Which experts: `scratch.pairs` and `place`.
    fn route(&mut self, cx: &mut Context<'_>, hidden: &[f32]) -> Result<(), Error> {
        let Layer { spec, kernels, asked, .. } = self;
        let MoeSpec { router, experts: tensor, n_used, norm_topk, .. } = &spec.moe;
        let n_tokens = hidden.len() / router.cols;
        let part = cx.model.matrix(router);
        let rows = Bf16Rows::new(part, router.rows, router.cols);
        let logits = &mut cx.scratch.router[..n_tokens * router.rows];
        let (x, workers) = (&cx.scratch.normed[..hidden.len()], &mut cx.scratch.workers);
        if n_tokens == 1 {
            let pieces = Chunks::new(&mut *logits, PANEL_ROWS);
            cx.pool.run(pieces, 4, workers, |_, first, out: &mut [f32]| {
                let from = first * PANEL_ROWS;
                kernels.bf16_gemv(&rows, x, from..from + out.len(), out);
            });
        } else {
            let pieces = Chunks::new(&mut *logits, router.rows);
            cx.pool.run(pieces, 16, workers, |_, first, out: &mut [f32]| {
                let n = out.len() / router.rows;
                kernels.bf16_gemm(&rows, &x[first * router.cols..][..n * router.cols], 0..router.rows, out);
            });
        }
        if logits.iter().any(|logit| !logit.is_finite()) {
            return Err(Error::NonFinite { layer: spec.index, what: "the router's logits" });
        }
        cx.clock.lap("router", part.len());

        let n_pairs = n_tokens * n_used;
        let pieces = (
            Chunks::new(logits, router.rows),
            Chunks::new(&mut cx.scratch.experts[..n_pairs], *n_used),
            Chunks::new(&mut cx.scratch.weights[..n_pairs], *n_used),
        );
        type Run<'a> = (&'a mut [f32], &'a mut [u32], &'a mut [f32]);
        cx.pool.run(pieces, 1, workers, |_, _, (logits, experts, weights): Run<'_>| {
            let chosen = experts.chunks_exact_mut(*n_used).zip(weights.chunks_exact_mut(*n_used));
            for (logits, (experts, weights)) in logits.chunks_exact_mut(router.rows).zip(chosen) {
                kernels.top_k_router(logits, *norm_topk, experts, weights);
            }
        });
        let pairs = &mut cx.scratch.pairs[..n_pairs];
        for ((i, pair), &expert) in (0..).zip(&mut *pairs).zip(&cx.scratch.experts) {
            *pair = Pair { expert, token: i / *n_used as u32 };
        }
        sort_by_expert(pairs, &mut cx.scratch.place[..n_pairs], &mut cx.scratch.bounds, *n_used);
        // All of a layer's experts at once, before the first is waited for.
        for pair in pairs.chunk_by(|a, b| a.expert == b.expert).map(|pairs| pairs[0]) {
            if !std::mem::replace(&mut asked[pair.expert as usize], true) {
                cx.model.will_need_expert(*tensor, pair.expert as usize);
            }
        }
        cx.clock.lap("top-k", 0);
        Ok(())
    }

    /// One token through its experts, whose rows are shared out: `scratch.y`.
    fn experts_of_one(&mut self, cx: &mut Context<'_>) {
        let Layer { spec, kernels, .. } = self;
        let MoeSpec { router, experts, n_used, expert_size, gate_max, up_abs_max, .. } = &spec.moe;
        let (hidden_size, expert_size) = (router.cols, *expert_size);
        let (pairs, model) = (&cx.scratch.pairs[..*n_used], cx.model);
        let part = |pair: usize, part: usize| model.expert(*experts, pairs[pair].expert as usize, part);
        let gate_up = |pair: usize, i: usize| TernaryRows::from_part(part(pair, i), expert_size, hidden_size);
        let down = |pair: usize| TernaryRows::from_part(part(pair, 2), hidden_size, expert_size);
        let act = cx.scratch.act.row(0, hidden_size);
        let inner = &mut cx.scratch.inner[..n_used * expert_size];
        let piece = piece_of(expert_size);
        cx.pool.run(
            Chunks::new(&mut *inner, piece),
            1,
            &mut cx.scratch.workers,
            |w, first, run: &mut [f32]| {
                for_each_expert(first * piece, run, expert_size, |pair, from, out, goes_on| {
                    let range = from..from + out.len();
                    let (gate, up) = (&mut w.gate[..out.len()], &mut w.up[..out.len()]);
                    // Each stream is asked for while the one before it is read.
                    gate_up(pair, 1).prefetch(from);
                    kernels.ternary_gemv(&gate_up(pair, 0), &act, range.clone(), gate);
                    if goes_on {
                        gate_up(pair + 1, 0).prefetch(0);
                    }
                    kernels.ternary_gemv(&gate_up(pair, 1), &act, range, up);
                    kernels.swiglu_clamped(gate, up, *gate_max, *up_abs_max, out);
                });
            },
        );
        let bytes = |i: usize| n_used * part(0, i).len();
        cx.clock.lap("gate, up", bytes(0) + bytes(1));
        cx.scratch.inner_act.quantize(kernels, inner, expert_size);
        cx.clock.lap("norm", 0);
        let acts = cx.scratch.inner_act.rows(*n_used, expert_size);
        let y = &mut cx.scratch.y[..n_used * hidden_size];
        let piece = piece_of(hidden_size);
        cx.pool.run(Chunks::new(y, piece), 1, &mut cx.scratch.workers, |_, first, run: &mut [f32]| {
            for_each_expert(first * piece, run, hidden_size, |pair, from, out, goes_on| {
                if goes_on {
                    down(pair + 1).prefetch(0);
                }
                kernels.ternary_gemv(&down(pair), &acts.row(pair), from..from + out.len(), out);
            });
        });
        cx.clock.lap("down", bytes(2));
    }

    /// Each chosen expert with the tokens routed to it: `scratch.y`.
    fn experts_of_many(&mut self, cx: &mut Context<'_>, n_tokens: usize) {
        let Layer { spec, kernels, .. } = self;
        let MoeSpec { router, experts, n_used, expert_size, gate_max, up_abs_max, .. } = &spec.moe;
        let (hidden_size, expert_size) = (router.cols, *expert_size);
        let (pairs, bounds, model) = (&cx.scratch.pairs[..n_tokens * n_used], &cx.scratch.bounds, cx.model);
        let acts = cx.scratch.act.rows(n_tokens, hidden_size);
        let y = At::new(&mut cx.scratch.y[..pairs.len() * hidden_size], bounds, hidden_size);
        cx.pool.run(y, 1, &mut cx.scratch.workers, |w, first, mut out: &mut [f32]| {
            for i in first.. {
                if out.is_empty() {
                    break;
                }
                let pairs = &pairs[bounds[i] as usize..bounds[i + 1] as usize];
                let part = |part: usize, rows: usize, cols: usize| {
                    TernaryRows::from_part(model.expert(*experts, pairs[0].expert as usize, part), rows, cols)
                };
                let [gate, up] = [part(0, expert_size, hidden_size), part(1, expert_size, hidden_size)];
                let down = part(2, hidden_size, expert_size);
                for pairs in pairs.chunks(PAIRS) {
                    let (y, rest) = out.split_at_mut(pairs.len() * hidden_size);
                    out = rest;
                    let Worker { gate: gate_out, up: up_out, row: inner, act, tokens, .. } = &mut *w;
                    let tokens = &mut tokens[..pairs.len()];
                    tokens.iter_mut().zip(pairs).for_each(|(token, pair)| *token = pair.token);
                    let len = pairs.len() * expert_size;
                    let (gate_out, up_out, inner) =
                        (&mut gate_out[..len], &mut up_out[..len], &mut inner[..len]);
                    kernels.ternary_gemm(&gate, &acts, tokens, 0..expert_size, gate_out);
                    kernels.ternary_gemm(&up, &acts, tokens, 0..expert_size, up_out);
                    kernels.swiglu_clamped(gate_out, up_out, *gate_max, *up_abs_max, inner);
                    act.quantize(kernels, inner, expert_size);
                    tokens.iter_mut().zip(0..).for_each(|(token, i)| *token = i);
                    let acts = act.rows(pairs.len(), expert_size);
                    kernels.ternary_gemm(&down, &acts, tokens, 0..hidden_size, y);
                }
            }
        });
        let bytes: usize = (0..3).map(|i| model.expert(*experts, 0, i).len()).sum();
        cx.clock.lap("experts", (bounds.len() - 1) * bytes);
    }

    /// Adds the experts' outputs to `hidden`: those of a token in the router's order, whatever else the step holds.
    fn combine(&mut self, cx: &mut Context<'_>, hidden: &mut [f32]) {
        let Layer { spec, kernels, .. } = self;
        let MoeSpec { router, n_used, .. } = &spec.moe;
        let hidden_size = router.cols;
        let (place, weights, y) = (&cx.scratch.place, &cx.scratch.weights, &cx.scratch.y);
        let pieces = Chunks::new(hidden, hidden_size);
        cx.pool.run(pieces, 1, &mut cx.scratch.workers, |_, first, hidden: &mut [f32]| {
            let chosen = place.chunks_exact(*n_used).zip(weights.chunks_exact(*n_used)).skip(first);
            for (hidden, (place, weights)) in hidden.chunks_exact_mut(hidden_size).zip(chosen) {
                kernels.combine(y, place, weights, hidden);
            }
        });
        cx.clock.lap("combine", 0);
    }
}

/// `out` from all rows, in tiles of [`TILE`] rows: `[tiles, tokens.len(), rows of the tile]`.
fn matmul(
    pool: &mut Pool,
    workers: &mut [Worker],
    kernels: &Kernels,
    rows: &TernaryRows<'_>,
    acts: &QuantizedRows<'_>,
    tokens: &[u32],
    out: &mut [f32],
) {
    if tokens.len() == 1 {
        let act = acts.row(0);
        pool.run(Chunks::new(out, PANEL_ROWS), MIN_PANELS, workers, |_, first, out: &mut [f32]| {
            let from = first * PANEL_ROWS;
            kernels.ternary_gemv(rows, &act, from..from + out.len(), out);
        });
        return;
    }
    let piece = TILE * tokens.len();
    pool.run(Chunks::new(out, piece), 1, workers, |_, first, out: &mut [f32]| {
        for (tile, out) in (first..).zip(out.chunks_mut(piece)) {
            let from = tile * TILE;
            kernels.ternary_gemm(rows, acts, tokens, from..from + out.len() / tokens.len(), out);
        }
    });
}

/// Cuts a run that begins at element `at` where experts of `size` elements meet: `work(expert, first element, part, whether the
/// next expert follows)`.
fn for_each_expert(
    at: usize,
    mut run: &mut [f32],
    size: usize,
    mut work: impl FnMut(usize, usize, &mut [f32], bool),
) {
    let mut at = at;
    while !run.is_empty() {
        let (part, rest) = run.split_at_mut(run.len().min(size - at % size));
        let len = part.len();
        work(at / size, at % size, part, !rest.is_empty());
        (at, run) = (at + len, rest);
    }
}

/// Orders pairs by expert, so that its weights are read once while they are in cache, and notes where each went,
/// `place[token * n_used + rank]`, and where each expert's pairs begin.
fn sort_by_expert(pairs: &mut [Pair], place: &mut [u32], bounds: &mut Vec<u32>, n_used: usize) {
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
    bounds.clear();
    bounds.push(0);
    let mut end = 0;
    for of_one in pairs.chunk_by(|a, b| a.expert == b.expert) {
        end += of_one.len() as u32;
        bounds.push(end);
    }
}
