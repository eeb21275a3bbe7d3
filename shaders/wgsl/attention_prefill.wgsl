// Attention of a step's tokens over the cache, which already holds the step's own keys and values: out = softmax(q k / sqrt(HEAD_DIM)) v.
//
// Grid: (ceil(tokens / QUERIES), N_KV_HEADS). A workgroup of 128 takes QUERIES tokens with the GROUP query heads of one kv head: 32 rows
// at most. It goes through the keys these rows see, 64 at a time, the tiles beginning at multiples of 64 positions, with a running
// softmax. Tiles in which a row sees nothing change nothing of it, so a row's result does not depend on its neighbours nor on how
// a prompt is cut. Tokens of several sequences in a tile are done one sequence after the other.
//
// Scores: an invocation has 4 rows times 4 keys, dimensions ascending, 32 of queries and keys at a time in workgroup memory. Values:
// 4 rows times 4 dimensions of each 64, 16 keys at a time. All in f32. The weights of a tile go from one to the other through workgroup
// memory, [key][4 rows], their places mixed by xor so that neighbours meet different banks.
//
// Bindings: rows; qkv f32 [tokens, (N_HEADS + 2 * N_KV_HEADS) * HEAD_DIM], q normed and rotated; k, v as in lib/cache; out f32 [tokens,
// N_HEADS * HEAD_DIM].
// Constants: GROUP, query heads of a kv head, at most 32; N_KV_HEADS; HEAD_DIM, a multiple of 8, at most 128; KV_F32; CAPACITY; WINDOW,
// keys a query sees, 0 for all. (QUERIES is 32 / GROUP.)

// use bits
// use cache

override GROUP: u32 = 4u;
override WINDOW: u32 = 0u;
override QUERIES: u32 = 32u / GROUP;
override ROW_WORDS: u32 = (GROUP + 2u) * N_KV_HEADS * HEAD_DIM;
// Steps of 32 dimensions.
override DIM_STEPS: u32 = (HEAD_DIM + 31u) / 32u;
// Vectors of four words that a position has in v.
override VALUE_VECTORS: u32 = ELEMENTS / 4u;

// (token, slot, position, tokens of the step).
@group(0) @binding(0) var<storage, read> rows: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> qkv: array<f32>;
@group(0) @binding(2) var<storage, read> k: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> v: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;

// A score that is not looked at. Finite, so that no infinity enters arithmetic.
const HIDDEN: f32 = -3.0e38;
// Where parts of workgroup memory begin, in vectors. While scores are made: 32 dimensions of queries, 8 vectors each; of keys, 16
// vectors each; largest scores, 16 of 8. Then weights, 64 of 8; values, 16 of 32.
const KEYS_AT: u32 = 256u;
const LARGEST_AT: u32 = 768u;
const VALUES_AT: u32 = 512u;

var<workgroup> shared_tile: array<vec4<f32>, 1024>;

// Scores or weights: rows times four keys.
struct Scores {
    r0: vec4<f32>,
    r1: vec4<f32>,
    r2: vec4<f32>,
    r3: vec4<f32>,
}

// Sums of weighted values: rows times dimensions 4x to 4x + 3, and 64 + 4x to 64 + 4x + 3.
struct Mixed {
    a0: vec4<f32>,
    a1: vec4<f32>,
    a2: vec4<f32>,
    a3: vec4<f32>,
    b0: vec4<f32>,
    b1: vec4<f32>,
    b2: vec4<f32>,
    b3: vec4<f32>,
}

// What is the same for the whole workgroup.
struct Tile {
    first: u32,
    end: u32,
    head: u32,
}

fn tile_query(tile: Tile, row: u32, d: u32) -> f32 {
    let token = tile.first + row / GROUP;
    if token >= tile.end || row >= QUERIES * GROUP || d >= HEAD_DIM {
        return 0.0;
    }
    return qkv[token * ROW_WORDS + (tile.head * GROUP + row % GROUP) * HEAD_DIM + d];
}

