// The head's arithmetic: rows of a matrix W in 4 bits (format/SPEC.md R23) times q(norm(h)).
//
// A workgroup has PANELS panels, slice s of 32 invocations the panels s, s + 8, ... A lane has a row of a panel, half of the words of its
// chunks, and both chunks of every fourth block of 128 columns: lane = 8 * (block % 4) + 2 * row + half.
//
// The kernel has `h: array<vec4<f32>>`, [tokens, COLS]; `norm: array<vec4<f32>>`, [COLS]; and
// `w: array<vec4<u32>>`, panels FIRST_PANEL to END_PANEL. `fn panel_wanted(i: u32) -> bool` says whether panel i of the workgroup is read.

// use norm

override ROWS: u32 = 151936u;
// COLS is a multiple of 64.
override GROUPS: u32 = COLS / 64u;
// Panel that `w` begins with, a multiple of 8.
override FIRST_PANEL: u32 = 0u;
// One past the last panel in `w`.
override END_PANEL: u32 = 37984u;
// Panels of a workgroup: 8, 16, 24, ... 64.
override PANELS: u32 = 32u;
// 16 bytes each: a panel's header, 1 for each group, filled up to 8, and 8 for each group.
override HEADER: u32 = (GROUPS + 7u) / 8u * 8u;
override PANEL: u32 = HEADER + GROUPS * 8u;
// Steps of a panel: 4 blocks each; and of a slice.
override STEPS: u32 = (COL_BLOCKS + 3u) / 4u;
override SLICE_STEPS: u32 = STEPS * (PANELS / 8u);
override N_OFFSETS: u32 = COL_BLOCKS * 4u;
override PARTIALS: u32 = 32u * PANELS;

// Σ scale * q of the words of a half of a group, [group][half].
var<workgroup> offsets: array<f32, N_OFFSETS>;
// [panel][lane].
var<workgroup> partials: array<f32, PARTIALS>;

var<private> row_first: u32;

fn row_at(i: u32) -> vec4<f32> {
    return h[row_first + i];
}

fn norm_at(i: u32) -> vec4<f32> {
    return norm[i];
}

// (group 2b, group 2b + 1): the sums over a word of each chunk, without the groups' scales.
fn word_part(a: u32, b: u32, block: u32, w: u32) -> vec2<f32> {
    let q = xq[block * 8u + w];
    let low = dot4(a & 0x0f0f0f0fu, q.x) + dot4((a >> 4u) & 0x0f0f0f0fu, q.y);
    let high = dot4(b & 0x0f0f0f0fu, q.z) + dot4((b >> 4u) & 0x0f0f0f0fu, q.w);
    return xs[block / 2u * 8u + w] * vec2(f32(low), f32(high));
}

// What a lane reads at a time: both chunks of a block, and the scales and biases of their groups.
struct Chunks {
    a: vec4<u32>,
    b: vec4<u32>,
    header_a: vec4<u32>,
    header_b: vec4<u32>,
}

// Step `step` of a slice: STEPS for each of its panels.
fn chunks_at(first: u32, step: u32, local: u32) -> Chunks {
    let panel = first + local / 32u + step / STEPS * 8u;
    let block = step % STEPS * 4u + local % 32u / 8u;
    var x = Chunks();
    if step >= SLICE_STEPS || FIRST_PANEL + panel >= END_PANEL || block >= COL_BLOCKS || !panel_wanted(panel - first) {
        return x;
    }
    let at = panel * PANEL;
    let g = 2u * block;
    x.header_a = w[at + g];
    x.a = w[at + HEADER + g * 8u + local % 8u];
    if g + 1u < GROUPS {
        x.header_b = w[at + g + 1u];
        x.b = w[at + HEADER + g * 8u + 8u + local % 8u];
    }
    return x;
}

// A lane's share of its row in one step.
fn chunks_part(x: Chunks, step: u32, lane: u32) -> f32 {
    let block = step % STEPS * 4u + lane / 8u;
    if block >= COL_BLOCKS {
        return 0.0;
    }
    let r = lane % 8u / 2u;
    let word = lane % 2u * 4u;
    let products = (word_part(x.a.x, x.b.x, block, word) + word_part(x.a.y, x.b.y, block, word + 1u))
        + (word_part(x.a.z, x.b.z, block, word + 2u) + word_part(x.a.w, x.b.w, block, word + 3u));
    let scales = vec2(
        bf16_half(select(x.header_a.x, x.header_a.y, r > 1u), r % 2u),
        bf16_half(select(x.header_b.x, x.header_b.y, r > 1u), r % 2u)
    );
    let biases = vec2(
        bf16_half(select(x.header_a.z, x.header_a.w, r > 1u), r % 2u),
        bf16_half(select(x.header_b.z, x.header_b.w, r > 1u), r % 2u)
    );
    let at = 4u * block + lane % 2u;
    return dot(scales, products) + dot(biases, vec2(offsets[at], offsets[at + 2u]));
}

// Fills `partials` for the workgroup's panels, the first of which is number `first` of `w`, and row `h_row` of h, and waits for it.
fn head_partials(first: u32, h_row: u32, local: u32) {
    var next = chunks_at(first, 0u, local);
    row_first = h_row * (COLS / 4u);
    norm_quantize(norm_load(local), norm_weights(local), local);
    for (var i = local; i < N_OFFSETS; i += 256u) {
        let block = i / 4u;
        let second = i % 4u >= 2u;
        var sum = 0.0;
        for (var word = i % 2u * 4u; word < i % 2u * 4u + 4u; word++) {
            let q = xq[block * 8u + word];
            let two = select(q.xy, q.zw, second);
            sum += xs[block / 2u * 8u + word] * f32(sum4(two.x) + sum4(two.y));
        }
        offsets[i] = sum;
    }
    workgroupBarrier();

    var sum = 0.0; // blocks ascending
    for (var step = 0u; step < SLICE_STEPS; step++) {
        let own = next;
        // The next step's words are read while this one's are multiplied.
        next = chunks_at(first, step + 1u, local);
        sum += chunks_part(own, step, local % 32u);
        if step % STEPS + 1u == STEPS {
            partials[(step / STEPS * 8u + local / 32u) * 32u + local % 32u] = sum;
            sum = 0.0;
        }
    }
    workgroupBarrier();
}

// The logit of the workgroup's row `i`.
fn head_logit(i: u32) -> f32 {
    let at = i / 4u * 32u + i % 4u * 2u;
    return ((partials[at] + partials[at + 1u]) + (partials[at + 8u] + partials[at + 9u]))
        + ((partials[at + 16u] + partials[at + 17u]) + (partials[at + 24u] + partials[at + 25u]));
}
