//! CPU kernels for ternary, 4-bit and bf16 rows, and the f32 operations around them.
//!
//! A kernel here knows rows and activations. It never reads a file, allocates, starts a thread or
//! prints: the caller owns every buffer and splits the rows over its threads.
//!
//! # The scalar kernels are the definition
//!
//! [`Isa::Scalar`] says what each operation means, down to the order of every f32 addition, and each
//! other instruction set must return the same bits. That is possible because the expensive part, the
//! products of codes and activations, is integer and exact, and the f32 part that follows has one
//! written order:
//!
//! * Activations are int8 with one f32 scale for 32 inputs ([`QuantizedRow`]). The inputs of a scale are not
//!   neighbours: in a block of 128 columns, lane `l` (0..8) owns columns `32j + 4l + t` for `j` and `t` in 0..4, and
//!   two blocks, a span, share their eight scales. In the file's ternary layout those are the four bytes `4l..4l+4` of a
//!   row's 32 byte chunk, all four planes: one `u32` of codes, one i32 lane of an integer dot-product instruction, one
//!   scale. 256 codes therefore end in a single vector convert, multiply and add.
//! * Ternary: for span `b` ascending, `lane[l] += s[b][l] * f32(Σ code * q)`, multiply and add rounded
//!   separately. Then the eight lanes are added as a fixed tree,
//!   `((0+4) + (2+6)) + ((1+5) + (3+7))`, the row-independent correction `Σ s * Σ q` is taken away (codes
//!   are sign + 1), and the difference is multiplied by the row's scale.
//! * Affine 4-bit: the same lanes; in a span, for groups `g` of 64 columns ascending from 0,
//!   `span[l] += scale[g] * f32(Σ nibble * q)`, then `lane[l] += s[b][l] * span[l]`, the same tree, plus
//!   `Σ bias[g] * offset[g]`, where the offsets belong to the activations.
//! * f32 sums (dot, squares, softmax): element `i` goes to lane `i % 8`, then the same tree; bf16 rows have 16 lanes,
//!   of which lanes `l` and `l + 8` are added first. Exponentials
//!   are computed here, not by the platform's libm, so they agree between machines.
//! * Attention: scores and sums of values have no lanes, one element after the other; the keys are
//!   taken in parts of [`KV_PART`] positions, merged in order as running softmaxes. Beside bf16 elements queries and weights
//!   are rounded to 16 bits, so that products are exact and may be fused with the sum. Beside int8 they are integers of 16 bits below
//!   a head's largest, and sums are i32.
//! * Several tokens at once (gemm) give the bits of one at a time.
//!
//! # Dispatch
//!
//! [`Kernels::detect`] looks at the CPU and the operating system once and returns a table of kernels;
//! [`Kernels::for_isa`] forces one. What was chosen is data: [`Kernels::ids`].

mod activation;
mod arch;
mod isa;
mod kernels;
mod kv;
mod read;
mod rows;

pub use activation::{
    ACT_BLOCK, ACT_HALF, ACT_SPAN, QuantizedRow, QuantizedRows, offsets_len, padded_cols, scales_len,
};
pub use isa::{Error, Isa};
pub use kernels::{KernelId, Kernels, Op};
pub use kv::{
    KV_BLOCK, KV_DIMS, KV_LEAST, KV_PART, Kv, KvSlice, Q8_DIMS, Q8_MAX_DIM, attention_state_len, put_q8_key,
    put_q8_value, q8_dims, q8_key_at, q8_value_at, value_at,
};
pub use read::read;
pub use rows::{Affine4Rows, Bf16Rows, PANEL_ROWS, TernaryRows};
