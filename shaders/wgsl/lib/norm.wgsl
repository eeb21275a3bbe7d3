// RMSNorm of a row, then int8. The kernel says where the row is: `fn row_at(i: u32) -> vec4<f32>` returns its columns 4i to 4i + 3
// and `fn norm_at(i: u32) -> vec4<f32>` the norm's weights.

// use quantize

// Added to the mean square.
override EPS: f32 = 0.000001;

// A task's columns, zeros past the end.
fn norm_load(task: u32) -> Sixteen {
    let place = q_place(task);
    return Sixteen(
        norm_column(q_column(place, 0u)),
        norm_column(q_column(place, 1u)),
        norm_column(q_column(place, 2u)),
        norm_column(q_column(place, 3u))
    );
}

fn norm_column(column: u32) -> vec4<f32> {
    var x = vec4(0.0);
    if column < COLS {
        x = row_at(column / 4u);
    }
    return x;
}

// The norm's weights of a task's columns.
fn norm_weights(task: u32) -> Sixteen {
    let place = q_place(task);
    return Sixteen(
        norm_weight(q_column(place, 0u)),
        norm_weight(q_column(place, 1u)),
        norm_weight(q_column(place, 2u)),
        norm_weight(q_column(place, 3u))
    );
}

fn norm_weight(column: u32) -> vec4<f32> {
    var w = vec4(0.0);
    if column < COLS {
        w = norm_at(column / 4u);
    }
    return w;
}

fn norm_square(x: Sixteen) -> f32 {
    return dot(x.a, x.a) + dot(x.b, x.b) + dot(x.c, x.c) + dot(x.d, x.d);
}

// Fills xq and xs with q(norm(row)), and waits for all of it. `x` and `w` are norm_load(local) and norm_weights(local), made as early as can
// be: for most rows they are all there is. NaN, or an overflow of the squares, makes every scale NaN.
fn norm_quantize(x: Sixteen, w: Sixteen, local: u32) {
    var square = norm_square(x);
    for (var first = 256u; first < Q_SPANS * 16u; first += 256u) {
        square += norm_square(norm_load(first + local));
    }
    let mean = number_or_nan(sum256(square, local) / f32(COLS));
    let inverse = 1.0 / sqrt(mean + EPS);
    quantize(norm_times(x, w, inverse), 0u, local, local);
    for (var first = 256u; first < Q_SPANS * 16u; first += 256u) {
        let task = first + local;
        quantize(norm_times(norm_load(task), norm_weights(task), inverse), 0u, task, local);
    }
    workgroupBarrier();
}

fn norm_times(x: Sixteen, w: Sixteen, inverse: f32) -> Sixteen {
    return Sixteen(w.a * (x.a * inverse), w.b * (x.b * inverse), w.c * (x.c * inverse), w.d * (x.d * inverse));
}
