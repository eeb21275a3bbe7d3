// One tile of a ternary gemm: 4 * PANELS rows times TOKENS tokens, by 256 invocations.
//
// The kernel says where codes and activations are:
//
//     fn tile_codes(panel: u32, block: u32, word: u32) -> vec4<u32>  // a code word of each of the 4 rows of the tile's panel
//     fn tile_token(i: u32) -> u32                                   // the row of xq and xs that is the tile's token i
//
// and where the sums of a panel's 4 rows and the tile's token i go, if there is such a token:
//
//     fn put(i: u32, panel: u32, scales: vec4<f32>, sums: vec4<f32>)
//
// An invocation has the 4 rows of one panel and N = TOKENS * PANELS / 256 tokens, LANES apart. A step of the loop is 4 words of
// the two blocks of a span, 128 columns: 8 dot products share a scale and are added as integers, exactly; then one f32 multiply-add. So the sum of a
// row and a token is over the units of lib/quantize_unit, ascending, in f32, whatever the tile. The next step's words are read from
// memory while this one's are multiplied.
//
// Neighbouring invocations have neighbouring panels (8) and tokens (4), and the strides in workgroup memory are odd, so that 8 of them
// reading or writing 16 bytes each meet different banks.

// use quantize_unit
// use dot

// Panels of a tile: 8, 16 or 32.
override PANELS: u32 = 32u;
// Tokens of a tile; N is 1, 2, 4 or 8.
override TOKENS: u32 = 64u;
// Column blocks of 128 that the matrix has.
override BLOCKS: u32 = (COLS + 127u) / 128u;
// Invocations that share a panel, and tokens of each.
override LANES: u32 = 256u / PANELS;
override N: u32 = TOKENS / LANES;

@group(0) @binding(0) var<storage, read> xq: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> xs: array<vec2<u32>>;

const TOKEN_STRIDE: u32 = 65u;
const PANEL_STRIDE: u32 = 33u;

// [word of the step][block of the span][token]: int8, the four planes.
var<workgroup> step_tokens: array<vec4<u32>, 520>;
// [word][block][panel]: code words of 4 rows.
var<workgroup> step_codes: array<vec4<u32>, 264>;
// [word][token]: scale and start.
var<workgroup> step_scales: array<vec2<u32>, 260>;

// f32 sums of 4 rows, for each token of an invocation.
struct Sums {
    t0: vec4<f32>,
    t1: vec4<f32>,
    t2: vec4<f32>,
    t3: vec4<f32>,
    t4: vec4<f32>,
    t5: vec4<f32>,
    t6: vec4<f32>,
    t7: vec4<f32>,
}

// Codes of 4 rows by block and plane, a byte each.
struct Codes {
    a0: vec4<u32>,
    a1: vec4<u32>,
    a2: vec4<u32>,
    a3: vec4<u32>,
    b0: vec4<u32>,
    b1: vec4<u32>,
    b2: vec4<u32>,
    b3: vec4<u32>,
}

// Which panel of the tile an invocation has, and which lane of its tokens.
fn tile_panel_of(local: u32) -> u32 {
    return local % 8u + 8u * (local / 32u % (PANELS / 8u));
}

fn tile_lane_of(local: u32) -> u32 {
    return local / 8u % 4u + 4u * (local / 32u / (PANELS / 8u));
}

fn tile_unpack(a: vec4<u32>, b: vec4<u32>) -> Codes {
    let mask = vec4<u32>(0x03030303u);
    return Codes(
        a & mask,
        (a >> vec4<u32>(2u)) & mask,
        (a >> vec4<u32>(4u)) & mask,
        (a >> vec4<u32>(6u)) & mask,
        b & mask,
        (b >> vec4<u32>(2u)) & mask,
        (b >> vec4<u32>(4u)) & mask,
        (b >> vec4<u32>(6u)) & mask,
    );
}

fn tile_dots(codes: vec4<u32>, q: u32, sum: vec4<i32>) -> vec4<i32> {
    return vec4<i32>(
        sum.x + dot4(codes.x, q),
        sum.y + dot4(codes.y, q),
        sum.z + dot4(codes.z, q),
        sum.w + dot4(codes.w, q),
    );
}

// Adds the unit of word `word` of the step, for the tile's token `token`.
fn tile_add(total: vec4<f32>, codes: Codes, word: u32, token: u32) -> vec4<f32> {
    let a = step_tokens[2u * word * TOKEN_STRIDE + token];
    let b = step_tokens[(2u * word + 1u) * TOKEN_STRIDE + token];
    let scale = step_scales[word * TOKEN_STRIDE + token];
    var sum = vec4<i32>(bitcast<i32>(scale.y));
    sum = tile_dots(codes.a0, a.x, sum);
    sum = tile_dots(codes.a1, a.y, sum);
    sum = tile_dots(codes.a2, a.z, sum);
    sum = tile_dots(codes.a3, a.w, sum);
    sum = tile_dots(codes.b0, b.x, sum);
    sum = tile_dots(codes.b1, b.y, sum);
    sum = tile_dots(codes.b2, b.z, sum);
    sum = tile_dots(codes.b3, b.w, sum);
    let exact = bitcast<vec4<f32>>(sum) - vec4<f32>(12582912.0);
    return fma(exact, vec4<f32>(bitcast<f32>(scale.x)), total);
}

