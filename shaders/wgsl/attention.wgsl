// One token's attention over a part of the keys, for the query heads of one kv head; appends the token's own key and value.
//
// Workgroup (kv head, part). All norm and rotate their query heads; the last part has the new position: it norms and rotates k, rounds
// k and v as the cache holds them and stores them, and reads them from workgroup memory, since what it has just stored may not have
// arrived. Keys are looked at 64 at a time, four query heads at a time:
//
//  1. scores: lanes are keys (neighbours in the cache), the 8 slices share the dimensions;
//  2. a running softmax, slice q for query head q;
//  3. values: lanes are words of a value, groups of lanes share the keys.
//
// What a part leaves is unnormalised, with its largest score and its sum of weights.

// use bits
// use reduce
// use parts

override N_HEADS: u32 = 16u;
override N_KV_HEADS: u32 = 4u;
// Even, at most 512.
override HEAD_DIM: u32 = 128u;
// Whether q and k are normed.
override QK_NORM: bool = true;
override Q_EPS: f32 = 0.000001;
override K_EPS: f32 = 0.000001;
// Dimensions that turn; 0 is none.
override ROPE_DIM: u32 = 64u;
// Positions the cache holds, a multiple of 32.
override CAPACITY: u32 = 512u;
// Whether the cache is f32; else bf16, two to a word.
override KV_F32: bool = false;

// (token, slot, position, 0).
@group(0) @binding(0) var<storage, read> rows: array<vec4<u32>>;
// q [N_HEADS, HEAD_DIM], then k and v [N_KV_HEADS, HEAD_DIM] each.
@group(0) @binding(1) var<storage, read> qkv: array<f32>;
// Norms of q and k, [2, HEAD_DIM].
@group(0) @binding(2) var<storage, read> qk_norm: array<f32>;
// (cos, sin), [context, ROPE_DIM / 2].
@group(0) @binding(3) var<storage, read> rope: array<vec2<f32>>;
// [slot][kv head][block of 32 positions][HEAD_WORDS][32]; a position is at position % CAPACITY.
@group(0) @binding(4) var<storage, read_write> k: array<u32>;
// [slot][kv head][position][HEAD_WORDS].
@group(0) @binding(5) var<storage, read_write> v: array<u32>;
// Sums [MAX_PARTS][N_HEADS][HEAD_DIM]; then (largest, total) [MAX_PARTS][N_HEADS].
@group(0) @binding(6) var<storage, read_write> states: array<f32>;

override GROUP: u32 = N_HEADS / N_KV_HEADS;
override HEADS_LEN: u32 = (GROUP + 2u) * HEAD_DIM;
override HEAD_WORDS: u32 = select(HEAD_DIM / 2u, HEAD_DIM, KV_F32);
// Words of a key for a slice.
override SLICE_WORDS: u32 = (HEAD_WORDS + 7u) / 8u;
// Groups of lanes that share the values' keys.
override V_GROUPS: u32 = 256u / HEAD_WORDS;

// Below every score.
const LOWEST: f32 = -3.4028234e38;
const TILE: u32 = 64u;

// Query heads, k, v; normed, not rotated.
var<workgroup> heads: array<f32, HEADS_LEN>;
// Four rotated query heads, times 1 / sqrt(HEAD_DIM); by dimension.
var<workgroup> queries: array<vec4<f32>, HEAD_DIM>;
// The new key and value as the cache holds them.
var<workgroup> new_k: array<u32, HEAD_WORDS>;
var<workgroup> new_v: array<u32, HEAD_WORDS>;
// Scores [slice][query][key]; at the end sums [group of lanes][query][dimension].
var<workgroup> shares: array<f32, 2048>;
// By key, for four queries.
var<workgroup> weights: array<vec4<f32>, 64>;
// What the sums so far are worth, for four queries.
var<workgroup> factors: array<vec4<f32>, 1>;

// One component at a time: those of a vector are written by different slices.
fn put_weight(key: u32, q: u32, x: f32) {
    switch q {
        case 0u: { weights[key].x = x; }
        case 1u: { weights[key].y = x; }
        case 2u: { weights[key].z = x; }
        default: { weights[key].w = x; }
    }
}

