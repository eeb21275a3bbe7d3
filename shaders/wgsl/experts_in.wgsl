// act = clamped SwiGLU of the gate and up projections, for each expert that the router chose, one token.
//
// Workgroup (panels, rank): it finds the expert of its rank itself and computes the same PANELS panels of gate and of up. One more of the
// first rank writes down who was chosen.

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
override GROUPS: u32 = (MATRIX_PANELS + PANELS - 1u) / PANELS;

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

// The word that has the scale of a row.
fn scale_word(matrix_at: u32, row: u32) -> u32 {
    return codes_at(matrix_at + MATRIX_PANELS * COL_BLOCKS * 32u + row / 2u);
}

// By one workgroup alone.
fn write_down(logit: f32, local: u32) {
    if local == 0u {
        atomicStore(&top_bad, 0u);
    }
    let largest = top_logits[0];
    let own = select(0.0, exp(logit - largest), local < N_EXPERTS);
    let total = sum256(own, local);
    if local < N_USED {
        top_weights[local] = exp(top_logits[local] - largest) / total;
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

// The dispatch is (GROUPS + 1, N_USED, 1).
@compute @workgroup_size(256)
fn experts_in(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let writes_down = group.x == GROUPS;
    if writes_down && group.y > 0u {
        return;
    }
    let logit = logits[min(local, N_EXPERTS - 1u)];
    if !writes_down {
        fetch(local);
    }
    top_k(logit, local);
    if writes_down {
        write_down(logit, local);
        return;
    }
    let expert = top_experts[group.y];
    second = expert >= PER_SPLIT;
    block_at = select(expert, expert - PER_SPLIT, second) * BLOCK_WORDS;
    first_panel = group.x * PANELS;
    let early = gemv_load(0u, local);
    let row = first_panel * 4u + local;
    let mine = local < 4u * PANELS && row < EXPERT_SIZE;
    var gate_scale = 0u;
    var up_scale = 0u;
    if mine {
        gate_scale = scale_word(0u, row);
        up_scale = scale_word(UP_AT, row);
    }
    gemv(early, local);
    if mine {
        let gate = at_most(gemv_sum(local) * bf16_half(gate_scale, row % 2u), GATE_MAX);
        let all_up = gemv_sum(4u * PANELS + local) * bf16_half(up_scale, row % 2u);
        let up = at_least(at_most(all_up, UP_ABS_MAX), -UP_ABS_MAX);
        act[group.y * EXPERT_SIZE + row] = gate / (1.0 + exp(-gate)) * up;
    }
}
