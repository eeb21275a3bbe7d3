// What the clusters of a head are ranked by for one row of h: the scores of their centroids or, where the result is to be certified, what
// no logit of a cluster exceeds (runtime/src/flash.rs has the formula). A workgroup has PANELS panels of centroids.

// use head_rows

// Whether keys are bounds.
override CERTIFIED: bool = false;
// The relative error of a dot product, as runtime/src/flash.rs has it.
override ROUNDING: f32 = 0.000126;

// The row of h, in the first place.
@group(0) @binding(0) var<storage, read> logit_rows: array<u32>;
// [tokens, COLS].
@group(0) @binding(1) var<storage, read> h: array<vec4<f32>>;
// [COLS].
@group(0) @binding(2) var<storage, read> norm: array<vec4<f32>>;
// Panels FIRST_PANEL to END_PANEL.
@group(0) @binding(3) var<storage, read> w: array<vec4<u32>>;
// [ROWS]: (high, low), (radius, norm), (centroid_magnitude, row_magnitude).
@group(0) @binding(4) var<storage, read> bounds: array<vec2<f32>>;
// order_key of scores or bounds, [ROWS]; filled up to fours with zeros, which are below all others.
@group(0) @binding(5) var<storage, read_write> keys: array<u32>;

// Above what f32 arithmetic of a few steps, a root and a division lose, relative to the largest terms; and below.
const UP: f32 = 1.000003814697265625;
const DOWN: f32 = 0.999996185302734375;
// 2^-100, above what is lost to underflow. Numbers below may be taken for 0.
const TINY: f32 = 7.888609052210118e-31;

fn panel_wanted(i: u32) -> bool {
    return true;
}

// At least the squared length of the row in xq and xs.
fn square_length(local: u32) -> f32 {
    var square = 0.0;
    for (var i = local; i < COL_BLOCKS * 8u; i += 256u) {
        let q = xq[i];
        let scale = xs[i / 16u * 8u + i % 8u];
        let sum = (dot4(q.x, q.x) + dot4(q.y, q.y)) + (dot4(q.z, q.z) + dot4(q.w, q.w));
        square += scale * scale * f32(sum);
    }
    return sum256(square, local) * UP + TINY;
}

// At least what no logit of cluster `i` exceeds.
fn bound_of(i: u32, score: f32, square: f32) -> f32 {
    let range = bounds[3u * i];
    let radius = bounds[3u * i + 1u].x;
    let norm = bounds[3u * i + 1u].y;
    let errors = bounds[3u * i + 2u] * (ROUNDING * sqrt(square) * UP);
    var along = 0.0;
    if norm >= TINY {
        along = max(abs(score) - errors.x, 0.0) / norm * DOWN;
    }
    let across = radius * sqrt(max(square - along * along * DOWN, 0.0) + TINY);
    let most = max(range.x * score, range.y * score);
    let rest = (max(abs(range.x), abs(range.y)) * errors.x + across) + errors.y;
    return (most + rest) + (abs(most) + rest) * (UP - 1.0);
}

// The dispatch is (ceil(panels in w / PANELS), 1, 1).
@compute @workgroup_size(256)
fn centroids(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let first = group.x * PANELS;
    head_partials(first, logit_rows[0], local);
    var square = 0.0;
    if CERTIFIED {
        square = square_length(local);
    }
    let row = (FIRST_PANEL + first) * 4u + local;
    if local < PANELS * 4u && row < END_PANEL * 4u {
        var key = 0u;
        if row < ROWS {
            var value = head_logit(local);
            if CERTIFIED {
                value = bound_of(row, value, square);
            }
            key = order_key(value);
        }
        keys[row] = key;
    }
}
