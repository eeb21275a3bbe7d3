// h += W x for one token: the output projection, ternary, of what attention_merge has quantised.

// use fetch
// use gemv_matrix

// Rows of W.
override ROWS: u32 = 2048u;

// A quantised row.
@group(0) @binding(0) var<storage, read> q: array<vec4<u32>>;
// Codes, then row scales.
@group(0) @binding(1) var<storage, read> w: array<u32>;
// [ROWS].
@group(0) @binding(2) var<storage, read_write> h: array<f32>;

fn fetch_at(i: u32) -> vec4<u32> {
    return q[i];
}

// The dispatch is (ceil(panels / PANELS), 1, 1).
@compute @workgroup_size(256)
fn gemv_add(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    first_panel = group.x * PANELS;
    let early = gemv_load(0u, local);
    let row = first_panel * 4u + local;
    let mine = local < 4u * PANELS && row < ROWS;
    var scale = 0u;
    var before = 0.0;
    if mine {
        scale = scale_word(row);
        before = h[row];
    }
    fetch(local);
    workgroupBarrier();
    gemv(early, local);
    if mine {
        h[row] = before + gemv_sum(local) * bf16_half(scale, row % 2u);
    }
}