fn put_factor(q: u32, x: f32) {
    switch q {
        case 0u: { factors[0].x = x; }
        case 1u: { factors[0].y = x; }
        case 2u: { factors[0].z = x; }
        default: { factors[0].w = x; }
    }
}

// Fills `heads`.
fn load_heads(kv_head: u32, local: u32) {
    let lane = local % 32u;
    for (var base = 0u; base < GROUP + 2u; base += 8u) {
        let i = base + local / 32u;
        var source = (kv_head * GROUP + i) * HEAD_DIM;
        if i >= GROUP {
            source = (N_HEADS + (i - GROUP) * N_KV_HEADS + kv_head) * HEAD_DIM;
        }
        let there = i < GROUP + 2u;
        let normed = QK_NORM && i <= GROUP;
        var square = 0.0;
        // The norm's weights come with what they belong to, not after it.
        for (var d = lane; d < HEAD_DIM; d += 32u) {
            if there {
                let x = qkv[source + d];
                var norm = 1.0;
                if normed {
                    norm = qk_norm[select(0u, HEAD_DIM, i == GROUP) + d];
                }
                heads[i * HEAD_DIM + d] = norm * x;
                square += x * x;
            }
        }
        if !QK_NORM {
            continue;
        }
        let mean = number_or_nan(sum32(square, local) / f32(HEAD_DIM));
        let inverse = 1.0 / sqrt(mean + select(Q_EPS, K_EPS, i == GROUP));
        for (var d = lane; d < HEAD_DIM; d += 32u) {
            if normed {
                heads[i * HEAD_DIM + d] *= inverse;
            }
        }
    }
    workgroupBarrier();
}

// (cos, sin) of dimension d, (1, 0) where it does not turn.
fn turn_of(d: u32, position: u32) -> vec2<f32> {
    let n = ROPE_DIM / 2u;
    var turn = vec2(1.0, 0.0);
    if d < ROPE_DIM {
        turn = rope[position * n + select(d, d - n, d >= n)];
    }
    return turn;
}

// Dimension d of a head, rotated.
fn turned(head: u32, d: u32, turn: vec2<f32>) -> f32 {
    let x = heads[head * HEAD_DIM + d];
    let n = ROPE_DIM / 2u;
    if d >= ROPE_DIM {
        return x;
    }
    let second = d >= n;
    let other = heads[head * HEAD_DIM + select(d + n, d - n, second)];
    return x * turn.x + select(-other, other, second) * turn.y;
}

// The same of the dimensions of word w of a key: of both, or of the only one.
fn turns_of(w: u32, position: u32) -> vec4<f32> {
    if KV_F32 {
        return vec4(turn_of(w, position), 1.0, 0.0);
    }
    return vec4(turn_of(2u * w, position), turn_of(2u * w + 1u, position));
}

// Word w of the new key or value; `turns` are those of its dimensions, or of the only one.
fn new_word(head: u32, w: u32, turns: vec4<f32>, rotate: bool) -> u32 {
    if KV_F32 {
        let x = heads[head * HEAD_DIM + w];
        var y = x;
        if rotate {
            y = turned(head, w, turns.xy);
        }
        return bitcast<u32>(y);
    }
    let d = 2u * w;
    var x = vec2(heads[head * HEAD_DIM + d], heads[head * HEAD_DIM + d + 1u]);
    if rotate {
        x = vec2(turned(head, d, turns.xy), turned(head, d + 1u, turns.zw));
    }
    return bf16_bits(x.x) | (bf16_bits(x.y) << 16u);
}

// The first 8 of an invocation's words of its two keys of a tile, four at a time.
struct KeyWords {
    a: vec4<u32>,
    b: vec4<u32>,
    c: vec4<u32>,
    d: vec4<u32>,
}

// The first 16 of an invocation's words of a tile's values.
struct ValueWords {
    a: vec4<u32>,
    b: vec4<u32>,
    c: vec4<u32>,
    d: vec4<u32>,
}

