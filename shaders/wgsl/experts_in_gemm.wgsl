// act = silu(min(gate, GATE_MAX)) * clamp(up, -UP_ABS_MAX, UP_ABS_MAX) of each pair of a token and an expert.
//
// Grid: (ceil(EXPERT_SIZE / (2 * PANELS)), most tiles). A "panel" of the tile is rows 2i and 2i + 1 of gate, then the same of up, so that
// an invocation has what SwiGLU needs.
//
// Bindings: xq, xs as in lib/quantize_unit, [tokens]; x0, x1, pairs, tiles as in lib/expert_tile; act f32 [places, EXPERT_SIZE].
// Constants: COLS (hidden size); EXPERT_SIZE, a multiple of 4; N_USED; BLOCK_WORDS and PER_SPLIT; UP_AT, the words of a block before
// its up part (gate is at 0); GATE_MAX; UP_ABS_MAX; PANELS and TOKENS, of which sort_pairs has the same.

// use expert_tile

override EXPERT_SIZE: u32 = 512u;
override UP_AT: u32 = 65792u;
override GATE_MAX: f32 = 7.0;
override UP_ABS_MAX: f32 = 7.0;
override N_PANELS: u32 = (EXPERT_SIZE + 3u) / 4u;

@group(0) @binding(6) var<storage, read_write> act: array<vec2<f32>>;

fn tile_codes(panel: u32, block: u32, word: u32) -> vec4<u32> {
    let p = first_panel + panel;
    if 2u * p >= EXPERT_SIZE || block >= BLOCKS {
        return vec4<u32>();
    }
    let at = (p / 2u * BLOCKS + block) * 32u + p % 2u * 16u + word;
    return vec4<u32>(
        expert_word(at),
        expert_word(at + 8u),
        expert_word(UP_AT + at),
        expert_word(UP_AT + at + 8u),
    );
}

fn tile_token(i: u32) -> u32 {
    return pairs[expert_tile.y + min(i, expert_tile.z - 1u)] / N_USED;
}

fn activated(gate: f32, up: f32) -> f32 {
    let g = at_most(gate, GATE_MAX);
    return g / (1.0 + exp(-g)) * at_least(at_most(up, UP_ABS_MAX), -UP_ABS_MAX);
}

// `sums` are two of gate, two of up.
fn put(i: u32, panel: u32, scales: vec4<f32>, sums: vec4<f32>) {
    if i < expert_tile.z {
        let y = scales * sums;
        act[(expert_tile.y + i) * (EXPERT_SIZE / 2u) + panel] = vec2<f32>(activated(y.x, y.z), activated(y.y, y.w));
    }
}

@compute @workgroup_size(256)
fn experts_in_gemm(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    if !expert_begin(group) {
        return;
    }
    let sums = tile_sums(local, expert_tile.z);

    let panel = first_panel + tile_panel_of(local);
    if 2u * panel >= EXPERT_SIZE {
        return;
    }
    let at = N_PANELS * BLOCKS * 32u + panel;
    let scales = tile_row_scales(expert_word(at), expert_word(UP_AT + at));
    tile_put(local, panel, scales, sums);
}
