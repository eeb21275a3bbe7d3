// logits = W x for the router (BF16_PANELS) and the step's tokens, all in f32. Before `route` it clears the counts that this adds
// to, and counts the layer.
//
// Grid: (ceil(N_EXPERTS / 64), ceil(tokens / 32)). A workgroup of 128 computes 64 rows times 32 tokens, 4 by 4 an invocation, in steps of 32
// columns. A sum is over 128 columns at a time, ascending, and these sums are added, ascending.
//
// Bindings: rows, of which the first tells the number of tokens; normed f32 [tokens, COLS]; w; logits f32 [tokens, N_EXPERTS]; counts
// u32 [N_EXPERTS]; status, whose word 1 is the number of layers so far.
// Constants: COLS, a multiple of 2; N_EXPERTS.

// use bits

override COLS: u32 = 2048u;
override N_EXPERTS: u32 = 256u;
override CHUNKS: u32 = (COLS + 15u) / 16u;
override N_PANELS: u32 = (N_EXPERTS + 3u) / 4u;

@group(0) @binding(0) var<storage, read> rows: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> normed: array<f32>;
@group(0) @binding(2) var<storage, read> w: array<u32>;
@group(0) @binding(3) var<storage, read_write> logits: array<f32>;
@group(0) @binding(4) var<storage, read_write> counts: array<u32>;
@group(0) @binding(5) var<storage, read_write> status: array<u32>;

const PANEL_STRIDE: u32 = 17u;
const TOKEN_STRIDE: u32 = 9u;

// [column of the step][panel]: 4 rows.
var<workgroup> step_w: array<vec4<f32>, 544>;
// [column][four of the tokens].
var<workgroup> step_x: array<vec4<f32>, 288>;

fn value(token: u32, n_tokens: u32, column: u32) -> f32 {
    if token < n_tokens && column < COLS {
        return normed[token * COLS + column];
    }
    return 0.0;
}

// Columns `column` and the next, of step `step`: 4 rows of the tile's panel `panel` to workgroup memory.
fn load_w(panel: u32, local_panel: u32, step: u32, pair: u32) {
    let chunk = 2u * step + pair / 8u;
    var words = vec4<u32>();
    if panel < N_PANELS && chunk < CHUNKS {
        let at = (panel * CHUNKS + chunk) * 32u + pair % 8u;
        words = vec4<u32>(w[at], w[at + 8u], w[at + 16u], w[at + 24u]);
    }
    step_w[2u * pair * PANEL_STRIDE + local_panel] = bitcast<vec4<f32>>(words << vec4<u32>(16u));
    step_w[(2u * pair + 1u) * PANEL_STRIDE + local_panel] = bitcast<vec4<f32>>(words & vec4<u32>(0xffff0000u));
}

fn put(token: u32, n_tokens: u32, row: u32, sums: vec4<f32>) {
    if token < n_tokens {
        for (var i = 0u; i < 4u; i++) {
            if row + i < N_EXPERTS {
                logits[token * N_EXPERTS + row + i] = sums[i];
            }
        }
    }
}

@compute @workgroup_size(128)
fn router_gemm(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    if group.x == 0u && group.y == 0u {
        for (var i = local; i < N_EXPERTS; i += 128u) {
            counts[i] = 0u;
        }
        if local == 0u {
            status[1] += 1u;
        }
    }
    let n_tokens = rows[0].w;
    let first_token = group.y * 32u;
    let first_panel = group.x * 16u;
    let panel = local % 16u;
    let four = local / 16u;
    var s0 = vec4<f32>();
    var s1 = vec4<f32>();
    var s2 = vec4<f32>();
    var s3 = vec4<f32>();
    for (var part = 0u; part < COLS; part += 128u) {
        var p0 = vec4<f32>();
        var p1 = vec4<f32>();
        var p2 = vec4<f32>();
        var p3 = vec4<f32>();
        for (var step = part / 32u; step < part / 32u + 4u; step++) {
            workgroupBarrier();
            for (var k = 0u; k < 2u; k++) {
                load_w(first_panel + local / 8u, local / 8u, step, local % 8u + 8u * k);
                let column = local % 32u;
                let t = local / 32u + 4u * k;
                let token = first_token + 4u * t;
                step_x[column * TOKEN_STRIDE + t] = vec4<f32>(
                    value(token, n_tokens, 32u * step + column),
                    value(token + 1u, n_tokens, 32u * step + column),
                    value(token + 2u, n_tokens, 32u * step + column),
                    value(token + 3u, n_tokens, 32u * step + column),
                );
            }
            workgroupBarrier();
            for (var column = 0u; column < 32u; column++) {
                let row = step_w[column * PANEL_STRIDE + panel];
                let x = step_x[column * TOKEN_STRIDE + four];
                p0 += row * x.x;
                p1 += row * x.y;
                p2 += row * x.z;
                p3 += row * x.w;
            }
        }
        s0 += p0;
        s1 += p1;
        s2 += p2;
        s3 += p3;
    }
    let token = first_token + 4u * four;
    let row = 4u * (first_panel + panel);
    put(token, n_tokens, row, s0);
    put(token + 1u, n_tokens, row, s1);
    put(token + 2u, n_tokens, row, s2);
    put(token + 3u, n_tokens, row, s3);
}
