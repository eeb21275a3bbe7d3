// The logits of some clusters' rows, with the bits that `head` gives them, and the largest of each 32 rows; for one row of h.
//
// A workgroup has 32 rows, so that most have nothing to do and leave before the norm. A first pass computes clusters flagged 1 and rows
// that are forced, and gives the others -infinity; a second one adds clusters flagged 2.

// use head_rows

// Rows of a cluster, a multiple of 4.
override CLUSTER: u32 = 32u;

// The row of h, in the first place.
@group(0) @binding(0) var<storage, read> logit_rows: array<u32>;
// [tokens, COLS].
@group(0) @binding(1) var<storage, read> h: array<vec4<f32>>;
// [COLS].
@group(0) @binding(2) var<storage, read> norm: array<vec4<f32>>;
// Panels FIRST_PANEL to END_PANEL.
@group(0) @binding(3) var<storage, read> w: array<vec4<u32>>;
// [ROWS / CLUSTER] flags of clusters, then the pass.
@group(0) @binding(4) var<storage, read> flags: array<u32>;
// [ceil(ROWS / 32)]: a bit for each row, set where it is forced.
@group(0) @binding(5) var<storage, read> forced: array<u32>;
// [ROWS], the bits of f32.
@group(0) @binding(6) var<storage, read_write> logits: array<u32>;
// order_key of the largest of each 32 rows, [ceil(ROWS / 32)].
@group(0) @binding(7) var<storage, read_write> maxima: array<u32>;

const MINUS_INFINITY: u32 = 0xff800000u;

// A bit for each row of the workgroup that this pass computes.
var<private> wanted: u32;

fn panel_wanted(i: u32) -> bool {
    return ((wanted >> (4u * i)) & 15u) != 0u;
}

// `wanted` of rows `first` to `end`, at most 32.
fn rows_wanted(first: u32, end: u32, pass_number: u32) -> u32 {
    var rows = select(0u, forced[first / 32u], pass_number == 1u);
    for (var row = first; row < end;) {
        let next = min((row / CLUSTER + 1u) * CLUSTER, end);
        if flags[row / CLUSTER] == pass_number {
            rows = insertBits(rows, 0xffffffffu, row - first, next - row);
        }
        row = next;
    }
    return rows;
}

// The dispatch is (ceil(panels in w / 8), 1, 1), and PANELS is 8.
@compute @workgroup_size(256)
fn flash_rows(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let first = group.x * 8u;
    let first_row = (FIRST_PANEL + first) * 4u;
    let end = min(first_row + 32u, min(ROWS, END_PANEL * 4u));
    let row = first_row + local;
    let pass_number = flags[ROWS / CLUSTER];
    wanted = rows_wanted(first_row, end, pass_number);
    if wanted == 0u {
        if pass_number == 1u && row < end {
            logits[row] = MINUS_INFINITY;
            if local == 0u {
                maxima[row / 32u] = MINUS_INFINITY_KEY;
            }
        }
        return;
    }
    head_partials(first, logit_rows[0], local);

    var key = MINUS_INFINITY_KEY;
    if row < end {
        if ((wanted >> local) & 1u) == 1u {
            let logit = head_logit(local);
            logits[row] = bitcast<u32>(logit);
            key = order_key(logit);
        } else if pass_number == 1u {
            logits[row] = MINUS_INFINITY;
        }
    }
    let most = max32(key, local);
    if local == 0u {
        maxima[row / 32u] = select(max(maxima[row / 32u], most), most, pass_number == 1u);
    }
}
