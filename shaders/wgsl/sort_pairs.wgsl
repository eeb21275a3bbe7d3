// Pairs of tokens and experts, by expert, and the tiles that the expert gemms work on.
//
// Grid: (ceil(tokens * N_USED / 256)). Each workgroup adds the counts up for itself and puts 256 pairs in their places; the first also
// writes the table of tiles.
//
// Bindings: rows, of which the first tells the number of tokens; counts u32 [N_EXPERTS]; chosen, slots as `route` leaves them; pairs
// and tiles as in lib/expert_tile.
// Constants: N_EXPERTS, at most 1024; N_USED; TOKENS, the pairs of a tile. There are at most N_EXPERTS + tokens * N_USED / TOKENS
// tiles, and at most tokens * N_USED.

override N_EXPERTS: u32 = 256u;
override N_USED: u32 = 8u;
override TOKENS: u32 = 64u;

@group(0) @binding(0) var<storage, read> rows: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> counts: array<u32>;
@group(0) @binding(2) var<storage, read> chosen: array<vec2<u32>>;
@group(0) @binding(3) var<storage, read> slots: array<u32>;
@group(0) @binding(4) var<storage, read_write> pairs: array<u32>;
@group(0) @binding(5) var<storage, read_write> tiles: array<vec4<u32>>;

// (pairs, tiles) of the experts before, by four experts; then by expert.
var<workgroup> sums: array<vec2<u32>, 256>;
var<workgroup> starts: array<vec2<u32>, 1024>;

fn count(expert: u32) -> vec2<u32> {
    if expert < N_EXPERTS {
        let n = counts[expert];
        return vec2<u32>(n, (n + TOKENS - 1u) / TOKENS);
    }
    return vec2<u32>();
}

@compute @workgroup_size(256)
fn sort_pairs(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let c0 = count(4u * local);
    let c1 = count(4u * local + 1u);
    let c2 = count(4u * local + 2u);
    let c3 = count(4u * local + 3u);
    let own = (c0 + c1) + (c2 + c3);
    sums[local] = own;
    workgroupBarrier();
    for (var stride = 1u; stride < 256u; stride <<= 1u) {
        var sum = sums[local];
        if local >= stride {
            sum += sums[local - stride];
        }
        workgroupBarrier();
        sums[local] = sum;
        workgroupBarrier();
    }
    let first = sums[local] - own;
    starts[4u * local] = first;
    starts[4u * local + 1u] = first + c0;
    starts[4u * local + 2u] = first + c0 + c1;
    starts[4u * local + 3u] = first + c0 + c1 + c2;
    workgroupBarrier();

    let pair = group.x * 256u + local;
    if pair < rows[0].w * N_USED {
        pairs[starts[chosen[pair].x].x + slots[pair]] = pair;
    }
    if group.x == 0u {
        if local == 0u {
            tiles[0] = vec4<u32>(sums[255].y, 0u, 0u, 0u);
        }
        for (var expert = local; expert < N_EXPERTS; expert += 256u) {
            let start = starts[expert];
            let n = count(expert);
            for (var i = 0u; i < n.y; i++) {
                let done = i * TOKENS;
                tiles[1u + start.y + i] = vec4<u32>(expert, start.x + done, min(n.x - done, TOKENS), 0u);
            }
        }
    }
}
