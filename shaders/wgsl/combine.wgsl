// h[t] += Σ weight * y[t][rank], in the order of ranks, so that it does not depend on what else the step holds.
//
// Grid: (tokens).
//
// Bindings: chosen, (expert, bits of the weight) [tokens, N_USED]; y f32 [tokens, N_USED, COLS]; h f32 [tokens, COLS].
// Constants: COLS, a multiple of 4; N_USED.

override COLS: u32 = 2048u;
override N_USED: u32 = 8u;

@group(0) @binding(0) var<storage, read> chosen: array<vec2<u32>>;
@group(0) @binding(1) var<storage, read> y: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> h: array<vec4<f32>>;

@compute @workgroup_size(256)
fn combine(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let token = group.x;
    for (var i = local; i < COLS / 4u; i += 256u) {
        var sum = vec4<f32>();
        for (var rank = 0u; rank < N_USED; rank++) {
            let pair = token * N_USED + rank;
            sum += bitcast<f32>(chosen[pair].y) * y[pair * (COLS / 4u) + i];
        }
        h[token * (COLS / 4u) + i] += sum;
    }
}