// 32 dimensions of all rows, scaled.
fn load_queries(tile: Tile, start: u32, local: u32) {
    let scale = 1.0 / sqrt(f32(HEAD_DIM));
    for (var i = 0u; i < 2u; i++) {
        let d = local % 32u;
        let four = local / 32u + 4u * i;
        let x = vec4<f32>(
            tile_query(tile, 4u * four, start + d),
            tile_query(tile, 4u * four + 1u, start + d),
            tile_query(tile, 4u * four + 2u, start + d),
            tile_query(tile, 4u * four + 3u, start + d),
        );
        shared_tile[d * 8u + (four ^ (d % 8u))] = x * scale;
    }
}

// 32 dimensions of 64 keys, whose two blocks begin at these vectors.
fn load_keys(block0: u32, block1: u32, start: u32, local: u32) {
    let four = local % 16u;
    let at = select(block0, block1, four >= 8u) + four % 8u;
    if KV_F32 {
        for (var i = 0u; i < 4u; i++) {
            let d = local / 16u + 8u * i;
            var key = vec4<u32>();
            if start + d < HEAD_DIM {
                key = k[at + (start + d) * 8u];
            }
            shared_tile[KEYS_AT + d * 16u + four] = bitcast<vec4<f32>>(key);
        }
    } else {
        for (var i = 0u; i < 2u; i++) {
            let pair = local / 16u + 8u * i;
            var key = vec4<u32>();
            if start / 2u + pair < ELEMENTS {
                key = k[at + (start / 2u + pair) * 8u];
            }
            shared_tile[KEYS_AT + 2u * pair * 16u + four] = bitcast<vec4<f32>>(key << vec4<u32>(16u));
            shared_tile[KEYS_AT + (2u * pair + 1u) * 16u + four] = bitcast<vec4<f32>>(key & vec4<u32>(0xffff0000u));
        }
    }
}

// Adds dimension `base + i`; `base` is a multiple of 8.
fn score_dim(before: Scores, base: u32, i: u32, y: u32, x: u32) -> Scores {
    let q = shared_tile[(base + i) * 8u + (y ^ i)];
    let key = shared_tile[KEYS_AT + (base + i) * 16u + x];
    return Scores(
        fma(vec4<f32>(q.x), key, before.r0),
        fma(vec4<f32>(q.y), key, before.r1),
        fma(vec4<f32>(q.z), key, before.r2),
        fma(vec4<f32>(q.w), key, before.r3),
    );
}

// Adds the 32 dimensions in workgroup memory.
fn score_dims(before: Scores, y: u32, x: u32) -> Scores {
    var s = before;
    for (var base = 0u; base < 32u; base += 8u) {
        s = score_dim(s, base, 0u, y, x);
        s = score_dim(s, base, 1u, y, x);
        s = score_dim(s, base, 2u, y, x);
        s = score_dim(s, base, 3u, y, x);
        s = score_dim(s, base, 4u, y, x);
        s = score_dim(s, base, 5u, y, x);
        s = score_dim(s, base, 6u, y, x);
        s = score_dim(s, base, 7u, y, x);
    }
    return s;
}

// Hides the scores of keys that a query at `position` does not see; -1 sees none.
fn hide(s: vec4<f32>, keys: vec4<i32>, position: i32) -> vec4<f32> {
    var seen = keys <= vec4<i32>(position);
    if WINDOW > 0u {
        seen = seen & (keys > vec4<i32>(position - i32(WINDOW)));
    }
    return select(vec4<f32>(HIDDEN), s, seen);
}

fn largest_of(x: vec4<f32>) -> f32 {
    return max(max(x.x, x.y), max(x.z, x.w));
}

fn sum_of(x: vec4<f32>) -> f32 {
    return (x.x + x.y) + (x.z + x.w);
}

// A score that is NaN is not hidden, and its weight is NaN.
fn weigh(s: vec4<f32>, largest: f32) -> vec4<f32> {
    return select(exp(s - vec4<f32>(largest)), vec4<f32>(0.0), s == vec4<f32>(HIDDEN));
}

