// The logits of some clusters' rows, with the bits that `head` gives them, and the largest of each 32 rows; for one row of h. Others are
// left as they are.
//
// A workgroup has what a cluster has of 32 rows that share a maximum; those after all clusters to be read have rows always computed.

// use head_rows

// Rows of a cluster, a multiple of 4.
override CLUSTER: u32 = 32u;
// Blocks of 32 rows that a cluster has a share of, at most.
override SHARES: u32 = 1u;
override N_CLUSTERS: u32 = ROWS / CLUSTER;

// The row of h, in the first place.
@group(0) @binding(0) var<storage, read> logit_rows: array<u32>;
// [tokens, COLS].
@group(0) @binding(1) var<storage, read> h: array<vec4<f32>>;
// [COLS].
@group(0) @binding(2) var<storage, read> norm: array<vec4<f32>>;
// Panels FIRST_PANEL to END_PANEL.
@group(0) @binding(3) var<storage, read> w: array<vec4<u32>>;
// As probe and certify leave it.
@group(0) @binding(4) var<storage, read> probed: array<u32>;
// (block of 32 rows, a bit for each row that is always computed).
@group(0) @binding(5) var<storage, read> forced: array<vec2<u32>>;
// [ROWS].
@group(0) @binding(6) var<storage, read_write> logits: array<f32>;
// order_key of the largest of each 32 rows, [ceil(ROWS / 32)].
@group(0) @binding(7) var<storage, read_write> maxima: array<atomic<u32>>;

// A bit for each row of the workgroup's block that it computes.
var<private> wanted: u32;

fn panel_wanted(i: u32) -> bool {
    return ((wanted >> (4u * i)) & 15u) != 0u;
}

// Bits of the rows of `block` that are in `cluster`.
fn rows_of(cluster: u32, block: u32) -> u32 {
    let first = max(cluster * CLUSTER, block * 32u);
    let end = min((cluster + 1u) * CLUSTER, block * 32u + 32u);
    if first >= end {
        return 0u;
    }
    return insertBits(0u, 0xffffffffu, first % 32u, end - first);
}

// The block of workgroup `item`, and sets `wanted`.
fn take(item: u32) -> u32 {
    let n = probed[2u * N_CLUSTERS] * SHARES;
    if item < n {
        let cluster = probed[N_CLUSTERS + item / SHARES];
        let block = cluster * CLUSTER / 32u + item % SHARES;
        wanted = rows_of(cluster, block);
        return block;
    }
    wanted = 0u;
    if item - n >= probed[2u * N_CLUSTERS + 1u] {
        return 0u;
    }
    let block = forced[item - n].x;
    wanted = forced[item - n].y;
    // Clusters that are read have their own workgroups.
    let end = min((block * 32u + 31u) / CLUSTER + 1u, N_CLUSTERS);
    for (var cluster = block * 32u / CLUSTER; cluster < end; cluster++) {
        if probed[cluster] != 0u {
            wanted &= ~rows_of(cluster, block);
        }
    }
    return block;
}

// The dispatch is (x, y, 1), 2^15 or fewer in x, and PANELS is 8.
@compute @workgroup_size(256)
fn flash_rows(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let block = take((group.y << 15u) + group.x);
    let panel = block * 8u;
    if wanted == 0u || panel < FIRST_PANEL || panel >= END_PANEL {
        return;
    }
    head_partials(panel - FIRST_PANEL, logit_rows[0], local);

    var key = MINUS_INFINITY_KEY;
    if local < 32u && ((wanted >> local) & 1u) == 1u {
        let logit = head_logit(local);
        logits[block * 32u + local] = logit;
        key = order_key(logit);
    }
    let most = max32(key, local);
    if local == 0u {
        atomicMax(&maxima[block], most);
    }
}
