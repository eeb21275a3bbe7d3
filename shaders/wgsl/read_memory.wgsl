// Reads a buffer from its beginning to its end, for measuring how fast that goes.
//
// Neighbouring invocations read neighbouring vectors, four on their way at a time. The dispatch is (any number, 1, 1).

@group(0) @binding(0) var<storage, read> source: array<vec4<u32>>;
// One word for each invocation: what was read has to go somewhere, or nothing would be read.
@group(0) @binding(1) var<storage, read_write> sums: array<u32>;

@compute @workgroup_size(256)
fn read_memory(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let step = groups.x * 256u;
    let n = arrayLength(&source);
    var sum = vec4(0u);
    for (var i = id.x; i < n; i += 4u * step) {
        let last = n - 1u;
        sum += (source[i] + source[min(i + step, last)])
            + (source[min(i + 2u * step, last)] + source[min(i + 3u * step, last)]);
    }
    sums[id.x] = (sum.x + sum.y) + (sum.z + sum.w);
}
