//! Every kernel in every variant over awkward sizes, on every device there is; and faults that must be seen.

mod flash;

use samara_shaders::Variant;

use super::super::{
    made::Made,
    trial::{Difference, Fault, Trial, variants},
};
use super::quantized::Quantized;
use super::*;
use crate::{
    backend::wgpu::device::{Gpu, any},
    error::Error,
};

/// Runs `of` in each variant of a kernel.
fn each_variant(name: &str, mut of: impl FnMut(&Trial<'_>)) {
    let Some(gpu) = any() else { return };
    for variant in variants(&gpu, name) {
        of(&Trial { gpu: &gpu, variant, fault: None });
    }
}

/// Runs `of` for each size in each variant of a kernel; in software, where pipelines take long to make, in one of them, in turn.
fn over<S: Copy>(name: &str, sizes: impl IntoIterator<Item = S>, of: impl Fn(&Trial<'_>, S)) {
    let Some(gpu) = any() else { return };
    let variants = variants(&gpu, name);
    for (i, size) in sizes.into_iter().enumerate() {
        let its_turn = if gpu.adapter().software {
            i % variants.len()..i % variants.len() + 1
        } else {
            0..variants.len()
        };
        for &variant in &variants[its_turn] {
            of(&Trial { gpu: &gpu, variant, fault: None }, size);
        }
    }
}

fn small(what: &str, trial: &Trial<'_>, found: Result<Difference, Error>) {
    let found = found.unwrap_or_else(|error| panic!("{what}, {}: {error}", trial.variant));
    assert!(found.is_small(), "{what}, {}: {found:?}", trial.variant);
}

/// What is found without the fault is small, and with it is not.
fn seen(gpu: &Gpu, fault: Fault, of: impl Fn(&Trial<'_>) -> Result<Difference, Error>) {
    let trial = Trial { gpu, variant: Variant::ALL[0], fault: None };
    small("without the fault", &trial, of(&trial));
    let found = of(&Trial { fault: Some(fault), ..trial }).expect("it runs");
    assert!(!found.is_small(), "{fault:?} is not seen: {found:?}");
}

#[test]
fn norm_gemv_over_sizes() {
    over(
        "norm_gemv",
        [
            (8, 128, 1),
            (6, 256, 1),
            (60, 384, 2),
            (129, 640, 3),
            (64, 100, 1),
            (96, 2048, 1),
            (96, 2048, 4),
            (1, 4, 1),
            (40, 4352, 8),
        ],
        |trial, (rows, cols, panels)| {
            let made = &mut Made::new(cols as u64);
            let w = made.ternary(rows, cols);
            let (h, norm) = (made.values(cols, 2.0), made.norm(cols));
            let row = Row { h: &h, norm: &norm, eps: 1e-6 };
            small(&format!("[{rows}, {cols}], {panels}"), trial, norm_gemv(trial, &w, &row, panels));
        },
    );
}

#[test]
fn norm_router_over_sizes() {
    each_variant("norm_router", |trial| {
        for (rows, cols) in
            [(8, 128), (256, 256), (5, 384), (64, 640), (16, 2048), (4, 100), (9, 4352), (1, 4)]
        {
            let made = &mut Made::new(cols as u64);
            let w = made.bf16(rows, cols);
            let (h, norm) = (made.values(cols, 2.0), made.norm(cols));
            let row = Row { h: &h, norm: &norm, eps: 1e-5 };
            small(&format!("[{rows}, {cols}]"), trial, norm_router(trial, &w, &row));
            // Columns that share a scale, with nothing in them: the scale is 0.
            let h: Vec<f32> = (0..cols).map(|i| if i / 4 % 8 == 5 { 0.0 } else { h[i] }).collect();
            small("zeros", trial, norm_router(trial, &w, &Row { h: &h, ..row }));
        }
    });
}

/// Maple's attention at `position`.
fn maple(position: usize, window: usize) -> Attention {
    Attention {
        n_heads: 16,
        n_kv_heads: 4,
        head_dim: 128,
        normed: true,
        rope_dim: if window == 0 { 0 } else { 64 },
        window,
        capacity: if window == 0 { 4096 } else { (window + 15).next_multiple_of(32) },
        kv_f32: false,
        part_keys: 64,
        max_parts: 8,
        position,
    }
}

#[test]
fn attention_over_contexts() {
    over("attention", [0, 16, 512, 0], |trial, window| {
        for context in [1, 2, 31, 32, 33, 64, 65, 511, 512, 513, 700, 4000] {
            let a = maple(context - 1, window);
            small(&format!("{a:?}"), trial, attention(trial, &a, context as u64));
        }
    });
}

#[test]
fn attention_over_forms() {
    let forms = [
        ([4, 1], 32, true, 16, false),
        ([2, 1], 64, true, 64, true),
        ([3, 3], 96, false, 40, false),
        ([16, 4], 128, false, 0, true),
        ([10, 2], 32, true, 0, true),
        ([7, 1], 256, true, 128, false),
        ([12, 1], 64, true, 2, false),
    ]
    .map(|([n_heads, n_kv_heads], head_dim, normed, rope_dim, kv_f32)| {
        (7, Attention { n_heads, n_kv_heads, head_dim, normed, rope_dim, kv_f32, ..maple(99, 70) })
    });
    let parts = [(32, 4), (64, 64), (128, 2)]
        .map(|(part_keys, max_parts)| (8, Attention { part_keys, max_parts, ..maple(900, 0) }));
    over("attention", forms.into_iter().chain(parts), |trial, (seed, a)| {
        small(&format!("{a:?}"), trial, attention(trial, &a, seed));
    });
}

#[test]
fn merging_over_parts() {
    each_variant("attention_merge", |trial| {
        for (position, max_parts) in [(0, 8), (64, 8), (700, 8), (4000, 64), (2500, 33)] {
            let a = Attention { max_parts, ..maple(position, 0) };
            small(&format!("{a:?}"), trial, attention_merge(trial, &a, 3));
        }
        // Spans that are not full, heads across spans, a window, blocks that are not full.
        for (position, window, n_heads, head_dim) in [
            (900, 0, 3, 96),
            (900, 300, 3, 128),
            (30, 16, 1, 4),
            (511, 512, 10, 32),
            (700, 0, 5, 256),
            (200, 0, 7, 20),
        ] {
            let a = Attention { n_heads, n_kv_heads: 1, head_dim, max_parts: 64, ..maple(position, window) };
            small(&format!("{a:?}"), trial, attention_merge(trial, &a, 4));
        }
    });
}

#[test]
fn gemv_add_over_sizes() {
    over(
        "gemv_add",
        [
            (64, 128, 1),
            (30, 128, 1),
            (6, 256, 1),
            (129, 384, 2),
            (64, 100, 1),
            (1, 4, 1),
            (64, 2048, 1),
            (96, 2048, 2),
            (130, 2048, 9),
            (300, 640, 64),
            (40, 4352, 4),
        ],
        |trial, (rows, cols, panels)| {
            let w = Made::new(5).ternary(rows, cols);
            small(&format!("[{rows}, {cols}], {panels}"), trial, gemv_add(trial, &w, panels, 6));
        },
    );
}

/// Experts and logits.
struct Mixture {
    experts: ExpertBlocks,
    logits: Vec<f32>,
}

impl Mixture {
    fn new(n_experts: usize, n_used: usize, hidden_size: usize, expert_size: usize) -> Self {
        let made = &mut Made::new((hidden_size + expert_size + n_experts) as u64);
        let mut experts = ExpertBlocks::made(made, n_experts, hidden_size, expert_size);
        experts.n_used = n_used;
        Mixture { logits: made.values(n_experts, 3.0), experts }
    }
}

#[test]
fn experts_in_over_sizes() {
    over(
        "experts_in",
        [
            (8, 2, 128, 64, 1),
            (16, 4, 256, 96, 2),
            (12, 8, 384, 130, 1),
            (64, 1, 640, 64, 3),
            (4, 4, 640, 192, 1),
            (9, 8, 2048, 512, 1),
            (256, 8, 128, 32, 2),
            (100, 16, 128, 32, 1),
            (5, 2, 2048, 100, 5),
            (6, 2, 100, 36, 1),
        ],
        |trial, (n_experts, n_used, hidden_size, expert_size, panels)| {
            let mut m = Mixture::new(n_experts, n_used, hidden_size, expert_size);
            m.experts.norm_topk = hidden_size != 640;
            m.experts.per_split = if panels == 1 { n_experts / 2 } else { n_experts };
            let what = format!("{n_used} of {n_experts} [{expert_size}, {hidden_size}], {panels}");
            small(&what, trial, experts_in(trial, &m.experts, &m.logits, panels, 7));
        },
    );
}

#[test]
fn of_equal_logits_the_lower_expert_comes_first() {
    each_variant("experts_in", |trial| {
        let mut m = Mixture::new(40, 6, 128, 32);
        let fills: [fn(usize) -> f32; 3] =
            [|_| 0.0, |i| (i % 3) as f32, |i| if i.is_multiple_of(2) { 0.0 } else { -0.0 }];
        for fill in fills {
            m.logits = (0..40).map(fill).collect();
            small("ties", trial, experts_in(trial, &m.experts, &m.logits, 1, 7));
        }
    });
}

#[test]
fn the_first_layer_with_a_bad_router_is_named() {
    each_variant("experts_in", |trial| {
        let m = Mixture::new(16, 2, 128, 32);
        let status = |logit: f32, before: u32| {
            let mut logits = m.logits.clone();
            logits[3] = logit;
            experts::status_of(trial, &m.experts, &logits, before).expect("it runs")
        };
        assert_eq!(status(0.0, 0), [0, 6]);
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(status(bad, 0), [6, 6], "{bad}");
            assert_eq!(status(bad, 2), [2, 6], "{bad}");
        }
    });
}

#[test]
fn experts_out_over_sizes() {
    over(
        "experts_out",
        [
            (1, 128, 64, 1),
            (8, 256, 128, 1),
            (5, 384, 132, 2),
            (8, 640, 512, 1),
            (8, 64, 2048, 4),
            (12, 128, 192, 1),
            (17, 130, 64, 1),
        ],
        |trial, (n_used, hidden_size, expert_size, panels)| {
            let mut experts = ExpertBlocks::made(&mut Made::new(4), n_used + 2, hidden_size, expert_size);
            let chosen: Vec<(u32, f32)> = (0..n_used as u32)
                .map(|i| ((i * 5 + 1) % (n_used as u32 + 2), 0.1 + i as f32 / 20.0))
                .collect();
            experts.per_split = if panels == 1 { 2 } else { n_used + 2 };
            let what = format!("{n_used} of [{hidden_size}, {expert_size}], {panels}");
            small(&what, trial, experts_out(trial, &experts, &chosen, panels, 12));
        },
    );
}

#[test]
fn embed_over_sizes() {
    each_variant("embed", |trial| {
        for (rows, cols, per_split) in
            [(10, 64, 16), (37, 128, 8), (64, 640, 32), (20, 2048, 20), (33, 192, 4)]
        {
            let w = Affine::made(&mut Made::new(rows as u64), rows, cols);
            let tokens = [0, rows as u32 - 1, 3, 5, 4, 7, 8];
            small(&format!("[{rows}, {cols}]"), trial, embed(trial, &w, &tokens, per_split));
        }
    });
}

#[test]
fn head_over_sizes() {
    over(
        "head",
        [
            (32, 64, 8, 8),
            (300, 128, 40, 16),
            (257, 192, 1000, 32),
            (64, 384, 8, 8),
            (1030, 256, 128, 64),
            (70, 2048, 1000, 32),
        ],
        |trial, (rows, cols, split, panels)| {
            let made = &mut Made::new((rows + cols) as u64);
            let w = Affine::made(made, rows, cols);
            let (h, norm) = (made.values(3 * cols, 2.0), made.norm(cols));
            let row = Row { h: &h, norm: &norm, eps: 1e-6 };
            for wanted in [&[0][..], &[2, 0]] {
                let what = format!("[{rows}, {cols}], {split}, {panels}");
                small(&what, trial, head(trial, &w, &row, wanted, split, panels));
            }
        },
    );
}

#[test]
fn a_token_is_drawn_as_the_host_draws_it() {
    each_variant("select_token", |trial| {
        for vocab_size in [70, 512, 5000, 20_000, 151_936] {
            let made = &mut Made::new(vocab_size as u64);
            let logits = made.values(vocab_size, 10.0);
            let map: Vec<u32> = (0..vocab_size as u32).map(|i| vocab_size as u32 - 1 - i).collect();
            for top_k in [1, 20, 64] {
                for (temperature, top_p, min_p) in
                    [(0.0, 1.0, 0.0), (1.0, 1.0, 0.0), (0.7, 0.9, 0.05), (3.0, 0.5, 0.0)]
                {
                    for uniform in [0.0, 0.3, 0.999_999_9] {
                        let drawing = Drawing {
                            logits: &logits,
                            token_map: (top_k == 20).then_some(&map),
                            temperature,
                            top_k,
                            top_p,
                            min_p,
                            uniform,
                        };
                        let what = format!("{vocab_size} {top_k} {temperature} {top_p} {min_p} {uniform}");
                        small(&what, trial, select_token(trial, &drawing));
                    }
                }
            }
        }
    });
}

fn greedy(logits: &[f32], top_k: usize) -> Drawing<'_> {
    Drawing { logits, token_map: None, temperature: 0.0, top_k, top_p: 1.0, min_p: 0.0, uniform: 0.0 }
}

#[test]
fn ties_go_to_the_lower_token_and_too_many_are_said() {
    each_variant("select_token", |trial| {
        let mut logits = vec![-1.0; 20_000];
        for i in 0..100 {
            logits[150 * i + 7] = 2.0;
        }
        small("ties", trial, select_token(trial, &greedy(&logits, 20)));
        // All equal: more blocks than there is room for.
        let found = select::step(trial, &greedy(&vec![0.5; 20_000], 20), 0).expect("it runs");
        assert_eq!(found.status, 0xffff_fffe);
        // Few tokens that can come at all.
        let mut logits = vec![f32::NEG_INFINITY; 5000];
        logits[4321] = -3.0;
        logits[77] = -0.0;
        small("nearly none", trial, select_token(trial, &greedy(&logits, 20)));
    });
}

#[test]
fn rows_left_out_are_no_candidates() {
    each_variant("select_token", |trial| {
        // More blocks than can be gathered, of which few have logits.
        let mut logits = vec![f32::NEG_INFINITY; 20_000];
        Made::new(3).values(70, 10.0).into_iter().zip(&mut logits[4990..]).for_each(|(x, logit)| *logit = x);
        small("of three blocks", trial, select_token(trial, &greedy(&logits, 20)));
    });
}

#[test]
fn a_bad_logit_and_a_bad_layer_are_said() {
    each_variant("select_token", |trial| {
        let mut logits = Made::new(1).values(20_000, 3.0);
        assert_eq!(select::step(trial, &greedy(&logits, 5), 9).expect("it runs").status, 9);
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
            logits[12_345] = bad;
            assert_eq!(
                select::step(trial, &greedy(&logits, 5), 0).expect("it runs").status,
                u32::MAX,
                "{bad}"
            );
        }
        let none = vec![f32::NEG_INFINITY; 20_000];
        assert_eq!(select::step(trial, &greedy(&none, 5), 0).expect("it runs").status, u32::MAX);
    });
}