// Values of the keys 4n + step, n in 0..16, of the 64 from `first` on; zero after `last`, where nothing may be stored yet.
fn load_values(slot: u32, head: u32, first: u32, last: u32, step: u32, local: u32) {
    if KV_F32 {
        for (var i = 0u; i < 4u; i++) {
            let n = local / 32u + 4u * i;
            let key = first + 4u * n + step;
            var value = vec4<u32>();
            if key <= last && local % 32u < VALUE_VECTORS {
                value = v[cache_value(slot, head, key) / 4u + local % 32u];
            }
            shared_tile[VALUES_AT + n * 32u + local % 32u] = bitcast<vec4<f32>>(value);
        }
    } else {
        for (var i = 0u; i < 2u; i++) {
            let n = local / 16u + 8u * i;
            let key = first + 4u * n + step;
            var value = vec4<u32>();
            if key <= last && local % 16u < VALUE_VECTORS {
                value = v[cache_value(slot, head, key) / 4u + local % 16u];
            }
            let low = bitcast<vec4<f32>>(value << vec4<u32>(16u));
            let high = bitcast<vec4<f32>>(value & vec4<u32>(0xffff0000u));
            let at = VALUES_AT + n * 32u + 2u * (local % 16u);
            shared_tile[at] = vec4<f32>(low.x, high.x, low.y, high.y);
            shared_tile[at + 1u] = vec4<f32>(low.z, high.z, low.w, high.w);
        }
    }
}

// Adds key `base + i` of the 16 in workgroup memory, whose weights begin at `weights`; `base` is a multiple of 8.
fn mix_key(before: Mixed, weights: u32, base: u32, i: u32, y: u32, x: u32) -> Mixed {
    var mixed = before;
    let w = shared_tile[weights + (base + i) * 8u + (y ^ i)];
    let a = shared_tile[VALUES_AT + (base + i) * 32u + x];
    mixed.a0 = fma(vec4<f32>(w.x), a, mixed.a0);
    mixed.a1 = fma(vec4<f32>(w.y), a, mixed.a1);
    mixed.a2 = fma(vec4<f32>(w.z), a, mixed.a2);
    mixed.a3 = fma(vec4<f32>(w.w), a, mixed.a3);
    if HEAD_DIM > 64u {
        let b = shared_tile[VALUES_AT + (base + i) * 32u + 16u + x];
        mixed.b0 = fma(vec4<f32>(w.x), b, mixed.b0);
        mixed.b1 = fma(vec4<f32>(w.y), b, mixed.b1);
        mixed.b2 = fma(vec4<f32>(w.z), b, mixed.b2);
        mixed.b3 = fma(vec4<f32>(w.w), b, mixed.b3);
    }
    return mixed;
}

fn mix_keys(before: Mixed, weights: u32, y: u32, x: u32) -> Mixed {
    var mixed = before;
    for (var base = 0u; base < 16u; base += 8u) {
        mixed = mix_key(mixed, weights, base, 0u, y, x);
        mixed = mix_key(mixed, weights, base, 1u, y, x);
        mixed = mix_key(mixed, weights, base, 2u, y, x);
        mixed = mix_key(mixed, weights, base, 3u, y, x);
        mixed = mix_key(mixed, weights, base, 4u, y, x);
        mixed = mix_key(mixed, weights, base, 5u, y, x);
        mixed = mix_key(mixed, weights, base, 6u, y, x);
        mixed = mix_key(mixed, weights, base, 7u, y, x);
    }
    return mixed;
}

fn put(tile: Tile, row: u32, x: u32, total: f32, a: vec4<f32>, b: vec4<f32>) {
    let token = tile.first + row / GROUP;
    if token >= tile.end || row >= QUERIES * GROUP {
        return;
    }
    let at = ((token * N_KV_HEADS + tile.head) * GROUP + row % GROUP) * (HEAD_DIM / 4u) + x;
    if 4u * x < HEAD_DIM {
        out[at] = a / total;
    }
    if 64u + 4u * x < HEAD_DIM {
        out[at + 16u] = b / total;
    }
}

// The position of a row's token if that is among the tokens `start` to `to`, else -1.
fn position_of(tile: Tile, row: u32, start: u32, to: u32) -> i32 {
    let token = tile.first + row / GROUP;
    if row >= QUERIES * GROUP || token < start || token >= to {
        return -1;
    }
    return i32(rows[token].z);
}

