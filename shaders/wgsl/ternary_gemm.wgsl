// out = W x for one ternary matrix and the step's tokens, or out += W x.
//
// Grid: (ceil(ROWS / (4 * PANELS)), ceil(tokens / TOKENS)).
//
// Bindings: xq, xs as in lib/quantize_unit, [tokens]; rows, of which the first tells the number of tokens; w, a TERNARY2 part
// [ROWS, COLS]; out f32 [tokens, ROWS].
// Constants: ROWS, a multiple of 4; COLS, a multiple of 4; ADD; PANELS and TOKENS, the tile, as in lib/gemm_tile.

// use gemm_tile

override ROWS: u32 = 2048u;
override ADD: bool = false;
override N_PANELS: u32 = (ROWS + 3u) / 4u;

// (token, slot, position, tokens of the step).
@group(0) @binding(2) var<storage, read> rows: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> w: array<u32>;
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;

var<private> first_panel: u32;
var<private> first_token: u32;
var<private> n_tokens: u32;

fn tile_codes(panel: u32, block: u32, word: u32) -> vec4<u32> {
    let p = first_panel + panel;
    if p >= N_PANELS || block >= BLOCKS {
        return vec4<u32>();
    }
    let at = (p * BLOCKS + block) * 32u + word;
    return vec4<u32>(w[at], w[at + 8u], w[at + 16u], w[at + 24u]);
}

fn tile_token(i: u32) -> u32 {
    return first_token + min(i, n_tokens - 1u);
}

fn put(i: u32, panel: u32, scales: vec4<f32>, sums: vec4<f32>) {
    if i < n_tokens {
        let at = (first_token + i) * N_PANELS + panel;
        if ADD {
            out[at] += scales * sums;
        } else {
            out[at] = scales * sums;
        }
    }
}

@compute @workgroup_size(256)
fn ternary_gemm(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    first_panel = group.x * PANELS;
    first_token = group.y * TOKENS;
    n_tokens = min(rows[0].w - first_token, TOKENS);
    let sums = tile_sums(local, n_tokens);

    let panel = first_panel + tile_panel_of(local);
    if panel >= N_PANELS {
        return;
    }
    let pair0 = w[N_PANELS * BLOCKS * 32u + 2u * panel];
    let pair1 = w[N_PANELS * BLOCKS * 32u + 2u * panel + 1u];
    let scales = tile_row_scales(pair0, pair1);
    tile_put(local, panel, scales, sums);
}
