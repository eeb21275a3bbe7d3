// y = W q(norm(h)) for one token and a ternary matrix (format/SPEC.md R22).
//
// A workgroup computes PANELS panels of 4 rows. It norms and quantises the row itself, which costs less than a dispatch of its
// own, while its first code words are on their way.

// use norm
// use gemv

// Rows of W.
override ROWS: u32 = 3072u;
// Panels of a workgroup, at most 64: an invocation for each row.
override PANELS: u32 = 1u;
override GEMV_PANELS: u32 = PANELS;
override MATRIX_PANELS: u32 = (ROWS + 3u) / 4u;

// [COLS].
@group(0) @binding(0) var<storage, read> h: array<vec4<f32>>;
// [COLS].
@group(0) @binding(1) var<storage, read> norm: array<vec4<f32>>;
// Codes, then row scales.
@group(0) @binding(2) var<storage, read> w: array<u32>;
// [ROWS].
@group(0) @binding(3) var<storage, read_write> y: array<f32>;

var<private> first_panel: u32;

fn row_at(i: u32) -> vec4<f32> {
    return h[i];
}

fn norm_at(i: u32) -> vec4<f32> {
    return norm[i];
}

fn panel_at(v: u32) -> u32 {
    let panel = first_panel + v;
    return select(NO_PANEL, panel * COL_BLOCKS * 32u, panel < MATRIX_PANELS);
}

fn codes_at(at: u32) -> u32 {
    return w[at];
}

// The dispatch is (ceil(panels / PANELS), 1, 1).
@compute @workgroup_size(256)
fn norm_gemv(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    first_panel = group.x * PANELS;
    let x = norm_load(local);
    let norm_w = norm_weights(local);
    let early = gemv_load(0u, local);
    let row = first_panel * 4u + local;
    let mine = local < 4u * PANELS && row < ROWS;
    var scale = 0.0;
    if mine {
        scale = bf16_half(w[MATRIX_PANELS * COL_BLOCKS * 32u + row / 2u], row % 2u);
    }
    norm_quantize(x, norm_w, local);
    gemv(early, local);
    if mine {
        y[row] = gemv_sum(local) * scale;
    }
}
