// Norms and rotates q in place, k on its way to the cache, and stores k and v.
//
// Grid: (tokens, ceil((n_heads + 2 * N_KV_HEADS) / 8)). A workgroup takes eight heads of a token, 32 invocations a head.
//
// Bindings: rows; qkv f32 [tokens, (N_HEADS + 2 * N_KV_HEADS) * HEAD_DIM]; qk_norm f32 [2, HEAD_DIM]; rope, (cos, sin) [positions,
// ROPE_DIM / 2]; k, v as in lib/cache.
// Constants: N_HEADS; N_KV_HEADS; HEAD_DIM, even, at most 256; QK_NORM; Q_EPS and K_EPS of the norms; ROPE_DIM, even, 0 for none;
// KV_F32; CAPACITY.

// use bits
// use cache

override N_HEADS: u32 = 16u;
override QK_NORM: bool = true;
override Q_EPS: f32 = 1e-6;
override K_EPS: f32 = 1e-6;
override ROPE_DIM: u32 = 64u;
override HALF: u32 = ROPE_DIM / 2u;

@group(0) @binding(0) var<storage, read> rows: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> qkv: array<f32>;
@group(0) @binding(2) var<storage, read> qk_norm: array<f32>;
@group(0) @binding(3) var<storage, read> rope: array<vec2<f32>>;
@group(0) @binding(4) var<storage, read_write> k: array<u32>;
@group(0) @binding(5) var<storage, read_write> v: array<u32>;

// [head of the workgroup][dimension].
var<workgroup> heads: array<f32, 2048>;
var<workgroup> squares: array<f32, 256>;

// Dimension `d` of a head in workgroup memory, rotated.
fn rotated(at: u32, d: u32, position: u32) -> f32 {
    let x = heads[at + d];
    if d >= ROPE_DIM {
        return x;
    }
    let first = d < HALF;
    let turn = rope[position * HALF + select(d - HALF, d, first)];
    let other = heads[at + select(d - HALF, d + HALF, first)];
    return x * turn.x + select(other, -other, first) * turn.y;
}

@compute @workgroup_size(256)
fn rope_append(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let row = rows[group.x];
    let head = group.y * 8u + local / 32u;
    let lane = local % 32u;
    let is_q = head < N_HEADS;
    let is_k = !is_q && head < N_HEADS + N_KV_HEADS;
    let is_v = !is_q && !is_k && head < N_HEADS + 2u * N_KV_HEADS;
    let source = (group.x * (N_HEADS + 2u * N_KV_HEADS) + head) * HEAD_DIM;
    let at = local / 32u * HEAD_DIM;

    if is_q || is_k || is_v {
        for (var d = lane; d < HEAD_DIM; d += 32u) {
            heads[at + d] = qkv[source + d];
        }
    }
    if QK_NORM {
        // By dimension modulo 32, then a tree.
        var square = 0.0;
        if is_q || is_k {
            for (var d = lane; d < HEAD_DIM; d += 32u) {
                square += heads[at + d] * heads[at + d];
            }
        }
        squares[local] = square;
        workgroupBarrier();
        for (var stride = 16u; stride > 0u; stride >>= 1u) {
            if lane < stride {
                squares[local] += squares[local + stride];
            }
            workgroupBarrier();
        }
        let mean = number_or_nan(squares[local - lane] / f32(HEAD_DIM));
        let inverse = 1.0 / sqrt(mean + select(K_EPS, Q_EPS, is_q));
        if is_q || is_k {
            for (var d = lane; d < HEAD_DIM; d += 32u) {
                heads[at + d] = qk_norm[select(HEAD_DIM, 0u, is_q) + d] * (heads[at + d] * inverse);
            }
        }
    }
    workgroupBarrier();

    let position = row.z;
    if is_q {
        if QK_NORM || ROPE_DIM > 0u {
            for (var d = lane; d < HEAD_DIM; d += 32u) {
                qkv[source + d] = rotated(at, d, position);
            }
        }
    } else if is_k {
        let to = cache_key(row.y, head - N_HEADS, position);
        for (var i = lane; i < ELEMENTS; i += 32u) {
            if KV_F32 {
                k[to + 32u * i] = bitcast<u32>(rotated(at, i, position));
            } else {
                let even = bf16_bits(rotated(at, 2u * i, position));
                k[to + 32u * i] = even | (bf16_bits(rotated(at, 2u * i + 1u, position)) << 16u);
            }
        }
    } else if is_v {
        let to = cache_value(row.y, head - N_HEADS - N_KV_HEADS, position);
        for (var i = lane; i < ELEMENTS; i += 32u) {
            if KV_F32 {
                v[to + i] = bitcast<u32>(heads[at + i]);
            } else {
                v[to + i] = bf16_bits(heads[at + 2u * i]) | (bf16_bits(heads[at + 2u * i + 1u]) << 16u);
            }
        }
    }
}
