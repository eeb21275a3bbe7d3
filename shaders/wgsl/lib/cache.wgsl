// Where keys and values are.
//
//     k [slot][kv head][block of 32 positions][element][32 positions]
//     v [slot][kv head][position][element]
//
// An element is a word: two bf16, the even dimension in the low half, or with KV_F32 one f32. Position p is at p % CAPACITY.

override N_KV_HEADS: u32 = 4u;
override HEAD_DIM: u32 = 128u;
override KV_F32: bool = false;
// Positions of a slot, a multiple of 32.
override CAPACITY: u32 = 2048u;
// Words of a head at one position.
override ELEMENTS: u32 = select(HEAD_DIM / 2u, HEAD_DIM, KV_F32);

// First word of a block of keys; `block` is a position / 32, of any size.
fn cache_block(slot: u32, head: u32, block: u32) -> u32 {
    let blocks = CAPACITY / 32u;
    return ((slot * N_KV_HEADS + head) * blocks + block % blocks) * (32u * ELEMENTS);
}

// First word of the key of a position; the next element is 32 on.
fn cache_key(slot: u32, head: u32, position: u32) -> u32 {
    return cache_block(slot, head, position / 32u) + position % 32u;
}

// First word of the value of a position.
fn cache_value(slot: u32, head: u32, position: u32) -> u32 {
    return ((slot * N_KV_HEADS + head) * CAPACITY + position % CAPACITY) * ELEMENTS;
}
