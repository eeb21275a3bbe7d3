//! Loops written once. Each instruction set compiles them in a shell of its own (`dense.rs`), where the
//! compiler may use wider registers; Rust never fuses or reorders f32 operations, so the bits agree. What is fused, of attention,
//! is so where that changes no bit.

pub(crate) mod attention;
pub(crate) mod attention_q8;
pub(crate) mod bf16;
pub(crate) mod elementwise;
pub(crate) mod exp;
pub(crate) mod quantize;
pub(crate) mod router;
pub(crate) mod softmax;

use crate::activation::LANES;

/// Adds eight lanes in the one order every kernel uses.
#[inline(always)]
pub(crate) fn tree(lanes: [f32; LANES]) -> f32 {
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// Σ a[i] * b[i]: element `i` in lane `i % 8`, then the tree. Slices of equal length.
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a8, a_tail) = a.as_chunks::<LANES>();
    let (b8, b_tail) = b.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for (a, b) in a8.iter().zip(b8) {
        for l in 0..LANES {
            lanes[l] += a[l] * b[l];
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_tail.iter().zip(b_tail)) {
        *lane += a * b;
    }
    tree(lanes)
}

/// Asks for the cache line that is `bytes` after `value`, in the second cache: what is asked for in the first one waits for the few
/// buffers that loads need (`benches/kernels.rs`: 4-bit rows at 17 instead of 22 GiB/s). It may lie past the end of what `value` is
/// in: a prefetch is a hint and does not fault.
#[inline(always)]
pub(crate) fn prefetch<T>(value: *const T, bytes: usize) {
    let line = value.cast::<i8>().wrapping_add(bytes);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64, and a prefetch does not fault.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(line);
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch does not fault and changes no register or memory.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = line;
}

/// Writes one thin function that calls a generic loop, with the attributes of an instruction set.
macro_rules! dense_shell {
    ([$(#[$attribute:meta])*] $path:path as $name:ident($($arg:ident: $ty:ty),* $(,)?)) => {
        $(#[$attribute])*
        pub(crate) fn $name($($arg: $ty),*) {
            $path($($arg),*)
        }
    };
}

/// [`dense_shell`] for each operation of a table.
macro_rules! dense_shells {
    ($attributes:tt $($path:path as fn $name:ident $args:tt;)*) => {
        $($crate::arch::generic::dense_shell!($attributes $path as $name $args);)*
    };
}

/// The table of dense operations: `dense_table!(#[attributes])` in each instruction set's `dense.rs`, which has a `FUSED`: whether one
/// instruction multiplies and adds; beside it is `lines.rs`.
macro_rules! dense_table {
    ($($attribute:tt)*) => {
        $crate::arch::generic::dense_shells! {
            [$($attribute)*]
            $crate::arch::generic::quantize::quantize as fn quantize(
                x: &[f32], q: &mut [i8], scales: &mut [f32], offsets: &mut [f32]);
            $crate::arch::generic::bf16::gemv as fn bf16_gemv(
                rows: &$crate::Bf16Rows<'_>, x: &[f32], panels: std::ops::Range<usize>, out: &mut [f32]);
            $crate::arch::generic::bf16::gemm as fn bf16_gemm(
                rows: &$crate::Bf16Rows<'_>, x: &[f32], panels: std::ops::Range<usize>, n_rows: usize,
                out: &mut [f32]);
            $crate::arch::generic::elementwise::rms_norm as fn rms_norm(
                x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]);
            $crate::arch::generic::elementwise::rms_norm_in_place as fn rms_norm_in_place(
                x: &mut [f32], weight: &[f32], eps: f32);
            $crate::arch::generic::elementwise::swiglu_clamped as fn swiglu_clamped(
                gate: &[f32], up: &[f32], gate_max: f32, up_abs_max: f32, out: &mut [f32]);
            $crate::arch::generic::elementwise::combine as fn combine(
                y: &[f32], rows: &[u32], weights: &[f32], out: &mut [f32]);
            $crate::arch::generic::elementwise::rope as fn rope(x: &mut [f32], cos: &[f32], sin: &[f32]);
            $crate::arch::generic::softmax::softmax as fn softmax(x: &mut [f32]);
            $crate::arch::generic::router::top_k_router as fn top_k_router(
                logits: &mut [f32], normalize: bool, experts: &mut [u32], weights: &mut [f32]);
            $crate::arch::generic::attention::attention_merge as fn attention_merge(
                state: &mut [f32], part: &[f32], head_dim: usize);
            $crate::arch::generic::attention::attention_finish as fn attention_finish(
                state: &[f32], head_dim: usize, out: &mut [f32]);
        }

        $crate::arch::generic::attention_shell!($($attribute)*);
    };
}

/// The attention of a `dense.rs`, with its `FUSED` and the `lines.rs` beside it.
macro_rules! attention_shell {
    ($($attribute:tt)*) => {
        $($attribute)*
        pub(crate) fn attention_part(
            queries: &[f32],
            kv: &$crate::KvSlice<'_>,
            first: usize,
            scale: f32,
            weights: &mut [f32],
            state: &mut [f32],
        ) {
            $crate::arch::generic::attention::attention_part::<FUSED>(
                queries, kv, first, scale, weights, state,
                |lines, coefficients, first, sums| super::lines::dot_lines(lines, coefficients, first, sums),
            );
        }
    };
}

pub(crate) use {attention_shell, dense_shell, dense_shells, dense_table};
