// The N_USED largest of at most 256 logits, in order; of equal ones the lower index first. `fn logit_at(i: u32) -> f32` is the kernel's.
//
// Ranks are counted, but only among candidates: the N_USED-th largest of the maxima of groups of 8 is reached by at least N_USED
// logits, and by few more.

// use bits
// use reduce

override N_EXPERTS: u32 = 256u;
override N_USED: u32 = 8u;

override TOP_GROUPS: u32 = (N_EXPERTS + 7u) / 8u;

// Experts by rank.
var<workgroup> top_experts: array<u32, N_USED>;
var<workgroup> top_maxima: array<u32, 32>;
var<workgroup> top_floor: u32;
// (key, index), in any order.
var<workgroup> top_candidates: array<vec2<u32>, 256>;
var<workgroup> top_count: atomic<u32>;

// Fills `top_experts`, and waits for it. Returns the invocation's own logit.
fn top_k(local: u32) -> f32 {
    var logit = 0.0;
    var key = 0u;
    if local < N_EXPERTS {
        logit = logit_at(local);
        key = order_key(logit);
    }
    let most = max8(key, local);
    if local % 8u == 0u {
        top_maxima[local / 8u] = most;
    }
    if local == 0u {
        atomicStore(&top_count, 0u);
        top_floor = 0u;
    }
    workgroupBarrier();
    if local < TOP_GROUPS && TOP_GROUPS >= N_USED {
        let own = top_maxima[local];
        var rank = 0u;
        for (var i = 0u; i < TOP_GROUPS; i++) {
            let other = top_maxima[i];
            rank += u32(other > own || (other == own && i < local));
        }
        if rank == N_USED - 1u {
            top_floor = own;
        }
    }
    workgroupBarrier();
    let candidate = local < N_EXPERTS && key >= top_floor;
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
        }
    }
    workgroupBarrier();
    return logit;
}
