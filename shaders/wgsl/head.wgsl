// logits = W q(norm(h)) for rows of W in 4 bits, and the largest of each 32. Workgroup (panels, row of h): PANELS panels.

// use head_rows

// Rows of h whose logits are wanted.
@group(0) @binding(0) var<storage, read> logit_rows: array<u32>;
// [tokens, COLS].
@group(0) @binding(1) var<storage, read> h: array<vec4<f32>>;
// [COLS].
@group(0) @binding(2) var<storage, read> norm: array<vec4<f32>>;
// Panels FIRST_PANEL to END_PANEL.
@group(0) @binding(3) var<storage, read> w: array<vec4<u32>>;
// [rows wanted, ROWS].
@group(0) @binding(4) var<storage, read_write> logits: array<f32>;
// order_key of the largest of each 32 rows, [rows wanted, ceil(ROWS / 32)].
@group(0) @binding(5) var<storage, read_write> maxima: array<u32>;

fn panel_wanted(i: u32) -> bool {
    return true;
}

// The dispatch is (ceil(panels in w / PANELS), rows wanted, 1).
@compute @workgroup_size(256)
fn head(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let first = group.x * PANELS;
    head_partials(first, logit_rows[group.y], local);

    let first_row = (FIRST_PANEL + first) * 4u;
    for (var base = 0u; base < PANELS * 4u; base += 256u) {
        let i = base + local;
        let row = first_row + i;
        let there = i < PANELS * 4u && row < min(ROWS, END_PANEL * 4u);
        var key = 0u;
        if there {
            let logit = head_logit(i);
            logits[group.y * ROWS + row] = logit;
            key = order_key(logit);
        }
        let most = max32(key, local);
        if there && local % 32u == 0u {
            maxima[group.y * ((ROWS + 31u) / 32u) + row / 32u] = most;
        }
    }
}