@compute @workgroup_size(128)
fn attention_prefill(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let x = local % 16u;
    let y = local / 16u;
    // The last tokens have most keys: first of all.
    let first = (grid.x - 1u - group.x) * QUERIES;
    let tile = Tile(first, min(rows[0].w, first + QUERIES), group.y);
    var mixed = Mixed();
    // Of four rows: the largest score so far, and the sum of the weights of this invocation's keys.
    var largest = vec4<f32>(HIDDEN);
    var total = vec4<f32>();

    var start = tile.first;
    while start < tile.end {
        let slot = rows[start].y;
        var to = start + 1u;
        while to < tile.end && rows[to].y == slot {
            to++;
        }
        let p0 = position_of(tile, 4u * y, start, to);
        let p1 = position_of(tile, 4u * y + 1u, start, to);
        let p2 = position_of(tile, 4u * y + 2u, start, to);
        let p3 = position_of(tile, 4u * y + 3u, start, to);
        let oldest = rows[start].z;
        let last = rows[to - 1u].z;
        var key = 0u;
        if WINDOW > 0u && oldest >= WINDOW {
            key = (oldest + 1u - WINDOW) / 64u * 64u;
        }
        for (; key <= last; key += 64u) {
            let block0 = cache_block(slot, tile.head, key / 32u) / 4u;
            let block1 = cache_block(slot, tile.head, key / 32u + 1u) / 4u;
            var s = Scores();
            for (var step = 0u; step < DIM_STEPS; step++) {
                workgroupBarrier();
                load_queries(tile, 32u * step, local);
                load_keys(block0, block1, 32u * step, local);
                workgroupBarrier();
                s = score_dims(s, y, x);
            }
            let keys = vec4<i32>(i32(key + 4u * x)) + vec4<i32>(0, 1, 2, 3);
            s.r0 = hide(s.r0, keys, p0);
            s.r1 = hide(s.r1, keys, p1);
            s.r2 = hide(s.r2, keys, p2);
            s.r3 = hide(s.r3, keys, p3);

            // Nothing of what is read above lies here.
            shared_tile[LARGEST_AT + x * 8u + y] =
                vec4<f32>(largest_of(s.r0), largest_of(s.r1), largest_of(s.r2), largest_of(s.r3));
            workgroupBarrier();
            var now = largest;
            for (var i = 0u; i < 16u; i++) {
                now = max(now, shared_tile[LARGEST_AT + i * 8u + y]);
            }
            // Where nothing is larger, exactly 1.
            let keep = select(exp(largest - now), vec4<f32>(1.0), largest == now);
            largest = now;
            s.r0 = weigh(s.r0, now.x);
            s.r1 = weigh(s.r1, now.y);
            s.r2 = weigh(s.r2, now.z);
            s.r3 = weigh(s.r3, now.w);
            total = total * keep + vec4<f32>(sum_of(s.r0), sum_of(s.r1), sum_of(s.r2), sum_of(s.r3));
            mixed.a0 *= keep.x;
            mixed.a1 *= keep.y;
            mixed.a2 *= keep.z;
            mixed.a3 *= keep.w;
            mixed.b0 *= keep.x;
            mixed.b1 *= keep.y;
            mixed.b2 *= keep.z;
            mixed.b3 *= keep.w;
            let place = x * 8u + (y ^ (x % 8u));
            shared_tile[place] = vec4<f32>(s.r0.x, s.r1.x, s.r2.x, s.r3.x);
            shared_tile[128u + place] = vec4<f32>(s.r0.y, s.r1.y, s.r2.y, s.r3.y);
            shared_tile[256u + place] = vec4<f32>(s.r0.z, s.r1.z, s.r2.z, s.r3.z);
            shared_tile[384u + place] = vec4<f32>(s.r0.w, s.r1.w, s.r2.w, s.r3.w);
            for (var step = 0u; step < 4u; step++) {
                workgroupBarrier();
                load_values(slot, tile.head, key, last, step, local);
                workgroupBarrier();
                mixed = mix_keys(mixed, 128u * step, y, x);
            }
        }
        start = to;
    }

    workgroupBarrier();
    shared_tile[x * 8u + y] = total;
    workgroupBarrier();
    total = vec4<f32>();
    for (var i = 0u; i < 16u; i++) {
        total += shared_tile[i * 8u + y];
    }
    put(tile, 4u * y, x, total.x, mixed.a0, mixed.b0);
    put(tile, 4u * y + 1u, x, total.y, mixed.a1, mixed.b1);
    put(tile, 4u * y + 2u, x, total.z, mixed.a2, mixed.b2);
    put(tile, 4u * y + 3u, x, total.w, mixed.a3, mixed.b3);
}