/// Everything is NaN, so nothing is small.
fn lost(what: &str, bad: f32, found: Result<Difference, Error>) {
    let found = found.expect("it runs");
    assert!(!found.is_small(), "{bad} in {what} is lost: {found:?}");
}

#[test]
fn what_is_no_number_is_not_lost() {
    let Some(gpu) = any() else { return };
    let made = &mut Made::new(3);
    let (w, router) = (made.ternary(16, 256), made.bf16(8, 256));
    let affine = Affine::made(made, 64, 256);
    let m = Mixture::new(16, 4, 256, 64);
    let norm = made.norm(256);
    let mut h = made.values(256, 2.0);
    for bad in [f32::NAN, f32::INFINITY, 3e38] {
        h[100] = bad;
        let row = &Row { h: &h, norm: &norm, eps: 1e-6 };
        for &variant in gpu.variants() {
            let trial = &Trial { gpu: &gpu, variant, fault: None };
            lost("norm_gemv", bad, norm_gemv(trial, &w, row, 1));
            lost("head", bad, head(trial, &affine, row, &[0], 100, 8));
            let [logits, q] = gemv::routed(trial, &router, row).expect("it runs");
            assert!(logits.iter().all(|logit| f32::from_bits(*logit).is_nan()), "{bad}: {logits:?}");
            let nothing = Quantized::of(&[f64::NAN; 256]);
            assert_eq!(nothing.worst_written(&q), 0.0, "{bad}: {q:?}");
        }
    }
    for &variant in gpu.variants() {
        let trial = &Trial { gpu: &gpu, variant, fault: None };
        let a = Attention { n_heads: 5, n_kv_heads: 1, max_parts: 64, ..maple(700, 0) };
        for bad in [f32::NAN, f32::INFINITY] {
            small("attention_merge", trial, attention::attention_merge_of(trial, &a, bad, 3));
        }
        assert!(gemv::gemv_add_keeps_nan(trial, &w).expect("it runs"), "{variant}");
        assert!(experts::experts_in_keeps_nan(trial, &m.experts, &m.logits).expect("it runs"), "{variant}");
    }
}

