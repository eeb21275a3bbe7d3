// logits = R norm(h) for one token, bf16 rows (format/SPEC.md R24), all in f32: int8 would change which experts run.
//
// A workgroup has a panel of 4 rows and norms the row itself. A chunk is 8 times 16 bytes, lane = 2 * row + half: 8 columns of a row.
// Between them the workgroups also quantise what they have normed, for the experts.

// use int8
// use reduce

override ROWS: u32 = 256u;
// A multiple of 4.
override COLS: u32 = 2048u;
override EPS: f32 = 0.000001;
// Chunks of 16 columns.
override CHUNKS: u32 = (COLS + 15u) / 16u;
override X_FOURS: u32 = CHUNKS * 4u;

// [COLS].
@group(0) @binding(0) var<storage, read> h: array<vec4<f32>>;
// [COLS].
@group(0) @binding(1) var<storage, read> norm: array<vec4<f32>>;
// Panels.
@group(0) @binding(2) var<storage, read> w: array<vec4<u32>>;
// [ROWS].
@group(0) @binding(3) var<storage, read_write> logits: array<f32>;
// The normed row quantised, as lib/fetch reads it.
@group(0) @binding(4) var<storage, read_write> q: array<u32>;

override COL_BLOCKS: u32 = (COLS + 127u) / 128u;
// Units of 32 columns that share a scale.
override UNITS: u32 = (COL_BLOCKS + 1u) / 2u * 8u;
override PANELS: u32 = (ROWS + 3u) / 4u;

// The normed row, zeros past its end.
var<workgroup> x: array<vec4<f32>, X_FOURS>;
var<workgroup> sums: array<f32, 256>;

fn load(panel: u32, task: u32) -> vec4<u32> {
    var words = vec4(0u);
    if task < CHUNKS * 8u {
        words = w[panel * CHUNKS * 8u + task];
    }
    return words;
}

// Eight products.
fn part(words: vec4<u32>, task: u32) -> f32 {
    if task >= CHUNKS * 8u {
        return 0.0;
    }
    let at = task / 8u * 4u + task % 2u * 2u;
    let a = vec4(bf16_low(words.x), bf16_high(words.x), bf16_low(words.y), bf16_high(words.y));
    let b = vec4(bf16_low(words.z), bf16_high(words.z), bf16_low(words.w), bf16_high(words.w));
    return dot(a, x[at]) + dot(b, x[at + 1u]);
}

// Quantises unit (span, w): invocation i, below 8, has plane i % 4 of block i / 4.
fn put_unit(unit: u32, local: u32) {
    let span = unit / 8u;
    let w = unit % 8u;
    let four = span * 64u + local % 8u * 8u + w;
    var value = vec4(0.0);
    if four < X_FOURS {
        value = x[four];
    }
    let largest = max8(int8_largest(value), local);
    if local == 0u {
        q[COL_BLOCKS * 32u + unit] = int8_scale(largest);
    }
    let block = 2u * span + local / 4u;
    if local < 8u && block < COL_BLOCKS {
        q[(block * 8u + w) * 4u + local % 4u] = int8_word(value, largest);
    }
}

// The dispatch is (panels, 1, 1).
@compute @workgroup_size(256)
fn norm_router(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let panel = group.x;
    let a = load(panel, local);
    let b = load(panel, local + 256u);
    let c = load(panel, local + 512u);
    let d = load(panel, local + 768u);
    var norm_a = vec4(0.0);
    if local < COLS / 4u {
        norm_a = norm[local];
    }
    var norm_b = vec4(0.0);
    if local + 256u < COLS / 4u {
        norm_b = norm[local + 256u];
    }
    var square = 0.0;
    for (var i = local; i < X_FOURS; i += 256u) {
        var four = vec4(0.0);
        if i < COLS / 4u {
            four = h[i];
        }
        x[i] = four;
        square += dot(four, four);
    }
    let mean = number_or_nan(sum256(square, local) / f32(COLS));
    let inverse = 1.0 / sqrt(mean + EPS);
    if local < COLS / 4u {
        x[local] = norm_a * (x[local] * inverse);
    }
    if local + 256u < COLS / 4u {
        x[local + 256u] = norm_b * (x[local + 256u] * inverse);
    }
    for (var i = local + 512u; i < COLS / 4u; i += 256u) {
        x[i] = norm[i] * (x[i] * inverse);
    }
    workgroupBarrier();

    var sum = (part(a, local) + part(b, local + 256u)) + (part(c, local + 512u) + part(d, local + 768u));
    for (var task = local + 1024u; task < CHUNKS * 8u; task += 256u) {
        sum += part(load(panel, task), task);
    }
    // So that those of a row are neighbours.
    sums[local % 8u / 2u * 64u + local / 8u * 2u + local % 2u] = sum;
    workgroupBarrier();
    let half_row = sum32(sums[local], local);
    if local % 32u == 0u {
        sums[local] = half_row;
    }
    workgroupBarrier();
    let row = panel * 4u + local;
    if local < 4u && row < ROWS {
        logits[row] = sums[local * 64u] + sums[local * 64u + 32u];
    }
    for (var unit = panel; unit < UNITS; unit += PANELS) {
        put_unit(unit, local);
    }
}
