// Which clusters of the head are read for a token: those whose keys are largest, of equal ones the lower index first. Keys are scores of
// centroids or, where the result is to be certified, what bounds the logits of a cluster (runtime/src/flash.rs has the formula).
//
// One workgroup. The N_PROBES-th largest key is found by its bytes, from the highest: in each of four rounds the keys that agree so far
// are counted by their next byte.

// use norm

override N_CLUSTERS: u32 = 4748u;
override N_PROBES: u32 = 512u;
// Whether keys are bounds.
override CERTIFIED: bool = false;
// The relative error of a dot product, as runtime/src/flash.rs has it.
override ROUNDING: f32 = 0.000126;
override FOURS: u32 = (N_CLUSTERS + 3u) / 4u;

// Rows of h, the first of which is the token's; for bounds, as what follows.
@group(0) @binding(0) var<storage, read> logit_rows: array<u32>;
// [tokens, COLS].
@group(0) @binding(1) var<storage, read> h: array<vec4<f32>>;
// [COLS].
@group(0) @binding(2) var<storage, read> norm: array<vec4<f32>>;
// [N_CLUSTERS], filled up to fours.
@group(0) @binding(3) var<storage, read> scores: array<vec4<f32>>;
// [N_CLUSTERS]: (high, low), (radius, norm), (centroid_magnitude, row_magnitude).
@group(0) @binding(4) var<storage, read> bounds: array<vec2<f32>>;
// order_key of the bounds, [N_CLUSTERS], filled up to fours.
@group(0) @binding(5) var<storage, read_write> bound_keys: array<vec4<u32>>;
// [N_CLUSTERS]: 1 where a cluster is read, else 0. Then 1, the pass that reads them.
@group(0) @binding(6) var<storage, read_write> flags: array<u32>;
// Tokens so far, and others' counts.
@group(0) @binding(7) var<storage, read_write> counts: array<u32>;

// Above what f32 arithmetic of a few steps, a root and a division lose, relative to the largest terms; and below.
const UP: f32 = 1.000003814697265625;
const DOWN: f32 = 0.999996185302734375;
// 2^-100, above what is lost to underflow. Numbers below may be taken for 0.
const TINY: f32 = 7.888609052210118e-31;

var<private> row_first: u32;

// Keys that agree with `found` so far, by their next byte.
var<workgroup> bins: array<atomic<u32>, 256>;
// Sums of 16 bins.
var<workgroup> sixteens: array<u32, 16>;
// The bytes found of the N_PROBES-th largest key.
var<workgroup> found: u32;
// How many of the keys that agree with them are to be taken; whether that is all of them.
var<workgroup> n_left: u32;
var<workgroup> all_left: bool;

fn row_at(i: u32) -> vec4<f32> {
    return h[row_first + i];
}

fn norm_at(i: u32) -> vec4<f32> {
    return norm[i];
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

fn put_bounds(local: u32) {
    row_first = logit_rows[0] * (COLS / 4u);
    norm_quantize(norm_load(local), norm_weights(local), local);
    let square = square_length(local);
    for (var four = local; four < FOURS; four += 256u) {
        let score = scores[four];
        var keys = vec4(0u);
        keys.x = order_key(bound_of(4u * four, score.x, square));
        if 4u * four + 1u < N_CLUSTERS {
            keys.y = order_key(bound_of(4u * four + 1u, score.y, square));
        }
        if 4u * four + 2u < N_CLUSTERS {
            keys.z = order_key(bound_of(4u * four + 2u, score.z, square));
        }
        if 4u * four + 3u < N_CLUSTERS {
            keys.w = order_key(bound_of(4u * four + 3u, score.w, square));
        }
        bound_keys[four] = keys;
    }
    storageBarrier();
}

fn keys_at(four: u32) -> vec4<u32> {
    if CERTIFIED {
        return bound_keys[four];
    }
    let x = scores[four];
    return vec4(order_key(x.x), order_key(x.y), order_key(x.z), order_key(x.w));
}

fn count(i: u32, key: u32, known: u32, shift: u32) {
    if i < N_CLUSTERS && ((key ^ found) & known) == 0u {
        atomicAdd(&bins[(key >> shift) & 255u], 1u);
    }
}

// Finds the byte of `found` at `shift`, the higher ones being known.
fn find_byte(shift: u32, local: u32) {
    atomicStore(&bins[local], 0u);
    workgroupBarrier();
    let known = 0xffffff00u << shift;
    for (var four = local; four < FOURS; four += 256u) {
        let keys = keys_at(four);
        count(4u * four, keys.x, known, shift);
        count(4u * four + 1u, keys.y, known, shift);
        count(4u * four + 2u, keys.z, known, shift);
        count(4u * four + 3u, keys.w, known, shift);
    }
    workgroupBarrier();
    if local < 16u {
        var sum = 0u;
        for (var i = 0u; i < 16u; i++) {
            sum += atomicLoad(&bins[16u * local + i]);
        }
        sixteens[local] = sum;
    }
    workgroupBarrier();
    // Keys in the bins above the invocation's own.
    var above = 0u;
    for (var i = 0u; i < 16u; i++) {
        above += select(0u, sixteens[i], i > local / 16u);
        above += select(0u, atomicLoad(&bins[local / 16u * 16u + i]), i > local % 16u);
    }
    let own = atomicLoad(&bins[local]);
    let wanted = n_left;
    workgroupBarrier();
    if above < wanted && wanted <= above + own {
        found |= local << shift;
        n_left = wanted - above;
        all_left = wanted == above + own;
    }
    workgroupBarrier();
}

// Whether cluster `i` is read.
fn is_probed(i: u32, key: u32) -> bool {
    if key != found || all_left {
        return key >= found;
    }
    // Of equal keys as many as are left, the lower indices.
    var before = 0u;
    for (var four = 0u; four <= i / 4u; four++) {
        let lower = vec4(4u * four, 4u * four + 1u, 4u * four + 2u, 4u * four + 3u) < vec4(i);
        let ones = select(vec4(0u), vec4(1u), (keys_at(four) == vec4(key)) & lower);
        before += (ones.x + ones.y) + (ones.z + ones.w);
    }
    return before < n_left;
}

fn put_flag(i: u32, key: u32) {
    if i < N_CLUSTERS {
        flags[i] = u32(is_probed(i, key));
    }
}

// The dispatch is (1, 1, 1).
@compute @workgroup_size(256)
fn probe(@builtin(local_invocation_index) local: u32) {
    if CERTIFIED {
        put_bounds(local);
    }
    if local == 0u {
        found = 0u;
        n_left = N_PROBES;
    }
    for (var byte = 4u; byte > 0u; byte--) {
        find_byte(8u * (byte - 1u), local);
    }
    for (var four = local; four < FOURS; four += 256u) {
        let keys = keys_at(four);
        put_flag(4u * four, keys.x);
        put_flag(4u * four + 1u, keys.y);
        put_flag(4u * four + 2u, keys.z);
        put_flag(4u * four + 3u, keys.w);
    }
    if local == 0u {
        flags[N_CLUSTERS] = 1u;
        counts[0] += 1u;
    }
}