#[test]
fn planted_faults_are_seen() {
    let Some(gpu) = any() else { return };
    let gpu = &gpu;
    let made = &mut Made::new(11);
    let w = made.ternary(32, 384);
    let (h, norm) = (made.values(384, 2.0), made.norm(384));
    let row = Row { h: &h, norm: &norm, eps: 1e-6 };
    seen(gpu, Fault::Bits("norm_gemv", 2, 40, 1), |trial| norm_gemv(trial, &w, &row, 1));
    seen(gpu, Fault::Constant("norm_gemv", "EPS", 1e-2), |trial| norm_gemv(trial, &w, &row, 1));
    let router = made.bf16(8, 384);
    seen(gpu, Fault::Bits("norm_router", 2, 40, 1 << 12), |trial| norm_router(trial, &router, &row));
    // Without weights logits are zeros: what is seen is seen in the row.
    let zeros = (vec![0; router.0.len()], vec![0.0; router.1.len()]);
    seen(gpu, Fault::Bits("norm_router", 1, 300, 1 << 20), |trial| norm_router(trial, &zeros, &row));
    seen(gpu, Fault::Constant("norm_router", "EPS", 1e-2), |trial| norm_router(trial, &zeros, &row));

    let a = maple(700, 512);
    let attention = |trial: &Trial<'_>| attention(trial, &a, 2);
    seen(gpu, Fault::Constant("attention", "WINDOW", 511.0), attention);
    seen(gpu, Fault::Constant("attention", "ROPE_DIM", 62.0), attention);
    seen(gpu, Fault::Constant("attention", "CAPACITY", 512.0), attention);
    seen(gpu, Fault::Bits("attention", 0, 2, 1), attention);
    let merge = |trial: &Trial<'_>| attention_merge(trial, &a, 2);
    seen(gpu, Fault::Constant("attention_merge", "PART_KEYS", 128.0), merge);
    seen(gpu, Fault::Constant("attention_merge", "WINDOW", 256.0), merge);
    seen(gpu, Fault::Constant("attention_merge", "HEAD_DIM", 64.0), merge);
    seen(gpu, Fault::Bits("attention_merge", 1, 5, 1 << 31), merge);
    let add = |trial: &Trial<'_>| gemv_add(trial, &w, 1, 2);
    // A code of the row, one of its scales, a code of the matrix, a row's scale, h.
    seen(gpu, Fault::Bits("gemv_add", 0, 40, 1), add);
    seen(gpu, Fault::Bits("gemv_add", 0, 3 * 32 + 9, 1 << 12), add);
    seen(gpu, Fault::Bits("gemv_add", 1, 5, 1), add);
    seen(gpu, Fault::Bits("gemv_add", 1, 8 * 3 * 32 + 1, 1), add);
    seen(gpu, Fault::Bits("gemv_add", 2, 5, 1 << 16), add);

    let m = Mixture::new(16, 4, 256, 64);
    let gate_up = |trial: &Trial<'_>| experts_in(trial, &m.experts, &m.logits, 1, 2);
    seen(gpu, Fault::Constant("experts_in", "UP_AT", 0.0), gate_up);
    seen(gpu, Fault::Constant("experts_in", "GATE_MAX", 0.25), gate_up);
    seen(gpu, Fault::Constant("experts_in", "UP_ABS_MAX", 0.3), gate_up);
    seen(gpu, Fault::Constant("experts_in", "NORM_TOPK", 0.0), gate_up);
    seen(gpu, Fault::Bits("experts_in", 0, 40, 1), gate_up);
    seen(gpu, Fault::Bits("experts_in", 0, 2 * 32 + 3, 1 << 12), gate_up);
    let chosen = [(3, 0.5), (0, 0.3), (9, 0.2)];
    let down = |trial: &Trial<'_>| experts_out(trial, &m.experts, &chosen, 1, 2);
    seen(gpu, Fault::Bits("experts_out", 1, 2, 1), down);

    let affine = Affine::made(made, 64, 384);
    seen(gpu, Fault::Bits("embed", 1, 40, 4), |trial| embed(trial, &affine, &[0, 1, 2, 3], 64));
    let logits = |trial: &Trial<'_>| head(trial, &affine, &row, &[0], 1000, 8);
    seen(gpu, Fault::Bits("head", 3, 40, 8), logits);
    let values = made.values(9000, 10.0);
    let drawing = Drawing { temperature: 1.0, uniform: 0.4, ..greedy(&values, 20) };
    let draw = |trial: &Trial<'_>| select_token(trial, &drawing);
    seen(gpu, Fault::Bits("select_token", 3, 1, 1), draw);
}
