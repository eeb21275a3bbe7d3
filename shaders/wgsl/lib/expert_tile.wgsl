// A gemm tile of one expert's tokens, from the table that sort_pairs makes.
//
// Grid: (tiles of rows, most tiles of pairs there can be); a workgroup past the table's end does nothing.
//
//     tiles, vec4<u32> [1 + n]: n; then for each tile: expert, place of its first pair, number of pairs (1 to TOKENS)
//     pairs, u32 [places]: token * N_USED + rank of the pair at a place; those of an expert lie together
//
// The expert's block of BLOCK_WORDS words is in x0, or from expert PER_SPLIT on in x1.

// use gemm_tile

override N_USED: u32 = 8u;
override BLOCK_WORDS: u32 = 196608u;
// Experts in x0; all of them where nothing is split.
override PER_SPLIT: u32 = 0xffffffffu;

@group(0) @binding(2) var<storage, read> x0: array<u32>;
@group(0) @binding(3) var<storage, read> x1: array<u32>;
@group(0) @binding(4) var<storage, read> pairs: array<u32>;
@group(0) @binding(5) var<storage, read> tiles: array<vec4<u32>>;

// What the workgroup has: a tile, its first panel, the expert's first word and whether that is in x1.
var<private> expert_tile: vec4<u32>;
var<private> first_panel: u32;
var<private> expert_at: u32;
var<private> expert_second: bool;

// Looks the tile up; false past the end of the table.
fn expert_begin(group: vec3<u32>) -> bool {
    if group.y >= tiles[0].x {
        return false;
    }
    expert_tile = tiles[1u + group.y];
    first_panel = group.x * PANELS;
    expert_second = PER_SPLIT != 0xffffffffu && expert_tile.x >= PER_SPLIT;
    expert_at = (expert_tile.x - select(0u, PER_SPLIT, expert_second)) * BLOCK_WORDS;
    return true;
}

// A word of the expert's block.
fn expert_word(at: u32) -> u32 {
    if expert_second {
        return x1[expert_at + at];
    }
    return x0[expert_at + at];
}
