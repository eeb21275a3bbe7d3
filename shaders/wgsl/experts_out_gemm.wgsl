// y = down(act) of each pair of a token and an expert, without the router's weight.
//
// Grid: (ceil(ROWS / (4 * PANELS)), most tiles).
//
// Bindings: xq, xs as in lib/quantize_unit, [places]; x0, x1, pairs, tiles as in lib/expert_tile; y f32 [tokens * N_USED, ROWS], a row
// for each token and rank.
// Constants: ROWS (hidden size), a multiple of 4; COLS (expert size); BLOCK_WORDS and PER_SPLIT; DOWN_AT, the words of a block before
// its down part; PANELS and TOKENS, of which sort_pairs has the same.

// use expert_tile

override ROWS: u32 = 2048u;
override DOWN_AT: u32 = 131584u;
override N_PANELS: u32 = (ROWS + 3u) / 4u;

@group(0) @binding(6) var<storage, read_write> y: array<vec4<f32>>;

fn tile_codes(panel: u32, block: u32, word: u32) -> vec4<u32> {
    let p = first_panel + panel;
    if p >= N_PANELS || block >= BLOCKS {
        return vec4<u32>();
    }
    let at = DOWN_AT + (p * BLOCKS + block) * 32u + word;
    return vec4<u32>(expert_word(at), expert_word(at + 8u), expert_word(at + 16u), expert_word(at + 24u));
}

fn tile_token(i: u32) -> u32 {
    return expert_tile.y + min(i, expert_tile.z - 1u);
}

fn put(i: u32, panel: u32, scales: vec4<f32>, sums: vec4<f32>) {
    if i < expert_tile.z {
        y[pairs[expert_tile.y + i] * N_PANELS + panel] = scales * sums;
    }
}

@compute @workgroup_size(256)
fn experts_out_gemm(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    if !expert_begin(group) {
        return;
    }
    let sums = tile_sums(local, expert_tile.z);

    let panel = first_panel + tile_panel_of(local);
    if panel >= N_PANELS {
        return;
    }
    let at = DOWN_AT + N_PANELS * BLOCKS * 32u + 2u * panel;
    let scales = tile_row_scales(expert_word(at), expert_word(at + 1u));
    tile_put(local, panel, scales, sums);
}
