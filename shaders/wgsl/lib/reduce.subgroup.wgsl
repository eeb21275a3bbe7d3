// Sums and maxima over neighbouring invocations of a workgroup of 256, by subgroup shuffles as far as a subgroup reaches. Subgroups
// have 8 invocations at least, consecutive ones. Every invocation calls each of these, and each gets the result. Sums add like a
// butterfly, so the bits are those of reduce.shared.

// Fewest invocations of a subgroup on this device.
override SUBGROUP_MIN: u32 = 8u;

var<workgroup> reduce_scratch: array<u32, 32>;

fn reduce_at(i: u32) -> f32 {
    return bitcast<f32>(reduce_scratch[i]);
}

// Over 8 invocations, the first a multiple of 8.
fn sum8(x: f32, local: u32) -> f32 {
    var sum = x + subgroupShuffleXor(x, 1u);
    sum += subgroupShuffleXor(sum, 2u);
    return sum + subgroupShuffleXor(sum, 4u);
}

// Over 32 invocations.
fn sum32(x: f32, local: u32) -> f32 {
    var sum = sum8(x, local);
    if SUBGROUP_MIN >= 32u {
        sum += subgroupShuffleXor(sum, 8u);
        return sum + subgroupShuffleXor(sum, 16u);
    }
    if local % 8u == 0u {
        reduce_scratch[local / 8u] = bitcast<u32>(sum);
    }
    workgroupBarrier();
    let first = local / 32u * 4u;
    sum = (reduce_at(first) + reduce_at(first + 1u)) + (reduce_at(first + 2u) + reduce_at(first + 3u));
    workgroupBarrier();
    return sum;
}

// Over the whole workgroup.
fn sum256(x: f32, local: u32) -> f32 {
    let sum = sum32(x, local);
    if local % 32u == 0u {
        reduce_scratch[local / 32u] = bitcast<u32>(sum);
    }
    workgroupBarrier();
    let a = (reduce_at(0u) + reduce_at(1u)) + (reduce_at(2u) + reduce_at(3u));
    let b = (reduce_at(4u) + reduce_at(5u)) + (reduce_at(6u) + reduce_at(7u));
    workgroupBarrier();
    return a + b;
}

fn max2(x: u32, local: u32) -> u32 {
    return max(x, subgroupShuffleXor(x, 1u));
}

// Over 8 invocations.
fn max8(x: u32, local: u32) -> u32 {
    var largest = max2(x, local);
    largest = max(largest, subgroupShuffleXor(largest, 2u));
    return max(largest, subgroupShuffleXor(largest, 4u));
}

// Over 32 invocations.
fn max32(x: u32, local: u32) -> u32 {
    var largest = max8(x, local);
    if SUBGROUP_MIN >= 32u {
        largest = max(largest, subgroupShuffleXor(largest, 8u));
        return max(largest, subgroupShuffleXor(largest, 16u));
    }
    if local % 8u == 0u {
        reduce_scratch[local / 8u] = largest;
    }
    workgroupBarrier();
    let first = local / 32u * 4u;
    largest = max(
        max(reduce_scratch[first], reduce_scratch[first + 1u]),
        max(reduce_scratch[first + 2u], reduce_scratch[first + 3u])
    );
    workgroupBarrier();
    return largest;
}