// Where a workgroup's keys are: those of the query are `n`, from position `first` on; `cache` is the kv head's first word.
struct Keys {
    cache: u32,
    first: u32,
    n: u32,
    end: u32,
}

fn key_at(keys: Keys, key: u32) -> u32 {
    let index = (keys.first + key) % CAPACITY;
    return keys.cache + index / 32u * (HEAD_WORDS * 32u) + index % 32u;
}

// Whether a key is there to be read: the last one is the token's own.
fn is_old(keys: Keys, key: u32) -> bool {
    return key < keys.end && key + 1u < keys.n;
}

fn key_words(keys: Keys, key: u32, w: u32) -> vec4<u32> {
    var words = vec4(0u);
    if is_old(keys, key) {
        let at = key_at(keys, key);
        words = vec4(key_word(at, w), key_word(at, w + 1u), key_word(at, w + 2u), key_word(at, w + 3u));
    }
    return words;
}

fn key_word(at: u32, w: u32) -> u32 {
    var word = 0u;
    if w < HEAD_WORDS {
        word = k[at + 32u * w];
    }
    return word;
}

fn load_keys(keys: Keys, tile: u32, local: u32) -> KeyWords {
    let key = tile + local % 32u;
    let w = local / 32u * SLICE_WORDS;
    var words = KeyWords();
    words.a = key_words(keys, key, w);
    words.c = key_words(keys, key + 32u, w);
    if SLICE_WORDS > 4u {
        words.b = key_words(keys, key, w + 4u);
        words.d = key_words(keys, key + 32u, w + 4u);
    }
    return words;
}

fn value_word(keys: Keys, key: u32, w: u32) -> u32 {
    var word = 0u;
    if is_old(keys, key) {
        word = v[keys.cache + (keys.first + key) % CAPACITY * HEAD_WORDS + w];
    }
    return word;
}

// Words of the values of key `key` and of three more, V_GROUPS apart.
fn value_words(keys: Keys, key: u32, w: u32) -> vec4<u32> {
    return vec4(
        value_word(keys, key, w),
        value_word(keys, key + V_GROUPS, w),
        value_word(keys, key + 2u * V_GROUPS, w),
        value_word(keys, key + 3u * V_GROUPS, w)
    );
}

fn load_values(keys: Keys, tile: u32, local: u32) -> ValueWords {
    let w = local % HEAD_WORDS;
    let key = tile + local / HEAD_WORDS;
    return ValueWords(
        value_words(keys, key, w),
        value_words(keys, key + 4u * V_GROUPS, w),
        value_words(keys, key + 8u * V_GROUPS, w),
        value_words(keys, key + 12u * V_GROUPS, w)
    );
}

// The share of a key's word w in four scores.
fn score(word: u32, w: u32) -> vec4<f32> {
    if w >= HEAD_WORDS {
        return vec4(0.0);
    }
    if KV_F32 {
        return queries[w] * bitcast<f32>(word);
    }
    return queries[2u * w] * bf16_low(word) + queries[2u * w + 1u] * bf16_high(word);
}

// Words i to i + 3 of a slice, of a key, in four scores; those of the new key are in workgroup memory.
fn score4(words: vec4<u32>, i: u32, slice: u32, is_new: bool) -> vec4<f32> {
    let w = slice * SLICE_WORDS + i;
    var own = words;
    if is_new {
        let last = HEAD_WORDS - 1u;
        own = vec4(new_k[min(w, last)], new_k[min(w + 1u, last)], new_k[min(w + 2u, last)], new_k[min(w + 3u, last)]);
    }
    var sum = score(own.x, w);
    if i + 1u < SLICE_WORDS {
        sum += score(own.y, w + 1u);
    }
    if i + 2u < SLICE_WORDS {
        sum += score(own.z, w + 2u);
    }
    if i + 3u < SLICE_WORDS {
        sum += score(own.w, w + 3u);
    }
    return sum;
}

