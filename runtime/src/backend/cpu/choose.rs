//! Which kernel runs what, by a short measurement on the block's own weights.
//!
//! All variants return the same bits, so a measurement disturbed by something else on the machine costs time and nothing
//! else.

use std::hint::black_box;
use std::time::{Duration, Instant};

use samara_simd::{
    Affine4Rows, Bf16Rows, Isa, KV_BLOCK, KV_PART, Kernels, Kv, KvSlice, Op, TernaryRows, attention_state_len,
};

use super::scratch::Act;
use crate::{
    model::Model,
    spec::{BlockSpec, HeadSpec, LayerSpec, MatrixRef},
};

/// Each variant is timed in this many turns, and its best turn counts.
const TURNS: usize = 5;

/// A turn repeats the work for at least this long.
const TURN: Duration = Duration::from_micros(300);

/// No turn begins after this long: what is so slow that it matters is measured well in one.
const ENOUGH: Duration = Duration::from_millis(10);

/// While an earlier set seems faster than the last, which can do more, all are timed once more, this many times in all: a choice is
/// kept, and another program may have had the core in just the last set's turns.
const ROUNDS: usize = 3;

/// Time between those, longer than a system lets one program run while another waits.
const PAUSE: Duration = Duration::from_millis(20);

/// Tokens that share a matrix in a measurement of gemm: what an expert sees in a prefill of 512.
const TOKENS: usize = 16;

/// Rows of the head that are timed; all of it would be read from the disk.
const HEAD_ROWS: usize = 1024;

/// What a block's kernels work on; blocks of equal shape have the same fastest kernels.
pub(super) fn shape(spec: &BlockSpec) -> String {
    let of = |m: &MatrixRef| format!("{}x{}", m.rows, m.cols);
    match spec {
        BlockSpec::Embed(embed) => format!("embed {}", of(&embed.weight)),
        BlockSpec::Layer(LayerSpec { index: _, attn, moe }) => format!(
            "layer {} {} {}:{} {} {}",
            of(&attn.qkv),
            of(&attn.o),
            attn.n_heads / attn.n_kv_heads,
            attn.head_dim,
            of(&moe.router),
            moe.expert_size
        ),
        BlockSpec::Head(head) => format!("head {}", of(&head.weight)),
    }
}

/// The tables to choose from: every instruction set of this machine, the definition only where there is no other.
fn tables() -> Vec<Kernels> {
    let of = |isa: Isa| Kernels::for_isa(isa).ok();
    let tables: Vec<_> = Isa::ALL.into_iter().filter(|isa| *isa != Isa::Scalar).filter_map(of).collect();
    if tables.is_empty() { vec![Kernels::scalar()] } else { tables }
}

/// `kernels` with the fastest variant of each operation that takes a block's time.
pub(super) fn fastest(model: &Model, spec: &BlockSpec, kernels: Kernels) -> Kernels {
    match spec {
        // A row is a few microseconds.
        BlockSpec::Embed(_) => kernels,
        BlockSpec::Layer(layer) => fastest_of_layer(model, layer, kernels),
        BlockSpec::Head(head) => fastest_of_head(model, head, kernels),
    }
}

fn fastest_of_layer(model: &Model, spec: &LayerSpec, kernels: Kernels) -> Kernels {
    let LayerSpec { index: _, attn, moe } = spec;
    let (hidden_size, expert_size) = (moe.router.cols, moe.expert_size);
    let expert = |part, rows, cols| TernaryRows::from_part(model.expert(moe.experts, 0, part), rows, cols);
    let matrix = |m: &MatrixRef| TernaryRows::from_part(model.matrix(m), m.rows, m.cols);
    let matrices = [
        (matrix(&attn.qkv), attn.qkv.cols),
        (matrix(&attn.o), attn.o.cols),
        (expert(0, expert_size, hidden_size), hidden_size),
        (expert(1, expert_size, hidden_size), hidden_size),
        (expert(2, hidden_size, expert_size), expert_size),
    ];
    let widest = hidden_size.max(attn.o.cols);
    let mut out = vec![0.0; TOKENS * matrices.iter().map(|(rows, _)| rows.rows()).max().unwrap_or(0)];
    let x = inputs(TOKENS * widest);
    let tokens: Vec<u32> = (0..).take(TOKENS).collect();
    let mut acts: Vec<Act> = Vec::new();
    for (_, cols) in &matrices {
        let mut act = Act::new(TOKENS, *cols);
        act.quantize(&kernels, &x[..TOKENS * cols], *cols);
        acts.push(act);
    }
    let kernels = best(kernels, Op::TernaryGemv, |kernels| {
        for ((rows, cols), act) in matrices.iter().zip(&acts) {
            kernels.ternary_gemv(rows, &act.row(0, *cols), 0..rows.rows(), &mut out[..rows.rows()]);
        }
    });
    let kernels = best(kernels, Op::TernaryGemm, |kernels| {
        for ((rows, cols), act) in matrices.iter().zip(&acts) {
            let out = &mut out[..TOKENS * rows.rows()];
            kernels.ternary_gemm(rows, &act.rows(TOKENS, *cols), &tokens, 0..rows.rows(), out);
        }
    });
    let router = Bf16Rows::new(model.matrix(&moe.router), moe.router.rows, hidden_size);
    let mut out = vec![0.0; TOKENS * router.rows()];
    let kernels = best(kernels, Op::Bf16Gemv, |kernels| {
        kernels.bf16_gemv(&router, &x[..hidden_size], 0..router.rows(), &mut out[..router.rows()]);
    });
    let kernels = best(kernels, Op::Bf16Gemm, |kernels| {
        kernels.bf16_gemm(&router, &x[..TOKENS * hidden_size], 0..router.rows(), &mut out);
    });
    let (group, head_dim) = (attn.n_heads / attn.n_kv_heads, attn.head_dim);
    let n_keys = KV_PART - KV_BLOCK / 2;
    let elements: Vec<u16> =
        inputs(KV_PART * head_dim).iter().map(|&x| half::bf16::from_f32(x).to_bits()).collect();
    let queries = inputs(group * head_dim);
    let (mut weights, mut state) =
        (vec![0.0; group * KV_PART], vec![0.0; attention_state_len(group, head_dim)]);
    let kernels = best(kernels, Op::AttentionPart, |kernels| {
        let slice = KvSlice { kv: Kv::Bf16 { keys: &elements, values: &elements }, n_keys, head_dim };
        kernels.attention_part(&queries, &slice, 0, 0.1, &mut weights, &mut state);
    });
    let mut act = Act::new(1, hidden_size);
    best(kernels, Op::Quantize, |kernels| act.quantize(kernels, &x[..hidden_size], hidden_size))
}

