// Which clusters of the head are read for a token: those whose keys are largest, of equal ones the lower index first.
//
// A workgroup has 16 clusters and counts how many are ahead of each: invocation (slice, cluster) those in a sixteenth of all. Between them
// the workgroups also make every logit -infinity, for flash_rows to write those of the clusters read.

// use bits

override N_CLUSTERS: u32 = 4748u;
override N_PROBES: u32 = 512u;
// Blocks of 32 rows that have rows always computed.
override N_FORCED: u32 = 0u;
// Logits, a multiple of 4.
override ROWS: u32 = 151936u;
override N_BLOCKS: u32 = (ROWS + 31u) / 32u;
override FOURS: u32 = (N_CLUSTERS + 3u) / 4u;
override GROUPS: u32 = (N_CLUSTERS + 15u) / 16u;

// [N_CLUSTERS], filled up to fours with zeros; keys themselves are above 0.
@group(0) @binding(0) var<storage, read> keys: array<vec4<u32>>;
// [N_CLUSTERS]: 1 where a cluster is read, else 0. Then [N_CLUSTERS]: the clusters to read, and nothing; how many they are; and N_FORCED.
@group(0) @binding(1) var<storage, read_write> probed: array<u32>;
// [ROWS], the bits of f32.
@group(0) @binding(2) var<storage, read_write> logits: array<vec4<u32>>;
// [N_BLOCKS], order_key of the largest of each 32 logits.
@group(0) @binding(3) var<storage, read_write> maxima: array<u32>;
// Tokens so far, and others' counts.
@group(0) @binding(4) var<storage, read_write> counts: array<u32>;

const MINUS_INFINITY: u32 = 0xff800000u;

// 256 of the keys by fours.
var<workgroup> tile: array<vec4<u32>, 256>;
// Of each cluster of the workgroup, how many are ahead.
var<workgroup> ranks: array<atomic<u32>, 16>;

fn keys_at(four: u32) -> vec4<u32> {
    var x = vec4(0u);
    if four < FOURS {
        x = keys[four];
    }
    return x;
}

fn above(x: vec4<u32>, key: u32) -> u32 {
    let ones = select(vec4(0u), vec4(1u), x > vec4(key));
    return (ones.x + ones.y) + (ones.z + ones.w);
}

// The dispatch is (GROUPS, 1, 1).
@compute @workgroup_size(256)
fn probe(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    var next = keys_at(local);
    for (var i = group.x * 256u + local; i < ROWS / 4u; i += GROUPS * 256u) {
        logits[i] = vec4(MINUS_INFINITY);
    }
    for (var i = group.x * 256u + local; i < N_BLOCKS; i += GROUPS * 256u) {
        maxima[i] = MINUS_INFINITY_KEY;
    }
    let cluster = group.x * 16u + local % 16u;
    let own_four = cluster / 4u;
    let own = keys_at(own_four);
    let key = own[cluster % 4u];
    if local < 16u {
        // Those of the same four that come first and are equal, too.
        let lower = vec4(0u, 1u, 2u, 3u) < vec4(cluster % 4u);
        let ones = select(vec4(0u), vec4(1u), (own == vec4(key)) & lower);
        atomicStore(&ranks[local], (ones.x + ones.y) + (ones.z + ones.w));
    }
    var ahead = 0u;
    for (var base = 0u; base < FOURS; base += 256u) {
        tile[local] = next;
        workgroupBarrier();
        next = keys_at(base + 256u + local);
        for (var i = local / 16u; i < 256u; i += 16u) {
            // Of equal keys those in fours before the own one are ahead.
            ahead += above(tile[i], key - u32(base + i < own_four));
        }
        workgroupBarrier();
    }
    atomicAdd(&ranks[local % 16u], ahead);
    workgroupBarrier();
    if local < 16u && cluster < N_CLUSTERS {
        let rank = atomicLoad(&ranks[local]);
        let is_probed = rank < N_PROBES;
        probed[cluster] = u32(is_probed);
        if is_probed {
            probed[N_CLUSTERS + rank] = cluster;
        }
    }
    if group.x == 0u && local == 0u {
        probed[2u * N_CLUSTERS] = N_PROBES;
        probed[2u * N_CLUSTERS + 1u] = N_FORCED;
        counts[0] += 1u;
    }
}
