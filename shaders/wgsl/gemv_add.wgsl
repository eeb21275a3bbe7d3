// h += W x for one token: the output projection, ternary, of what attention_merge has quantised.

// use fetch
// use gemv

// Rows of W.
override ROWS: u32 = 2048u;
// Panels of a workgroup, at most 64: an invocation for each row.
override PANELS: u32 = 1u;
override GEMV_PANELS: u32 = PANELS;
override MATRIX_PANELS: u32 = (ROWS + 3u) / 4u;

// A quantised row.
@group(0) @binding(0) var<storage, read> q: array<vec4<u32>>;
// Codes, then row scales.
@group(0) @binding(1) var<storage, read> w: array<u32>;
// [ROWS].
@group(0) @binding(2) var<storage, read_write> h: array<f32>;

var<private> first_panel: u32;

fn fetch_at(i: u32) -> vec4<u32> {
    return q[i];
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
fn gemv_add(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    first_panel = group.x * PANELS;
    let early = gemv_load(0u, local);
    let row = first_panel * 4u + local;
    let mine = local < 4u * PANELS && row < ROWS;
    var scale = 0.0;
    var before = 0.0;
    if mine {
        scale = bf16_half(w[MATRIX_PANELS * COL_BLOCKS * 32u + row / 2u], row % 2u);
        before = h[row];
    }
    fetch(local);
    workgroupBarrier();
    gemv(early, local);
    if mine {
        h[row] = before + gemv_sum(local) * scale;
    }
}