// A slice's share in the four scores of key `key`, to shares. `a` and `b` are its first 8 words.
fn put_scores(keys: Keys, key: u32, to: u32, a: vec4<u32>, b: vec4<u32>, slice: u32) {
    let is_new = key + 1u == keys.n;
    var sum = score4(a, 0u, slice, is_new);
    if SLICE_WORDS > 4u {
        sum += score4(b, 4u, slice, is_new);
    }
    for (var i = 8u; i < SLICE_WORDS; i += 4u) {
        sum += score4(key_words(keys, key, slice * SLICE_WORDS + i), i, slice, is_new);
    }
    shares[to] = sum.x;
    shares[to + 64u] = sum.y;
    shares[to + 128u] = sum.z;
    shares[to + 192u] = sum.w;
}

// Four queries' sums of one word of values: its lower and its upper element, or the only one.
struct Sums {
    low: vec4<f32>,
    high: vec4<f32>,
}

fn add_value(sums: Sums, word: u32, key: u32, tile: u32, keys: Keys, w: u32) -> Sums {
    if tile + key >= keys.end || key >= TILE {
        return sums;
    }
    var own = word;
    if tile + key + 1u == keys.n {
        own = new_v[w];
    }
    let weight = weights[key];
    if KV_F32 {
        return Sums(sums.low + weight * bitcast<f32>(own), sums.high);
    }
    return Sums(sums.low + weight * bf16_low(own), sums.high + weight * bf16_high(own));
}

fn add_values(sums: Sums, words: vec4<u32>, key: u32, tile: u32, keys: Keys, w: u32) -> Sums {
    let a = add_value(sums, words.x, key, tile, keys, w);
    let b = add_value(a, words.y, key + V_GROUPS, tile, keys, w);
    let c = add_value(b, words.z, key + 2u * V_GROUPS, tile, keys, w);
    return add_value(c, words.w, key + 3u * V_GROUPS, tile, keys, w);
}

// The sums of a value's word w, to `at` and its neighbour.
fn put_sum(at: u32, w: u32, low: f32, high: f32) {
    if KV_F32 {
        shares[at + w] = low;
    } else {
        shares[at + 2u * w] = low;
        shares[at + 2u * w + 1u] = high;
    }
}

