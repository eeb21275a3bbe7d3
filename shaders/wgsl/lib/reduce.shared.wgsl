// Sums and maxima over neighbouring invocations of a workgroup of 256, through workgroup memory. Every invocation calls each of
// these, and each gets the result. Sums add like a butterfly (neighbours first, then pairs of neighbours, ...), so the bits are those of
// reduce.subgroup.

// Fewest invocations of a subgroup. Of no use here; the host sets it whatever the variant.
override SUBGROUP_MIN: u32 = 8u;

var<workgroup> reduce_scratch: array<u32, 256>;

fn reduce_at(i: u32) -> f32 {
    return bitcast<f32>(reduce_scratch[i]);
}

// The sum of 8 places, `step` apart, beginning at `first`.
fn reduce_tree8(first: u32, step: u32) -> f32 {
    let a = (reduce_at(first) + reduce_at(first + step)) + (reduce_at(first + 2u * step) + reduce_at(first + 3u * step));
    let b = (reduce_at(first + 4u * step) + reduce_at(first + 5u * step))
        + (reduce_at(first + 6u * step) + reduce_at(first + 7u * step));
    return a + b;
}

// Over 8 invocations, the first a multiple of 8.
fn sum8(x: f32, local: u32) -> f32 {
    reduce_scratch[local] = bitcast<u32>(x);
    workgroupBarrier();
    let sum = reduce_tree8(local & ~7u, 1u);
    workgroupBarrier();
    return sum;
}

// Over 32 invocations.
fn sum32(x: f32, local: u32) -> f32 {
    reduce_scratch[local] = bitcast<u32>(sum8(x, local));
    workgroupBarrier();
    let first = local & ~31u;
    let sum = (reduce_at(first) + reduce_at(first + 8u)) + (reduce_at(first + 16u) + reduce_at(first + 24u));
    workgroupBarrier();
    return sum;
}

// Over the whole workgroup.
fn sum256(x: f32, local: u32) -> f32 {
    reduce_scratch[local] = bitcast<u32>(sum32(x, local));
    workgroupBarrier();
    let sum = reduce_tree8(0u, 32u);
    workgroupBarrier();
    return sum;
}

// Over `n` invocations, a power of two, the first a multiple of it.
fn reduce_max(x: u32, local: u32, n: u32) -> u32 {
    reduce_scratch[local] = x;
    workgroupBarrier();
    let first = local & ~(n - 1u);
    var largest = x;
    for (var i = 0u; i < n; i++) {
        largest = max(largest, reduce_scratch[first + i]);
    }
    workgroupBarrier();
    return largest;
}

fn max2(x: u32, local: u32) -> u32 {
    return reduce_max(x, local, 2u);
}

fn max8(x: u32, local: u32) -> u32 {
    return reduce_max(x, local, 8u);
}

fn max32(x: u32, local: u32) -> u32 {
    return reduce_max(x, local, 32u);
}