// Adds word `word` of the step.
fn tile_word(before: Sums, word: u32, panel: u32, lane: u32, n_tokens: u32) -> Sums {
    var sums = before;
    let codes = tile_unpack(
        step_codes[2u * word * PANEL_STRIDE + panel],
        step_codes[(2u * word + 1u) * PANEL_STRIDE + panel],
    );
    sums.t0 = tile_add(sums.t0, codes, word, lane);
    if N >= 2u {
        sums.t1 = tile_add(sums.t1, codes, word, lane + LANES);
    }
    if N >= 4u && n_tokens > 2u * LANES {
        sums.t2 = tile_add(sums.t2, codes, word, lane + 2u * LANES);
        sums.t3 = tile_add(sums.t3, codes, word, lane + 3u * LANES);
    }
    if N >= 8u && n_tokens > 4u * LANES {
        sums.t4 = tile_add(sums.t4, codes, word, lane + 4u * LANES);
        sums.t5 = tile_add(sums.t5, codes, word, lane + 5u * LANES);
    }
    if N >= 8u && n_tokens > 6u * LANES {
        sums.t6 = tile_add(sums.t6, codes, word, lane + 6u * LANES);
        sums.t7 = tile_add(sums.t7, codes, word, lane + 7u * LANES);
    }
    return sums;
}

// The sums, without the rows' scales. `n_tokens` of the tile's tokens are there, the same number for all invocations; the others
// are not multiplied where a quarter of the tile has none.
fn tile_sums(local: u32, n_tokens: u32) -> Sums {
    let panel = tile_panel_of(local);
    let lane = tile_lane_of(local);
    // What an invocation moves in each step: code words, two vectors of activations, a scale.
    let code_word = local % 4u;
    let code_block = local / 4u % 2u;
    let code_panel = local / 8u;
    let token_part = local % 8u;
    let token0 = tile_token(local / 8u) * (UNITS * 2u) + token_part;
    let token1 = tile_token(min(local / 8u + 32u, TOKENS - 1u)) * (UNITS * 2u) + token_part;
    let scale0 = tile_token(min(local / 4u, TOKENS - 1u)) * UNITS + local % 4u;

    var sums = Sums();
    var next_codes = vec4<u32>();
    if code_panel < PANELS {
        next_codes = tile_codes(code_panel, code_block, code_word);
    }
    var next0 = xq[token0];
    var next1 = xq[token1];
    var next_scale = xs[scale0];
    for (var step = 0u; step < 2u * SPANS; step++) {
        workgroupBarrier();
        if code_panel < PANELS {
            step_codes[(2u * code_word + code_block) * PANEL_STRIDE + code_panel] = next_codes;
        }
        if local / 8u < TOKENS {
            step_tokens[token_part * TOKEN_STRIDE + local / 8u] = next0;
        }
        if TOKENS > 32u {
            step_tokens[token_part * TOKEN_STRIDE + local / 8u + 32u] = next1;
        }
        if local / 4u < TOKENS {
            step_scales[code_word * TOKEN_STRIDE + local / 4u] = next_scale;
        }
        workgroupBarrier();
        if step + 1u < 2u * SPANS {
            if code_panel < PANELS {
                next_codes =
                    tile_codes(code_panel, (step + 1u) / 2u * 2u + code_block, (step + 1u) % 2u * 4u + code_word);
            }
            next0 = xq[token0 + (step + 1u) * 8u];
            if TOKENS > 32u {
                next1 = xq[token1 + (step + 1u) * 8u];
            }
            next_scale = xs[scale0 + (step + 1u) * 4u];
        }
        for (var word = 0u; word < 4u; word++) {
            sums = tile_word(sums, word, panel, lane, n_tokens);
        }
    }
    return sums;
}

// Row scales from two words of two bf16 each.
fn tile_row_scales(pair0: u32, pair1: u32) -> vec4<f32> {
    let bits = vec4<u32>(pair0 << 16u, pair0 & 0xffff0000u, pair1 << 16u, pair1 & 0xffff0000u);
    return bitcast<vec4<f32>>(bits);
}

// Puts away the sums of an invocation's tokens; `panel` is its panel in the matrix.
fn tile_put(local: u32, panel: u32, scales: vec4<f32>, sums: Sums) {
    let lane = tile_lane_of(local);
    put(lane, panel, scales, sums.t0);
    if N >= 2u {
        put(lane + LANES, panel, scales, sums.t1);
    }
    if N >= 4u {
        put(lane + 2u * LANES, panel, scales, sums.t2);
        put(lane + 3u * LANES, panel, scales, sums.t3);
    }
    if N >= 8u {
        put(lane + 4u * LANES, panel, scales, sums.t4);
        put(lane + 5u * LANES, panel, scales, sums.t5);
        put(lane + 6u * LANES, panel, scales, sums.t6);
        put(lane + 7u * LANES, panel, scales, sums.t7);
    }
}
