//! Every kernel, variant and awkward size on the software device; and a fault in each is seen.

use std::sync::{Arc, OnceLock};

use super::{attention::cuts_do_not_matter, *};
use crate::{
    backend::wgpu::{
        check::{
            made::Made,
            trial::{Difference, Fault, Trial, variants},
        },
        device::{Gpu, any},
    },
    error::Error,
    kv::KvType,
    spec::BlockSpec,
};

static GPU: OnceLock<Arc<Gpu>> = OnceLock::new();

/// Whether there is a device; without one a test is left out, and said to be.
fn there() -> bool {
    GPU.get().is_some() || any().map(|gpu| GPU.get_or_init(|| gpu)).is_some()
}

fn gpu() -> &'static Gpu {
    GPU.get().expect("a test looks whether there is one")
}

/// Runs a check in each variant of a kernel.
fn each_variant(name: &str, check: impl Fn(&Trial<'_>) -> Result<Difference, Error>) {
    for variant in variants(gpu(), name) {
        let difference = check(&Trial { gpu: gpu(), variant, fault: None }).expect("it runs");
        assert_eq!(difference.kernel, name);
        assert!(difference.is_small(), "{variant}: {difference:?}");
    }
}

/// Runs a check with a fault, which it must see.
fn sees(fault: Fault, check: impl Fn(&Trial<'_>) -> Result<Difference, Error>) {
    let trial = Trial { gpu: gpu(), variant: gpu().variants()[0], fault: Some(fault) };
    let difference = check(&trial).expect("it runs");
    assert!(!difference.is_small(), "{fault:?} is not seen: {difference:?}");
}

#[test]
fn rows_are_normed_and_quantised() {
    if !there() {
        return;
    }
    for (n, cols) in [(1, 128), (3, 256), (17, 384), (2, 640), (65, 2048), (5, 132)] {
        let mut made = Made::new(cols as u64);
        let mut x = made.values(n * cols, 2.0);
        let norm = made.norm(cols);
        each_variant("norm_quantize", |trial| norm_quantize(trial, &x, &norm, 1e-5));
        // A unit too small, one of zeros, and two with what is no number.
        for c in (0..cols).filter(|c| c % 32 < 8) {
            x[c] = if c % 32 < 4 { 1e-32 } else { 0.0 };
        }
        (x[9], x[13]) = (f32::NAN, f32::NEG_INFINITY);
        each_variant("quantize_rows", |trial| quantize_rows(trial, &x, cols));
    }
    let x = Made::new(1).values(3 * 384, 2.0);
    let norm = vec![1.0; 384];
    sees(Fault::Constant("norm_quantize", "EPS", 1e-3), |trial| norm_quantize(trial, &x, &norm, 1e-6));
    sees(Fault::Bits("norm_quantize", 1, 100, 1 << 16), |trial| norm_quantize(trial, &x, &norm, 1e-6));
    sees(Fault::Bits("quantize_rows", 0, 600, 1 << 20), |trial| quantize_rows(trial, &x, 384));
    sees(Fault::Constant("quantize_rows", "COLS", 380.0), |trial| quantize_rows(trial, &x, 384));
}

#[test]
fn ternary_matrices_meet_any_number_of_tokens() {
    if !there() {
        return;
    }
    let mut made = Made::new(2);
    let small = made.ternary(132, 384);
    for n in [1, 2, 3, 15, 16, 17, 63, 64, 65] {
        each_variant("ternary_gemm", |trial| ternary_gemm(trial, &small, n, [32, 64], false));
    }
    for tile in [[32, 8], [16, 64], [8, 32]] {
        each_variant("ternary_gemm", |trial| ternary_gemm(trial, &small, 37, tile, false));
    }
    for (rows, cols) in [(4, 128), (640, 256), (256, 640), (8, 132)] {
        let matrix = made.ternary(rows, cols);
        each_variant("ternary_gemm", |trial| ternary_gemm(trial, &matrix, 17, [32, 32], true));
    }
    let large = made.ternary(516, 2048);
    each_variant("ternary_gemm", |trial| ternary_gemm(trial, &large, 200, [32, 64], false));

    // One code of the last row, one activation's sign, one row's scale.
    let code = small.words.len() - 4 * 33 - 1;
    sees(Fault::Bits("ternary_gemm", 3, code, 1), |trial| ternary_gemm(trial, &small, 65, [32, 64], false));
    sees(Fault::Bits("ternary_gemm", 0, 40, 0x80), |trial| ternary_gemm(trial, &small, 3, [32, 8], false));
    let scale = small.words.len() - 1 - 30;
    sees(Fault::Bits("ternary_gemm", 3, scale, 1 << 6), |trial| {
        ternary_gemm(trial, &small, 3, [32, 8], false)
    });
    sees(Fault::Constant("ternary_gemm", "ADD", 0.0), |trial| ternary_gemm(trial, &small, 3, [32, 8], true));
}

#[test]
fn the_router_is_f32() {
    if !there() {
        return;
    }
    let mut made = Made::new(3);
    for (n_experts, cols, tokens) in
        [(4, 128, &[1, 3, 65][..]), (12, 384, &[31, 32, 33]), (65, 640, &[17]), (256, 2048, &[200])]
    {
        let (w, values) = made.bf16(n_experts, cols);
        for n in tokens {
            each_variant("router_gemm", |trial| router_gemm(trial, (&w, &values), cols, *n));
        }
    }
    let (w, values) = made.bf16(12, 128);
    sees(Fault::Bits("router_gemm", 2, 70, 1 << 19), |trial| router_gemm(trial, (&w, &values), 128, 5));
}

#[test]
fn tokens_find_their_experts() {
    if !there() {
        return;
    }
    for (n_experts, n_used, n) in [(4, 1, 3), (12, 3, 17), (256, 8, 65), (1000, 8, 2), (5, 5, 2)] {
        for (norm_topk, bad) in [(true, false), (false, true)] {
            each_variant("route", |trial| route(trial, n_experts, n_used, norm_topk, n, bad));
        }
    }
    sees(Fault::Constant("route", "NORM_TOPK", 0.0), |trial| route(trial, 12, 3, true, 5, false));
    sees(Fault::Constant("route", "N_EXPERTS", 11.0), |trial| route(trial, 12, 3, true, 5, false));
}

#[test]
fn pairs_are_sorted_by_expert() {
    if !there() {
        return;
    }
    for (n_experts, n_used, tokens, n) in
        [(4, 1, 16, 1), (12, 3, 16, 65), (256, 8, 64, 200), (1000, 8, 32, 17), (5, 5, 64, 2048)]
    {
        // Within an expert the order of slots is the order of tokens here, so everything must be equal.
        each_variant("sort_pairs", |trial| sort_pairs(trial, n_experts, n_used, tokens, n));
    }
    sees(Fault::Constant("sort_pairs", "TOKENS", 32.0), |trial| sort_pairs(trial, 12, 3, 16, 65));
    sees(Fault::Bits("sort_pairs", 1, 3, 1), |trial| sort_pairs(trial, 12, 3, 16, 65));
}

#[test]
fn experts_compute_their_pairs() {
    if !there() {
        return;
    }
    let mut made = Made::new(4);
    for (n, hidden, size, n_used, tokens, tile, split) in [
        (4, 128, 64, 1, &[1, 2, 17][..], [32, 16], None),
        (12, 256, 132, 3, &[15, 65], [32, 64], Some(5)),
        (9, 384, 512, 8, &[33], [16, 32], Some(1)),
    ] {
        let experts = Experts::made(&mut made, n, hidden, size, n_used);
        for n_tokens in tokens {
            each_variant("experts_in_gemm", |trial| experts_in_gemm(trial, &experts, *n_tokens, tile, split));
            each_variant("experts_out_gemm", |trial| {
                experts_out_gemm(trial, &experts, *n_tokens, tile, split)
            });
        }
    }
    let experts = Experts::made(&mut made, 4, 128, 64, 2);
    let inwards = |trial: &Trial<'_>| experts_in_gemm(trial, &experts, 17, [32, 16], Some(2));
    let outwards = |trial: &Trial<'_>| experts_out_gemm(trial, &experts, 17, [32, 16], Some(2));
    sees(Fault::Constant("experts_in_gemm", "GATE_MAX", 4.0), inwards);
    sees(Fault::Constant("experts_in_gemm", "UP_ABS_MAX", 2.0), inwards);
    sees(Fault::Constant("experts_in_gemm", "PER_SPLIT", 3.0), inwards);
    sees(Fault::Bits("experts_in_gemm", 2, experts.block[1] + 3, 1 << 4), inwards);
    sees(Fault::Bits("experts_out_gemm", 2, experts.block[2] + 3, 1), outwards);
    sees(Fault::Bits("experts_out_gemm", 4, 2, 1), outwards);
}

#[test]
fn what_experts_say_is_added() {
    if !there() {
        return;
    }
    for (cols, n_used, n) in [(128, 1, 1), (384, 3, 17), (2048, 8, 5)] {
        each_variant("combine", |trial| combine(trial, cols, n_used, n));
    }
    sees(Fault::Bits("combine", 0, 3, 1 << 20), |trial| combine(trial, 128, 2, 3));
}

const MAPLE: Heads = Heads {
    n_heads: 16,
    n_kv_heads: 4,
    head_dim: 128,
    rope_dim: 64,
    qk_norm: true,
    window: 512,
    capacity: 736,
    kv_f32: false,
};

const SMALL: Heads = Heads {
    n_heads: 4,
    n_kv_heads: 2,
    head_dim: 64,
    rope_dim: 32,
    qk_norm: true,
    window: 16,
    capacity: 96,
    kv_f32: false,
};

const fn new(slot: usize, position: usize, len: usize) -> Sequence {
    Sequence { slot, position, len }
}

#[test]
fn heads_turn_and_are_cached() {
    if !there() {
        return;
    }
    let rest = [
        Heads { rope_dim: 0, window: 0, ..SMALL },
        Heads { rope_dim: 0, qk_norm: false, ..SMALL },
        Heads { kv_f32: true, ..SMALL },
        Heads { head_dim: 32, rope_dim: 32, ..SMALL },
        Heads { n_heads: 3, n_kv_heads: 3, head_dim: 8, rope_dim: 2, ..SMALL },
    ];
    each_variant("rope_append", |trial| rope_append(trial, &MAPLE, &[new(0, 600, 17)]));
    for heads in [SMALL].iter().chain(&rest) {
        each_variant("rope_append", |trial| {
            rope_append(trial, heads, &[new(1, 0, 3), new(0, 90, 9), new(2, 5, 1)])
        });
    }
    let check = |trial: &Trial<'_>| rope_append(trial, &SMALL, &[new(1, 3, 5)]);
    sees(Fault::Constant("rope_append", "ROPE_DIM", 64.0), check);
    sees(Fault::Constant("rope_append", "K_EPS", 1e-2), check);
    sees(Fault::Constant("rope_append", "QK_NORM", 0.0), check);
    sees(Fault::Constant("rope_append", "CAPACITY", 128.0), check);
    sees(Fault::Bits("rope_append", 0, 2, 1), check);
}

#[test]
fn attention_sees_the_keys_it_should() {
    if !there() {
        return;
    }
    let whole = Heads { window: 0, capacity: 832, ..MAPLE };
    each_variant("attention_prefill", |trial| attention_prefill(trial, &MAPLE, &[new(0, 600, 70)]));
    each_variant("attention_prefill", |trial| attention_prefill(trial, &whole, &[new(0, 5, 200)]));
    each_variant("attention_prefill", |trial| {
        attention_prefill(trial, &whole, &[new(0, 600, 3), new(1, 0, 2), new(2, 63, 2)])
    });
    for n in [1, 2, 3, 15, 16, 17, 63, 64, 65] {
        for position in [0, 5, 600] {
            each_variant("attention_prefill", |trial| {
                attention_prefill(trial, &SMALL, &[new(0, position, n)])
            });
        }
    }
    let shapes = [
        Heads { window: 0, capacity: 704, kv_f32: true, ..SMALL },
        Heads { window: 16, head_dim: 32, ..SMALL },
        Heads { n_heads: 3, n_kv_heads: 3, head_dim: 8, ..SMALL },
        Heads { n_heads: 6, n_kv_heads: 1, head_dim: 104, kv_f32: true, ..SMALL },
        Heads { n_heads: 32, n_kv_heads: 1, head_dim: 128, ..SMALL },
        Heads { window: 1, ..SMALL },
        Heads { window: 0, capacity: 32, ..SMALL },
    ];
    for heads in shapes {
        let position = if heads.capacity < 96 { 20 } else { 70 };
        each_variant("attention_prefill", |trial| {
            attention_prefill(trial, &heads, &[new(1, position, 5), new(0, 0, 12), new(2, 3, 1)])
        });
    }
    let check = |trial: &Trial<'_>| attention_prefill(trial, &SMALL, &[new(1, 40, 17)]);
    for (constant, value) in [("WINDOW", 17.0), ("WINDOW", 15.0), ("CAPACITY", 64.0), ("KV_F32", 1.0)] {
        sees(Fault::Constant("attention_prefill", constant, value), check);
    }
    sees(Fault::Bits("attention_prefill", 0, 1, 1), check);
}

#[test]
fn attention_does_not_depend_on_how_a_prompt_is_cut() {
    if !there() {
        return;
    }
    for variant in gpu().variants() {
        let trial = Trial { gpu: gpu(), variant: *variant, fault: None };
        for heads in [SMALL, Heads { window: 0, capacity: 160, ..SMALL }] {
            let sequence = new(0, 3, 80);
            let same = cuts_do_not_matter(&trial, &heads, sequence, &[1, 2, 17, 60]).expect("it runs");
            assert!(same, "{variant} {heads:?}");
        }
    }
}

#[test]
fn a_gemm_does_not_depend_on_its_tile() {
    if !there() {
        return;
    }
    // Steps differ in length, so the tiles that suit them differ.
    let matrix = Made::new(5).ternary(64, 384);
    for variant in gpu().variants().iter().filter(|variant| !variant.subgroups) {
        let trial = Trial { gpu: gpu(), variant: *variant, fault: None };
        let bits = |tile, n| gemm::ternary_gemm_bits(&trial, &matrix, n, tile).expect("it runs");
        let whole = bits([32, 64], 70);
        for tile in [[32, 8], [16, 64]] {
            assert!(bits(tile, 70) == whole, "{variant} {tile:?}");
        }
    }
}

#[test]
fn layers_of_a_model_are_checked_with_their_own_weights() {
    if !there() {
        return;
    }
    let model = crate::fake::model("stress-maple-2bit");
    let layers = model.architecture().blocks.iter().filter_map(|block| match block {
        BlockSpec::Layer(layer) => Some(layer),
        BlockSpec::Embed(_) | BlockSpec::Head(_) => None,
    });
    let trial = Trial { gpu: gpu(), variant: gpu().variants()[0], fault: None };
    // One with a window and RoPE, one without.
    for spec in layers.skip(2) {
        let found = layer(&trial, &model, spec, KvType::Bf16, [32, 64]).expect("it runs");
        assert!(found.iter().all(Difference::is_small), "{found:?}");
    }
}
