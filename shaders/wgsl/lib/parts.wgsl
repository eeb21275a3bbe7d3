// Which keys a query sees, and into how many parts they are cut. The host computes the same.

// Keys a query sees, itself included; 0 is all of them.
override WINDOW: u32 = 0u;
// Keys that are worth a workgroup.
override PART_KEYS: u32 = 64u;
// Most parts.
override MAX_PARTS: u32 = 8u;

// Keys that the query at `position` sees.
fn n_keys(position: u32) -> u32 {
    return select(min(position + 1u, WINDOW), position + 1u, WINDOW == 0u);
}

// Keys of each part but the last, of `n` in all: a multiple of 32.
fn part_keys(n: u32) -> u32 {
    let wanted = clamp((n + PART_KEYS - 1u) / PART_KEYS, 1u, MAX_PARTS);
    return ((n + wanted - 1u) / wanted + 31u) / 32u * 32u;
}

// Parts that have a key.
fn n_parts(n: u32) -> u32 {
    let keys = part_keys(n);
    return (n + keys - 1u) / keys;
}
