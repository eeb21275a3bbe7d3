// y = W q(norm(h)) for one token and a ternary matrix (format/SPEC.md R22).
//
// A workgroup computes PANELS panels of 4 rows. It norms and quantises the row itself, which costs less than a dispatch of its
// own, while its first code words are on their way.

// use norm
// use gemv_matrix

// Rows of W.
override ROWS: u32 = 3072u;

// [COLS].
@group(0) @binding(0) var<storage, read> h: array<vec4<f32>>;
// [COLS].
@group(0) @binding(1) var<storage, read> norm: array<vec4<f32>>;
// Codes, then row scales.
@group(0) @binding(2) var<storage, read> w: array<u32>;
// [ROWS].
@group(0) @binding(3) var<storage, read_write> y: array<f32>;

fn row_at(i: u32) -> vec4<f32> {
    return h[i];
}

fn norm_at(i: u32) -> vec4<f32> {
    return norm[i];
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
    var scale = 0u;
    if mine {
        scale = scale_word(row);
    }
    norm_quantize(x, norm_w, local);
    gemv(early, local);
    if mine {
        y[row] = gemv_sum(local) * bf16_half(scale, row % 2u);
    }
}
