// The next token from the logits of one row, as the host's sampler chooses it but in f32: the top_k likeliest in rank order (larger logit
// first, of equal ones the lower token), temperature, top-p, min-p, one draw; greedy with temperature 0. Hands the token to the next step.
//
// One workgroup. The top_k-th largest of 256 groups' maxima is reached by at least top_k logits, and by few more: those are gathered, and
// their ranks counted. When more are gathered than there is room for, or a logit is NaN or infinite, the status says so and the host
// looks at it.

// use floor

// Steps that `uniforms` and `results` hold.
override RING: u32 = 64u;
// Whether row r of the head is token token_map[r]; else token r.
override MAPPED: bool = false;

// [ROWS].
@group(0) @binding(0) var<storage, read> logits: array<f32>;
// order_key of the largest of each 32 logits.
@group(0) @binding(1) var<storage, read> maxima: array<u32>;
// [ROWS] where MAPPED.
@group(0) @binding(2) var<storage, read> token_map: array<u32>;
// temperature, top_k (as u32, 1 to 64 and at most ROWS), top_p, min_p.
@group(0) @binding(3) var<storage, read> draw: array<u32>;
// f32 in [0, 1), by step % RING.
@group(0) @binding(4) var<storage, read> uniforms: array<f32>;
// (token, slot, position, step).
@group(0) @binding(5) var<storage, read_write> rows: array<vec4<u32>>;
// By step % RING: token, status, 64 tokens, 64 logits. Places past top_k hold 0xffffffff.
@group(0) @binding(6) var<storage, read_write> results: array<u32>;
// As in experts_in; goes to the result. The number of layers is set back to 0.
@group(0) @binding(7) var<storage, read_write> status: array<u32>;

const MAX_TOP: u32 = 64u;
const RESULT: u32 = 130u;
// Blocks of 32 logits, and logits, that can be gathered.
const MAX_BLOCKS: u32 = 512u;
const MAX_CANDIDATES: u32 = 512u;
// Status words beside those of layers.
const NOT_A_NUMBER: u32 = 0xffffffffu;
const TOO_MANY: u32 = 0xfffffffeu;
const PLUS_INFINITY_KEY: u32 = 0xff800000u;

var<workgroup> n_blocks: atomic<u32>;
var<workgroup> blocks: array<u32, 512>;
var<workgroup> n_found: atomic<u32>;
// (key, token), in any order.
var<workgroup> found: array<vec2<u32>, 512>;
// By rank.
var<workgroup> ranked: array<vec2<u32>, 64>;
var<workgroup> weights: array<f32, 64>;
var<workgroup> n_kept: atomic<u32>;
var<workgroup> n_passed: atomic<u32>;
var<workgroup> n_possible: atomic<u32>;

// A logit of a block, if it reaches the floor.
fn gather(block: u32, lane: u32) {
    let row = block * 32u + lane;
    if row >= ROWS {
        return;
    }
    let key = order_key(logits[row]);
    if key < floor_key || key <= MINUS_INFINITY_KEY {
        return;
    }
    let at = atomicAdd(&n_found, 1u);
    if at < MAX_CANDIDATES {
        var token = row;
        if MAPPED {
            token = token_map[row];
        }
        found[at] = vec2(key, token);
    }
}

// `ranked` from `found`.
fn rank_found(n: u32, top: u32, local: u32) {
    for (var own = local; own < n; own += 256u) {
        let mine = found[own];
        var rank = 0u;
        for (var i = 0u; i < n; i++) {
            let other = found[i];
            rank += u32(other.x > mine.x || (other.x == mine.x && other.y < mine.y));
        }
        if rank < top {
            ranked[rank] = mine;
        }
    }
    workgroupBarrier();
}

