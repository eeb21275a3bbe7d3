// The N_USED largest of at most 256 logits, in order; of equal ones the lower index first.
//
// Ranks are counted, but only among candidates: the N_USED-th largest of the maxima of groups of 8 is reached by at least N_USED
// logits, and by few more.

// use bits
// use reduce

override N_EXPERTS: u32 = 256u;
override N_USED: u32 = 8u;

override TOP_GROUPS: u32 = (N_EXPERTS + 7u) / 8u;

// Experts by rank, and their logits.
var<workgroup> top_experts: array<u32, N_USED>;
var<workgroup> top_logits: array<f32, N_USED>;
// Largest of each 8.
var<workgroup> top_maxima: array<vec4<u32>, 8>;
var<workgroup> top_floor: atomic<u32>;
// (key, index), in any order.
var<workgroup> top_candidates: array<vec2<u32>, 256>;
var<workgroup> top_count: atomic<u32>;

fn put_maximum(i: u32, key: u32) {
    switch i % 4u {
        case 0u: { top_maxima[i / 4u].x = key; }
        case 1u: { top_maxima[i / 4u].y = key; }
        case 2u: { top_maxima[i / 4u].z = key; }
        default: { top_maxima[i / 4u].w = key; }
    }
}

// Fills `top_experts` and `top_logits`, and waits for it. `logit` is that of expert `local`, if there is one.
fn top_k(logit: f32, local: u32) {
    let key = select(0u, order_key(logit), local < N_EXPERTS);
    let most = max8(key, local);
    if local % 8u == 0u {
        put_maximum(local / 8u, most);
    }
    if local == 0u {
        atomicStore(&top_count, 0u);
        atomicStore(&top_floor, select(0u, 0xffffffffu, TOP_GROUPS >= N_USED));
    }
    workgroupBarrier();
    if local < TOP_GROUPS {
        let own = top_maxima[local / 4u][local % 4u];
        var rank = 0u;
        for (var i = 0u; i < 8u; i++) {
            let ones = select(vec4(0u), vec4(1u), top_maxima[i] > vec4(own));
            rank += (ones.x + ones.y) + (ones.z + ones.w);
        }
        // The least of those that fewer than N_USED exceed.
        if rank < N_USED {
            atomicMin(&top_floor, own);
        }
    }
    workgroupBarrier();
    let candidate = local < N_EXPERTS && key >= atomicLoad(&top_floor);
    if candidate {
        top_candidates[atomicAdd(&top_count, 1u)] = vec2(key, local);
    }
    workgroupBarrier();
    if candidate {
        let n = atomicLoad(&top_count);
        var rank = 0u;
        for (var i = 0u; i < n; i++) {
            let other = top_candidates[i];
            rank += u32(other.x > key || (other.x == key && other.y < local));
        }
        if rank < N_USED {
            top_experts[rank] = local;
            top_logits[rank] = logit;
        }
    }
    workgroupBarrier();
}
