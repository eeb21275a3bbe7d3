// The experts of each token: softmax over all, the N_USED with the largest logits (of equal ones the lower index first), and how many
// pairs each expert has so far. A logit that is not a number is noted in `status`, and the token's weights are NaN.
//
// Grid: (tokens). `counts` are zero before (router_gemm).
//
// Bindings: logits f32 [tokens, N_EXPERTS]; chosen, (expert, bits of the weight) [tokens, N_USED], best first; slots u32 [tokens, N_USED]:
// which of its expert's pairs a pair is (their order has no influence on any result); counts u32 [N_EXPERTS]; status, of
// which word 0 is 0, or 1 + the first layer that failed, and word 1 is 1 + the layer this is.
// Constants: N_EXPERTS, at most 1024; N_USED, at most 64; NORM_TOPK.

// use bits

override N_EXPERTS: u32 = 256u;
override N_USED: u32 = 8u;
override NORM_TOPK: bool = true;

@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read_write> chosen: array<vec2<u32>>;
@group(0) @binding(2) var<storage, read_write> slots: array<u32>;
@group(0) @binding(3) var<storage, read_write> counts: array<atomic<u32>>;
@group(0) @binding(4) var<storage, read_write> status: array<atomic<u32>>;

const LOWEST: f32 = -3.0e38;

// Logits, four experts each; LOWEST past the last.
var<workgroup> all: array<vec4<f32>, 256>;
var<workgroup> scratch: array<vec2<f32>, 256>;
var<workgroup> best: array<vec2<u32>, 64>;

// How many of four logits come before `own`, of expert `expert`; the four begin at expert `first`.
fn before(four: vec4<f32>, first: u32, own: f32, expert: u32) -> u32 {
    let index = vec4<u32>(first, first + 1u, first + 2u, first + 3u);
    let ahead = (four > vec4<f32>(own)) | ((four == vec4<f32>(own)) & (index < vec4<u32>(expert)));
    let ones = select(vec4<u32>(0u), vec4<u32>(1u), ahead);
    return (ones.x + ones.y) + (ones.z + ones.w);
}

// An invocation has the experts 4 * local to 4 * local + 3.
@compute @workgroup_size(256)
fn route(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let token = group.x;
    var x = vec4<f32>(LOWEST);
    var bad = 0.0;
    for (var i = 0u; i < 4u; i++) {
        let expert = 4u * local + i;
        if expert < N_EXPERTS {
            x[i] = logits[token * N_EXPERTS + expert];
            if !is_number(x[i]) {
                bad = 1.0;
            }
        }
    }
    all[local] = x;
    scratch[local] = vec2<f32>(max(max(x.x, x.y), max(x.z, x.w)), bad);
    workgroupBarrier();
    for (var stride = 128u; stride > 0u; stride >>= 1u) {
        if local < stride {
            scratch[local] = max(scratch[local], scratch[local + stride]);
        }
        workgroupBarrier();
    }
    let largest = scratch[0].x;
    let failed = scratch[0].y > 0.0;
    workgroupBarrier();
    let there = vec4<u32>(4u * local, 4u * local + 1u, 4u * local + 2u, 4u * local + 3u) < vec4<u32>(N_EXPERTS);
    let e = select(vec4<f32>(0.0), exp(x - vec4<f32>(largest)), there);
    scratch[local] = vec2<f32>((e.x + e.y) + (e.z + e.w), 0.0);
    workgroupBarrier();
    for (var stride = 128u; stride > 0u; stride >>= 1u) {
        if local < stride {
            scratch[local] += scratch[local + stride];
        }
        workgroupBarrier();
    }
    let p = e / scratch[0].x;

    var rank = vec4<u32>();
    for (var i = 0u; 4u * i < N_EXPERTS; i++) {
        let four = all[i];
        rank.x += before(four, 4u * i, x.x, 4u * local);
        rank.y += before(four, 4u * i, x.y, 4u * local + 1u);
        rank.z += before(four, 4u * i, x.z, 4u * local + 2u);
        rank.w += before(four, 4u * i, x.w, 4u * local + 3u);
    }
    for (var i = 0u; i < 4u; i++) {
        if there[i] && rank[i] < N_USED && !failed {
            best[rank[i]] = vec2<u32>(4u * local + i, bitcast<u32>(p[i]));
        }
    }
    if failed && local < N_USED {
        best[local] = vec2<u32>(local, 0x7fc00000u);
    }
    workgroupBarrier();

    if local < N_USED {
        var sum = 0.0; // ranks ascending
        for (var i = 0u; i < N_USED; i++) {
            sum += bitcast<f32>(best[i].y);
        }
        var own = best[local];
        if NORM_TOPK {
            own.y = bitcast<u32>(bitcast<f32>(own.y) / (sum + 1e-20));
        }
        chosen[token * N_USED + local] = own;
        slots[token * N_USED + local] = atomicAdd(&counts[own.x], 1u);
    }
    if failed && local == 0u {
        // Of several writers in one dispatch all write the same.
        if atomicLoad(&status[0]) == 0u {
            atomicStore(&status[0], atomicLoad(&status[1]));
        }
    }
}
