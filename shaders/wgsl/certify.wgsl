// Which clusters not read yet may hold one of the largest logits of a row: those whose bound reaches a number that as many logits reach.
// They are flagged 2; where there are none, those read at first were enough.

// use floor

override N_CLUSTERS: u32 = 4748u;

// [ROWS].
@group(0) @binding(0) var<storage, read> logits: array<f32>;
// order_key of the largest of each 32 logits.
@group(0) @binding(1) var<storage, read> maxima: array<u32>;
// order_key of what no logit of a cluster exceeds, [N_CLUSTERS].
@group(0) @binding(2) var<storage, read> bound_keys: array<u32>;
// How many of the largest logits matter, at most 64.
@group(0) @binding(3) var<storage, read> head_top: array<u32>;
// [N_CLUSTERS]: 1 where probe had a cluster read, 2 where it is to be read now, else 0. Then [N_CLUSTERS]: those to be read now, in any
// order, and nothing; how many they are; and 0, no more rows that are always computed.
@group(0) @binding(4) var<storage, read_write> probed: array<u32>;
// Tokens, those whose clusters were enough at first, and the clusters flagged here: low word, high word.
@group(0) @binding(5) var<storage, read_write> counts: array<u32>;

var<workgroup> n_open: atomic<u32>;

fn is_open(i: u32) -> bool {
    return bound_keys[i] >= floor_key && probed[i] == 0u;
}

// The dispatch is (1, 1, 1).
@compute @workgroup_size(256)
fn certify(@builtin(local_invocation_index) local: u32) {
    if local == 0u {
        atomicStore(&n_open, 0u);
    }
    find_floor(clamp(head_top[0], 1u, 64u), local);
    var n = 0u;
    for (var i = local; i < N_CLUSTERS; i += 256u) {
        n += u32(is_open(i));
    }
    if n > 0u {
        var at = N_CLUSTERS + atomicAdd(&n_open, n);
        for (var i = local; i < N_CLUSTERS; i += 256u) {
            if is_open(i) {
                probed[i] = 2u;
                probed[at] = i;
                at++;
            }
        }
    }
    workgroupBarrier();
    if local == 0u {
        let all = atomicLoad(&n_open);
        probed[2u * N_CLUSTERS] = all;
        probed[2u * N_CLUSTERS + 1u] = 0u;
        counts[1] += u32(all == 0u);
        counts[2] += all;
        counts[3] += u32(counts[2] < all);
    }
}
