// The parts of one token's attention as one, and that as int8: sum of weighted values / sum of weights, quantised for the output
// projection.
//
// A workgroup has a span of 256 columns.

// use int8
// use parts

override N_HEADS: u32 = 16u;
override HEAD_DIM: u32 = 128u;
override COLS: u32 = N_HEADS * HEAD_DIM;
override COL_BLOCKS: u32 = (COLS + 127u) / 128u;
override SPANS: u32 = (COL_BLOCKS + 1u) / 2u;

// (token, slot, position, 0).
@group(0) @binding(0) var<storage, read> rows: array<vec4<u32>>;
// As `attention` leaves it.
@group(0) @binding(1) var<storage, read> states: array<f32>;
// A quantised row, as lib/fetch reads it.
@group(0) @binding(2) var<storage, read_write> q: array<u32>;

// Parts whose sums are on their way at a time.
const AHEAD: u32 = 8u;

var<workgroup> row: array<f32, 256>;
// [plane and block][w].
var<workgroup> largest_of: array<u32, 64>;

// (largest, total) of a part's head; a part that is not there weighs nothing.
fn pair_at(part: u32, parts: u32, head: u32) -> vec2<f32> {
    let at = MAX_PARTS * COLS + 2u * (min(part, parts - 1u) * N_HEADS + head);
    return vec2(states[at], select(0.0, states[at + 1u], part < parts));
}

// The dispatch is (spans, 1, 1).
@compute @workgroup_size(256)
fn attention_merge(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let column = group.x * 256u + local;
    var y = 0.0;
    if column < COLS {
        let parts = n_parts(n_keys(rows[0].z));
        let head = column / HEAD_DIM;
        var most = -3.4028234e38;
        var total = 0.0;
        var sum = 0.0;
        for (var base = 0u; base < parts; base += AHEAD) {
            var pairs: array<vec2<f32>, AHEAD>;
            var sums: array<f32, AHEAD>;
            for (var i = 0u; i < AHEAD; i++) {
                pairs[i] = pair_at(base + i, parts, head);
                sums[i] = states[min(base + i, parts - 1u) * COLS + column];
            }
            var now = most;
            for (var i = 0u; i < AHEAD; i++) {
                now = max(now, pairs[i].x);
            }
            let old = exp(most - now);
            total *= old;
            sum *= old;
            for (var i = 0u; i < AHEAD; i++) {
                let weight = exp(pairs[i].x - now);
                total += weight * pairs[i].y;
                sum += select(0.0, weight * sums[i], base + i < parts);
            }
            most = now;
        }
        y = sum / total;
    }
    row[local] = y;
    workgroupBarrier();

    let i = local / 8u;
    let w = local % 8u;
    var four = vec4(0.0);
    if local < 64u {
        let at = 32u * i + 4u * w;
        four = vec4(row[at], row[at + 1u], row[at + 2u], row[at + 3u]);
        largest_of[local] = int8_largest(four);
    }
    workgroupBarrier();
    if local < 64u {
        var largest = 0u;
        for (var j = 0u; j < 8u; j++) {
            largest = max(largest, largest_of[8u * j + w]);
        }
        if i == 0u {
            q[COL_BLOCKS * 32u + group.x * 8u + w] = int8_scale(largest);
        }
        let block = 2u * group.x + i / 4u;
        if block < COL_BLOCKS {
            q[(block * 8u + w) * 4u + i % 4u] = int8_word(four, largest);
        }
    }
}
