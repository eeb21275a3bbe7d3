// A number that the largest logits of a row reach.
//
// The kernel has `logits: array<f32>`, [ROWS], and `maxima: array<u32>`, order_key of the largest of each 32 logits. One workgroup.

// use bits

// Logits.
override ROWS: u32 = 151936u;
override N_BLOCKS: u32 = (ROWS + 31u) / 32u;
// Of few blocks there may be fewer than top_k that matter; then groups are of logits.
override BY_LOGITS: bool = ROWS <= 16384u;

var<workgroup> group_keys: array<vec4<u32>, 64>;
var<workgroup> least_key: atomic<u32>;

// What find_floor finds.
var<private> floor_key: u32;

fn put_group(i: u32, key: u32) {
    switch i % 4u {
        case 0u: { group_keys[i / 4u].x = key; }
        case 1u: { group_keys[i / 4u].y = key; }
        case 2u: { group_keys[i / 4u].z = key; }
        default: { group_keys[i / 4u].w = key; }
    }
}

// Sets floor_key to a key that at least `top` logits reach. `top` is 1 to 256; all logits reach 0.
fn find_floor(top: u32, local: u32) {
    var own = 0u;
    if BY_LOGITS {
        for (var i = local; i < ROWS; i += 256u) {
            own = max(own, order_key(logits[i]));
        }
    } else {
        for (var i = local; i < N_BLOCKS; i += 256u) {
            own = max(own, maxima[i]);
        }
    }
    put_group(local, own);
    if local == 0u {
        atomicStore(&least_key, 0xffffffffu);
    }
    workgroupBarrier();
    // The least of those that fewer than `top` exceed.
    var rank = 0u;
    for (var i = 0u; i < 64u; i++) {
        let ones = select(vec4(0u), vec4(1u), group_keys[i] > vec4(own));
        rank += (ones.x + ones.y) + (ones.z + ones.w);
    }
    if rank < top {
        atomicMin(&least_key, own);
    }
    workgroupBarrier();
    floor_key = atomicLoad(&least_key);
}
