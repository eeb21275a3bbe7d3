// Hidden states from embedding rows: h[t] = row of token t, AFFINE4 (format/SPEC.md R23) to f32.
//
// A workgroup takes a token. A word of a chunk is eight columns: its low halves are columns 64g + 4w + 0..4, its high halves those
// 32 further on.

// use bits

// Columns, a multiple of 64.
override COLS: u32 = 2048u;
// Rows in `e0`, a multiple of 4; the others are in `e1`.
override PER_SPLIT: u32 = 0xfffffffcu;

// Of each token (id, slot, position, 0).
@group(0) @binding(0) var<storage, read> rows: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> e0: array<u32>;
@group(0) @binding(2) var<storage, read> e1: array<u32>;
// [tokens, COLS].
@group(0) @binding(3) var<storage, read_write> h: array<vec4<f32>>;

// Words of a panel: its header, 4 for each group of 64 columns, filled up to 32, and 32 for each group.
override GROUPS: u32 = COLS / 64u;
override HEADER_WORDS: u32 = (GROUPS * 4u + 31u) / 32u * 32u;
override PANEL_WORDS: u32 = HEADER_WORDS + GROUPS * 32u;

fn load(at: u32, second: bool) -> u32 {
    if second {
        return e1[at];
    }
    return e0[at];
}

// The dispatch is (tokens, 1, 1).
@compute @workgroup_size(256)
fn embed(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let token = rows[group.x].x;
    let second = token >= PER_SPLIT;
    let row = select(token, token - PER_SPLIT, second);
    let panel = row / 4u * PANEL_WORDS;
    let r = row % 4u;
    for (var i = local; i < COLS / 8u; i += 256u) {
        let g = i / 8u;
        let w = i % 8u;
        let scale = bf16_half(load(panel + g * 4u + r / 2u, second), r % 2u);
        let bias = bf16_half(load(panel + g * 4u + 2u + r / 2u, second), r % 2u);
        let word = load(panel + HEADER_WORDS + g * 32u + r * 8u + w, second);
        let low = vec4<f32>(vec4(word, word >> 8u, word >> 16u, word >> 24u) & vec4(15u));
        let high = vec4<f32>(vec4(word >> 4u, word >> 12u, word >> 20u, word >> 28u) & vec4(15u));
        let at = (group.x * COLS + g * 64u) / 4u + w;
        h[at] = low * scale + bias;
        h[at + 8u] = high * scale + bias;
    }
}