fn fastest_of_head(model: &Model, spec: &HeadSpec, kernels: Kernels) -> Kernels {
    let HeadSpec { norm: _, weight, token_map: _, flash: _ } = spec;
    let rows = Affine4Rows::new(model.matrix(weight), weight.rows, weight.cols);
    let n = HEAD_ROWS.min(weight.rows);
    let mut act = Act::new(TOKENS, weight.cols);
    act.quantize(&kernels, &inputs(TOKENS * weight.cols), weight.cols);
    let tokens: Vec<u32> = (0..).take(TOKENS).collect();
    let mut out = vec![0.0; TOKENS * n];
    let kernels = best(kernels, Op::Affine4Gemv, |kernels| {
        kernels.affine4_gemv(&rows, &act.row(0, weight.cols), 0..n, &mut out[..n]);
    });
    best(kernels, Op::Affine4Gemm, |kernels| {
        kernels.affine4_gemm(&rows, &act.rows(TOKENS, weight.cols), &tokens, 0..n, &mut out);
    })
}

/// `kernels` with the variant of `op` that does `work` soonest.
fn best(kernels: Kernels, op: Op, mut work: impl FnMut(&Kernels)) -> Kernels {
    let tables = tables();
    if tables.len() == 1 {
        return kernels.with(op, &tables[0]);
    }
    let mut times = vec![Duration::MAX; tables.len()];
    for round in 0..ROUNDS {
        if round > 0 {
            std::thread::sleep(PAUSE);
        }
        time(&tables, &mut times, &mut work);
        if fastest_of(&times) == tables.len() - 1 {
            break;
        }
    }
    kernels.with(op, &tables[fastest_of(&times)])
}

/// Lowers each of `times` to what `work` takes with its table, where that is less.
fn time(tables: &[Kernels], times: &mut [Duration], work: &mut impl FnMut(&Kernels)) {
    let begun = Instant::now();
    for turn in 0..TURNS {
        if turn > 0 && begun.elapsed() > ENOUGH {
            break;
        }
        for (table, best) in tables.iter().zip(times.iter_mut()) {
            let started = Instant::now();
            let mut n = 0;
            while n == 0 || started.elapsed() < TURN {
                work(black_box(table));
                n += 1;
            }
            *best = (*best).min(started.elapsed() / n);
        }
    }
}

/// The last time that is hardly longer than the shortest: instruction sets ascend, and so does what they can do.
fn fastest_of(times: &[Duration]) -> usize {
    let shortest = times.iter().min().copied().unwrap_or_default().as_secs_f64();
    times.iter().rposition(|time| time.as_secs_f64() <= 1.03 * shortest).unwrap_or(0)
}

/// Values between -1 and 1, the same each time.
fn inputs(n: usize) -> Vec<f32> {
    (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_set_is_taken_if_it_is_as_fast() {
        for (micros, expected) in [
            (&[10][..], 0),
            (&[10, 10], 1),
            (&[100, 102], 1),
            (&[100, 104], 0),
            (&[9, 5, 7], 1),
            (&[0, 0, 0], 2),
        ] {
            let times: Vec<_> = micros.iter().map(|&n| Duration::from_micros(n)).collect();
            assert_eq!(fastest_of(&times), expected, "{micros:?}");
        }
    }
}