// The dispatch is (N_KV_HEADS, parts, 1); parts that have no key do nothing.
@compute @workgroup_size(256)
fn attention(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let slot = rows[0].y;
    let position = rows[0].z;
    let n = n_keys(position);
    let first = position + 1u - n;
    let start = group.y * part_keys(n);
    if start >= n {
        return;
    }
    let end = min(n, start + part_keys(n));
    let kv_head = group.x;
    let cache = (slot * N_KV_HEADS + kv_head) * CAPACITY * HEAD_WORDS;
    let keys = Keys(cache, first, n, end);
    let slice = local / 32u;
    let lane = local % 32u;
    let v_word = local % HEAD_WORDS;
    let v_group = local / HEAD_WORDS;
    // A tile's keys and values are on their way while what is before is computed.
    var k_words = load_keys(keys, start, local);
    var v_words = load_values(keys, start, local);
    let own_turn = turn_of(local, position);
    let own_turns = turns_of(local, position);
    load_heads(kv_head, local);

    for (var q0 = 0u; q0 < GROUP; q0 += 4u) {
        let n_queries = min(4u, GROUP - q0);
        if q0 > 0u {
            k_words = load_keys(keys, start, local);
            v_words = load_values(keys, start, local);
        }
        let scale = 1.0 / sqrt(f32(HEAD_DIM));
        for (var d = local; d < HEAD_DIM; d += 256u) {
            var turn = own_turn;
            if d != local {
                turn = turn_of(d, position);
            }
            var q = vec4(turned(q0, d, turn), 0.0, 0.0, 0.0);
            if n_queries > 1u {
                q.y = turned(q0 + 1u, d, turn);
            }
            if n_queries > 2u {
                q.z = turned(q0 + 2u, d, turn);
            }
            if n_queries > 3u {
                q.w = turned(q0 + 3u, d, turn);
            }
            queries[d] = q * scale;
        }
        if q0 == 0u && end == n {
            for (var w = local; w < HEAD_WORDS; w += 256u) {
                var turns = own_turns;
                if w != local {
                    turns = turns_of(w, position);
                }
                new_k[w] = new_word(GROUP, w, turns, true);
                new_v[w] = new_word(GROUP + 1u, w, turns, false);
            }
        }
        workgroupBarrier();

        var largest = LOWEST;
        var total = 0.0;
        var sums = Sums(vec4(0.0), vec4(0.0));
        for (var tile = start; tile < end; tile += TILE) {
            let in_tile = min(TILE, end - tile);
            let more = tile + TILE < end;
            put_scores(keys, tile + lane, slice * 256u + lane, k_words.a, k_words.b, slice);
            put_scores(keys, tile + lane + 32u, slice * 256u + lane + 32u, k_words.c, k_words.d, slice);
            if more {
                k_words = load_keys(keys, tile + TILE, local);
            }
            workgroupBarrier();

            // Slice q has query q; slices 4 to 7 do the same for nothing.
            let q = slice % 4u;
            var a = 0.0;
            var b = 0.0;
            for (var s = 0u; s < 8u; s++) {
                a += shares[s * 256u + q * 64u + lane];
                b += shares[s * 256u + q * 64u + 32u + lane];
            }
            let a_there = lane < in_tile;
            let b_there = lane + 32u < in_tile;
            // Keys of order, so that a NaN is not lost.
            let most = max(
                select(0u, order_key(a), a_there),
                select(0u, order_key(b), b_there)
            );
            let now = max(largest, order_value(max32(most, local)));
            let factor = exp(largest - now);
            let a_weight = select(0.0, exp(a - now), a_there);
            let b_weight = select(0.0, exp(b - now), b_there);
            total = total * factor + sum32(a_weight + b_weight, local);
            largest = now;
            if slice < 4u {
                put_weight(lane, q, a_weight);
                put_weight(lane + 32u, q, b_weight);
                if lane == 0u {
                    put_factor(q, factor);
                }
            }
            workgroupBarrier();

            if v_group < V_GROUPS {
                sums = Sums(sums.low * factors[0], sums.high * factors[0]);
                sums = add_values(sums, v_words.a, v_group, tile, keys, v_word);
                sums = add_values(sums, v_words.b, v_group + 4u * V_GROUPS, tile, keys, v_word);
                sums = add_values(sums, v_words.c, v_group + 8u * V_GROUPS, tile, keys, v_word);
                sums = add_values(sums, v_words.d, v_group + 12u * V_GROUPS, tile, keys, v_word);
                for (var i = v_group + 16u * V_GROUPS; i < in_tile; i += 4u * V_GROUPS) {
                    sums = add_values(sums, value_words(keys, tile + i, v_word), i, tile, keys, v_word);
                }
                if more {
                    v_words = load_values(keys, tile + TILE, local);
                }
            }
        }

        if v_group < V_GROUPS {
            let to = v_group * 4u * HEAD_DIM;
            put_sum(to, v_word, sums.low.x, sums.high.x);
            put_sum(to + HEAD_DIM, v_word, sums.low.y, sums.high.y);
            put_sum(to + 2u * HEAD_DIM, v_word, sums.low.z, sums.high.z);
            put_sum(to + 3u * HEAD_DIM, v_word, sums.low.w, sums.high.w);
        }
        workgroupBarrier();
        let head = group.y * N_HEADS + kv_head * GROUP + q0;
        for (var i = local; i < n_queries * HEAD_DIM; i += 256u) {
            var sum = 0.0;
            for (var g = 0u; g < V_GROUPS; g++) {
                sum += shares[g * 4u * HEAD_DIM + i];
            }
            states[head * HEAD_DIM + i] = sum;
        }
        if lane == 0u && slice < n_queries {
            let to = MAX_PARTS * N_HEADS * HEAD_DIM + 2u * (head + slice);
            states[to] = largest;
            states[to + 1u] = total;
        }
        workgroupBarrier();
    }

    if end == n {
        let index = position % CAPACITY;
        for (var w = local; w < HEAD_WORDS; w += 256u) {
            k[cache + index / 32u * (HEAD_WORDS * 32u) + 32u * w + index % 32u] = new_k[w];
            v[cache + index * HEAD_WORDS + w] = new_v[w];
        }
    }
}
