// A row of int8 activations that the kernel before has quantised (lib/quantize says how), fetched into workgroup memory.
//
// In memory a row is, in vec4<u32>: the words of planes 0 to 3 by [block][w]; then the bits of its scales by [span][w], four to a vector.

// use quantize

// Vectors of a row.
override Q_ROW: u32 = COL_BLOCKS * 8u + Q_SPANS * 2u;

// Fills xq and xs with Q_ROWS rows; `fn fetch_at(i: u32) -> vec4<u32>` is the kernel's. A barrier must come before they are read.
fn fetch(local: u32) {
    for (var base = 0u; base < Q_WORDS; base += 256u) {
        let i = base + local;
        if i < Q_WORDS {
            xq[i] = fetch_at(i / (COL_BLOCKS * 8u) * Q_ROW + i % (COL_BLOCKS * 8u));
        }
    }
    for (var base = 0u; base < Q_SCALES; base += 1024u) {
        let i = base + 4u * local;
        if i < Q_SCALES {
            let scales = bitcast<vec4<f32>>(fetch_at(i / (Q_SPANS * 8u) * Q_ROW + COL_BLOCKS * 8u + i % (Q_SPANS * 8u) / 4u));
            xs[i] = scales.x;
            xs[i + 1u] = scales.y;
            xs[i + 2u] = scales.z;
            xs[i + 3u] = scales.w;
        }
    }
}
