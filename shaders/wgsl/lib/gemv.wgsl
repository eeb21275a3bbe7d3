// Panels of ternary matrices times the one quantised row in workgroup memory. Slice s of 32 invocations takes column blocks s, s + 8,
// ...; its lanes read a chunk as one line: lane = 8 * row + w.
//
// The kernel says how many panels of 4 rows a workgroup has, GEMV_PANELS, and where their codes are: `fn panel_at(v: u32) -> u32` returns
// the first word of the workgroup's panel v, or NO_PANEL, and `fn codes_at(at: u32) -> u32` a word.

// use ternary

// Column blocks of a slice.
override SLICE_BLOCKS: u32 = (COL_BLOCKS + 7u) / 8u;
// Words an invocation reads: those of its slice, panel after panel.
override GEMV_WORDS: u32 = GEMV_PANELS * SLICE_BLOCKS;
override PARTIALS: u32 = 32u * GEMV_PANELS;

const NO_PANEL: u32 = 0xffffffffu;

// Words on their way at a time.
struct Words {
    a: vec4<u32>,
    b: vec4<u32>,
    c: vec4<u32>,
    d: vec4<u32>,
}

// [panel][slice][row].
var<workgroup> partials: array<f32, PARTIALS>;

// Words `unit` to `unit + 15` of an invocation; codes of zeros where there is none.
fn gemv_load(unit: u32, local: u32) -> Words {
    var words = Words();
    words.a = gemv_four(unit, local);
    if GEMV_WORDS > 4u {
        words.b = gemv_four(unit + 4u, local);
    }
    if GEMV_WORDS > 8u {
        words.c = gemv_four(unit + 8u, local);
        words.d = gemv_four(unit + 12u, local);
    }
    return words;
}

fn gemv_four(unit: u32, local: u32) -> vec4<u32> {
    return vec4(
        gemv_word(unit, local),
        gemv_word(unit + 1u, local),
        gemv_word(unit + 2u, local),
        gemv_word(unit + 3u, local)
    );
}

fn gemv_word(unit: u32, local: u32) -> u32 {
    let block = local / 32u + 8u * (unit % SLICE_BLOCKS);
    var word = 0x55555555u;
    if unit < GEMV_WORDS && block < COL_BLOCKS {
        let panel = panel_at(unit / SLICE_BLOCKS);
        if panel != NO_PANEL {
            word = codes_at(panel + block * 32u + local % 32u);
        }
    }
    return word;
}

// Adds word `unit`; with the last one of a panel, the sum over the lanes of a row goes to `partials`.
fn gemv_step(codes: u32, unit: u32, sum: f32, local: u32) -> f32 {
    if unit >= GEMV_WORDS {
        return sum;
    }
    let block = local / 32u + 8u * (unit % SLICE_BLOCKS);
    var next = sum;
    if block < COL_BLOCKS {
        next += ternary_part(codes, 0u, block, local % 8u);
    }
    if (unit + 1u) % SLICE_BLOCKS != 0u {
        return next;
    }
    let whole = sum8(next, local);
    if local % 8u == 0u {
        partials[unit / SLICE_BLOCKS * 32u + local / 8u] = whole;
    }
    return 0.0;
}

fn gemv_steps(codes: vec4<u32>, unit: u32, before: f32, local: u32) -> f32 {
    var sum = gemv_step(codes.x, unit, before, local);
    sum = gemv_step(codes.y, unit + 1u, sum, local);
    sum = gemv_step(codes.z, unit + 2u, sum, local);
    return gemv_step(codes.w, unit + 3u, sum, local);
}

// Fills `partials`, and waits for all of it. `early` is gemv_load(0, local), made as early as can be.
fn gemv(early: Words, local: u32) {
    var words = early;
    var sum = 0.0; // blocks ascending
    for (var unit = 0u; unit < GEMV_WORDS; unit += 16u) {
        var next = Words();
        if unit + 16u < GEMV_WORDS {
            next = gemv_load(unit + 16u, local);
        }
        sum = gemv_steps(words.a, unit, sum, local);
        if GEMV_WORDS > 4u {
            sum = gemv_steps(words.b, unit + 4u, sum, local);
        }
        if GEMV_WORDS > 8u {
            sum = gemv_steps(words.c, unit + 8u, sum, local);
            sum = gemv_steps(words.d, unit + 12u, sum, local);
        }
        words = next;
    }
    workgroupBarrier();
}

// The sum of row `i`, below 4 * GEMV_PANELS, without its scale: slices as a tree.
fn gemv_sum(i: u32) -> f32 {
    let at = i / 4u * 32u + i % 4u;
    return ((partials[at] + partials[at + 4u]) + (partials[at + 8u] + partials[at + 12u]))
        + ((partials[at + 16u] + partials[at + 20u]) + (partials[at + 24u] + partials[at + 28u]));
}