// Place among `n` ranked candidates of the one drawn. All invocations call it.
fn drawn(n: u32, step: u32, local: u32) -> u32 {
    let temperature = bitcast<f32>(draw[0]);
    let top_p = bitcast<f32>(draw[2]);
    let min_p = bitcast<f32>(draw[3]);
    if local < MAX_TOP {
        var weight = 0.0;
        if local < n {
            weight = exp((order_value(ranked[local].x) - order_value(ranked[0].x)) / temperature);
        }
        weights[local] = weight;
    }
    workgroupBarrier();
    // Sums up to each place, the same for all of them.
    var before = 0.0;
    var all = 0.0;
    for (var i = 0u; i < MAX_TOP; i++) {
        let weight = weights[i];
        before += select(0.0, weight, i < local);
        all += weight;
    }
    // Ranks fall, so what is kept is a run from the first.
    if local < n {
        let weight = weights[local];
        let in_mass = top_p >= 1.0 || local == 0u || before < top_p * all;
        if in_mass && weight >= min_p {
            atomicAdd(&n_kept, 1u);
            if weight > 0.0 {
                atomicAdd(&n_possible, 1u);
            }
        }
    }
    workgroupBarrier();
    let kept = atomicLoad(&n_kept);
    var mass = 0.0;
    for (var i = 0u; i < kept; i++) {
        mass += weights[i];
    }
    // The first place whose sum exceeds the goal: as many as do not reach it come before.
    if local < kept && before + weights[local] <= uniforms[step % RING] * mass {
        atomicAdd(&n_passed, 1u);
    }
    workgroupBarrier();
    return min(atomicLoad(&n_passed), max(atomicLoad(&n_possible), 1u) - 1u);
}

// The dispatch is (1, 1, 1).
@compute @workgroup_size(256)
fn select_token(@builtin(local_invocation_index) local: u32) {
    let top = clamp(draw[1], 1u, MAX_TOP);
    let row = rows[0];
    if local == 0u {
        atomicStore(&n_blocks, 0u);
        atomicStore(&n_found, 0u);
        atomicStore(&n_kept, 0u);
        atomicStore(&n_passed, 0u);
        atomicStore(&n_possible, 0u);
    }
    find_floor(top, local);
    for (var i = local; i < N_BLOCKS; i += 256u) {
        if maxima[i] >= floor_key && maxima[i] > MINUS_INFINITY_KEY {
            let at = atomicAdd(&n_blocks, 1u);
            if at < MAX_BLOCKS {
                blocks[at] = i;
            }
        }
    }
    workgroupBarrier();
    let in_all = atomicLoad(&n_blocks);
    let n = min(in_all, MAX_BLOCKS);
    for (var i = local / 32u; i < n; i += 8u) {
        gather(blocks[i], local % 32u);
    }
    workgroupBarrier();
    let n_all = atomicLoad(&n_found);
    let n_here = min(n_all, MAX_CANDIDATES);
    rank_found(n_here, top, local);
    let ranks = min(n_here, top);
    var place = 0u;
    if bitcast<f32>(draw[0]) > 0.0 {
        place = drawn(ranks, row.w, local);
    }

    let to = row.w % RING * RESULT;
    if local < MAX_TOP {
        var token = 0xffffffffu;
        var logit = 0xffffffffu;
        if local < ranks {
            token = ranked[local].y;
            logit = bitcast<u32>(order_value(ranked[local].x));
        }
        results[to + 2u + local] = token;
        results[to + 2u + MAX_TOP + local] = logit;
    }
    if local == 0u {
        var word = status[0];
        if word == 0u && (ranks == 0u || ranked[0].x >= PLUS_INFINITY_KEY) {
            word = NOT_A_NUMBER;
        }
        if word == 0u && (in_all > MAX_BLOCKS || n_all > MAX_CANDIDATES) {
            word = TOO_MANY;
        }
        var token = 0u;
        if ranks > 0u {
            token = ranked[min(place, ranks - 1u)].y;
        }
        results[to] = token;
        results[to + 1u] = word;
        rows[0] = vec4(token, row.y, row.z + 1u, row.w + 1u);
        status[1] = 0u;
    }
}
