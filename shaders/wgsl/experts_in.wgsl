// act = clamped SwiGLU of the gate and up projections, for each expert that the router chose, one token.
//
// Workgroup (panels, rank): it finds the expert of its rank itself and computes the same PANELS panels of gate and of up. Workgroup
// (0, 0) writes down who was chosen.

// use fetch
// use gemv
// use top_k

// Rows of gate and up.
override EXPERT_SIZE: u32 = 512u;
// Panels of gate of a workgroup, and as many of up; at most 64.
override PANELS: u32 = 1u;
override GEMV_PANELS: u32 = 2u * PANELS;
// Words from one expert's block to the next, and of a block before `up`. `gate` is first.
override BLOCK_WORDS: u32 = 196608u;
override UP_AT: u32 = 65536u;
// Experts in x0; the others are in x1.
override PER_SPLIT: u32 = 0xffffffffu;
// Whether the chosen probabilities are divided by their sum.
override NORM_TOPK: bool = true;
override GATE_MAX: f32 = 7.0;
override UP_ABS_MAX: f32 = 7.0;
override MATRIX_PANELS: u32 = (EXPERT_SIZE + 3u) / 4u;

// A quantised row.
@group(0) @binding(0) var<storage, read> q: array<vec4<u32>>;
// [N_EXPERTS].
@group(0) @binding(1) var<storage, read> logits: array<f32>;
// Experts' blocks.
@group(0) @binding(2) var<storage, read> x0: array<u32>;
@group(0) @binding(3) var<storage, read> x1: array<u32>;
// [N_USED, EXPERT_SIZE].
@group(0) @binding(4) var<storage, read_write> act: array<f32>;
// (expert, bits of its weight), [N_USED].
@group(0) @binding(5) var<storage, read_write> chosen: array<vec2<u32>>;
// 0, or 1 + the first layer whose logits are not all numbers; the number of layers so far.
@group(0) @binding(6) var<storage, read_write> status: array<u32>;

var<workgroup> top_weights: array<f32, N_USED>;
var<workgroup> top_bad: atomic<u32>;

var<private> first_panel: u32;
var<private> block_at: u32;
var<private> second: bool;

fn fetch_at(i: u32) -> vec4<u32> {
    return q[i];
}

fn logit_at(i: u32) -> f32 {
    return logits[i];
}

fn panel_at(v: u32) -> u32 {
    let is_up = v >= PANELS;
    let panel = first_panel + select(v, v - PANELS, is_up);
    let at = select(0u, UP_AT, is_up) + panel * COL_BLOCKS * 32u;
    return select(NO_PANEL, at, panel < MATRIX_PANELS);
}

fn codes_at(at: u32) -> u32 {
    if second {
        return x1[block_at + at];
    }
    return x0[block_at + at];
}

fn row_scale(matrix_at: u32, row: u32) -> f32 {
    return bf16_half(codes_at(matrix_at + MATRIX_PANELS * COL_BLOCKS * 32u + row / 2u), row % 2u);
}

// By workgroup (0, 0) alone.
fn write_down(logit: f32, local: u32) {
    if local == 0u {
        atomicStore(&top_bad, 0u);
    }
    let largest = logits[top_experts[0]];
    let own = select(0.0, exp(logit - largest), local < N_EXPERTS);
    let total = sum256(own, local);
    if local < N_USED {
        top_weights[local] = exp(logits[top_experts[local]] - largest) / total;
    }
    workgroupBarrier();
    if local < N_EXPERTS && !is_number(logit) {
        atomicStore(&top_bad, 1u);
    }
    if local < N_USED {
        var weight = top_weights[local];
        if NORM_TOPK {
            var sum = 0.0;
            for (var i = 0u; i < N_USED; i++) {
                sum += top_weights[i];
            }
            weight /= sum + 1e-20;
        }
        chosen[local] = vec2(top_experts[local], bitcast<u32>(weight));
    }
    workgroupBarrier();
    if local == 0u {
        let layer = status[1] + 1u;
        status[1] = layer;
        if atomicLoad(&top_bad) != 0u && status[0] == 0u {
            status[0] = layer;
        }
    }
}

// The dispatch is (ceil(panels / PANELS), N_USED, 1).
@compute @workgroup_size(256)
fn experts_in(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    fetch(local);
    let logit = top_k(local);
    let expert = top_experts[group.y];
    second = expert >= PER_SPLIT;
    block_at = select(expert, expert - PER_SPLIT, second) * BLOCK_WORDS;
    first_panel = group.x * PANELS;
    let early = gemv_load(0u, local);
    let row = first_panel * 4u + local;
    let mine = local < 4u * PANELS && row < EXPERT_SIZE;
    var gate_scale = 0.0;
    var up_scale = 0.0;
    if mine {
        gate_scale = row_scale(0u, row);
        up_scale = row_scale(UP_AT, row);
    }
    gemv(early, local);
    if mine {
        let gate = at_most(gemv_sum(local) * gate_scale, GATE_MAX);
        let up = at_least(at_most(gemv_sum(4u * PANELS + local) * up_scale, UP_ABS_MAX), -UP_ABS_MAX);
        act[group.y * EXPERT_SIZE + row] = gate / (1.0 + exp(-gate)) * up;
    }
    if group.x == 0u && group.y == 0u {
        write_down(logit, local);
    }
}
