// h += the sum over the chosen experts of weight * W q(act), one token: the down projections.
//
// A workgroup has PANELS panels of 4 rows of every expert chosen: slice s of 32 invocations has those of rank s, s + 8, ..., and
// quantises their activations.

// use ternary

// Rows of W; COLS is the size of an expert, Q_ROWS the number of experts chosen.
override ROWS: u32 = 2048u;
// Panels of a workgroup, at most 64.
override PANELS: u32 = 1u;
// Words from one expert's block to the next, and of a block before `down`.
override BLOCK_WORDS: u32 = 196608u;
override DOWN_AT: u32 = 131072u;
// Experts in x0; the others are in x1.
override PER_SPLIT: u32 = 0xffffffffu;
override MATRIX_PANELS: u32 = (ROWS + 3u) / 4u;
override PARTIALS: u32 = 32u * PANELS;

// [Q_ROWS, COLS].
@group(0) @binding(0) var<storage, read> act: array<vec4<f32>>;
// (expert, bits of its weight), [Q_ROWS].
@group(0) @binding(1) var<storage, read> chosen: array<vec2<u32>>;
// Experts' blocks.
@group(0) @binding(2) var<storage, read> x0: array<u32>;
@group(0) @binding(3) var<storage, read> x1: array<u32>;
// [ROWS].
@group(0) @binding(4) var<storage, read_write> h: array<f32>;

// [panel][slice][row].
var<workgroup> partials: array<f32, PARTIALS>;

fn word_at(at: u32, second: bool) -> u32 {
    if second {
        return x1[at];
    }
    return x0[at];
}

// Code words of blocks `block` to `block + 3`; `at` is the lane's word of block 0.
fn load(at: u32, block: u32, second: bool) -> vec4<u32> {
    var words = vec4(0x55555555u);
    if block < COL_BLOCKS {
        words.x = word_at(at + block * 32u, second);
    }
    if block + 1u < COL_BLOCKS {
        words.y = word_at(at + block * 32u + 32u, second);
    }
    if block + 2u < COL_BLOCKS {
        words.z = word_at(at + block * 32u + 64u, second);
    }
    if block + 3u < COL_BLOCKS {
        words.w = word_at(at + block * 32u + 96u, second);
    }
    return words;
}

fn step(codes: vec4<u32>, row: u32, block: u32, w: u32) -> f32 {
    var sum = ternary_part(codes.x, row, block, w);
    if block + 1u < COL_BLOCKS {
        sum += ternary_part(codes.y, row, block + 1u, w);
    }
    if block + 2u < COL_BLOCKS {
        sum += ternary_part(codes.z, row, block + 2u, w);
    }
    if block + 3u < COL_BLOCKS {
        sum += ternary_part(codes.w, row, block + 3u, w);
    }
    return sum;
}

// What a lane needs of panel `panel` of rank `rank`: where its words are, the first four of them, the word with the row's scale, and the
// bits of the expert's weight. Nothing is computed with what is still on its way.
struct Share {
    at: u32,
    second: bool,
    codes: vec4<u32>,
    scales: u32,
    weight: u32,
}

fn share(rank: u32, panel: u32, lane: u32) -> Share {
    if rank >= Q_ROWS || panel >= MATRIX_PANELS {
        return Share(0u, false, vec4(0x55555555u), 0u, 0u);
    }
    let choice = chosen[rank];
    let second = choice.x >= PER_SPLIT;
    let matrix = select(choice.x, choice.x - PER_SPLIT, second) * BLOCK_WORDS + DOWN_AT;
    let at = matrix + panel * COL_BLOCKS * 32u + lane;
    let row = panel * 4u + lane / 8u;
    let codes = load(at, 0u, second);
    let scales = word_at(matrix + MATRIX_PANELS * COL_BLOCKS * 32u + row / 2u, second);
    return Share(at, second, codes, scales, choice.y);
}

// Four columns of the activations of `rank`.
fn act_column(rank: u32, column: u32) -> vec4<f32> {
    var x = vec4(0.0);
    if column < COLS && rank < Q_ROWS {
        x = act[(rank * COLS + column) / 4u];
    }
    return x;
}

// The dispatch is (ceil(panels / PANELS), 1, 1).
@compute @workgroup_size(256)
fn experts_out(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let slice = local / 32u;
    let lane = local % 32u;
    let first_panel = group.x * PANELS;
    var next = share(slice, first_panel, lane);
    let out_row = first_panel * 4u + local;
    let mine = local < 4u * PANELS && out_row < ROWS;
    var before = 0.0;
    if mine {
        before = h[out_row];
    }

    for (var base = 0u; base < Q_ROWS; base += 8u) {
        let rank = base + slice;
        for (var first = 0u; first < Q_SPANS * 16u; first += 32u) {
            let place = q_place(first + lane);
            let x = Sixteen(
                act_column(rank, q_column(place, 0u)),
                act_column(rank, q_column(place, 1u)),
                act_column(rank, q_column(place, 2u)),
                act_column(rank, q_column(place, 3u))
            );
            quantize(x, rank, first + lane, local);
        }
    }
    workgroupBarrier();

    for (var p = 0u; p < PANELS; p++) {
        var sum = 0.0; // over the slice's ranks, ascending
        for (var base = 0u; base < Q_ROWS; base += 8u) {
            let rank = base + slice;
            let own = next;
            // The next one's words are read while this one's are multiplied.
            if base + 8u < Q_ROWS {
                next = share(rank + 8u, first_panel + p, lane);
            } else if p + 1u < PANELS {
                next = share(slice, first_panel + p + 1u, lane);
            }
            var dot_part = 0.0; // over blocks, ascending
            if rank < Q_ROWS {
                dot_part = step(own.codes, rank, 0u, lane % 8u);
                for (var block = 4u; block < COL_BLOCKS; block += 4u) {
                    dot_part += step(load(own.at, block, own.second), rank, block, lane % 8u);
                }
            }
            let scale = bf16_half(own.scales, lane / 8u % 2u);
            sum += sum8(dot_part, local) * (scale * bitcast<f32>(own.weight));
        }
        if lane % 8u == 0u {
            partials[p * 32u + slice * 4u + lane / 8u] = sum;
        }
    }
    workgroupBarrier();
    if mine {
        let at = local / 4u * 32u + local % 4u;
        let sum = ((partials[at] + partials[at + 4u]) + (partials[at + 8u] + partials[at + 12u]))
            + ((partials[at + 16u] + partials[at + 20u]) + (partials[at + 24u] + partials[at + 28u]));
        h[out_row] = before + sum;
    }
}
