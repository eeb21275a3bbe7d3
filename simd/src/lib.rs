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
//! * Activations are int8 with one f32 scale for 16 inputs ([`QuantizedRow`]). The 16 inputs of a scale
//!   are not neighbours: in a block of 128 columns, lane `l` (0..8) owns columns `32j + 4l + t` for `j`
//!   and `t` in 0..4. In the file's ternary layout those are the four bytes `4l..4l+4` of a row's 32 byte
//!   chunk, all four planes: one `u32` of codes, one i32 lane of an integer dot-product instruction,
//!   one scale. 128 codes therefore end in a single vector convert, multiply and add, which made the AVX2
//!   kernel 1.2 to 1.4 times faster than a scale for 32 neighbours (`benches/ternary_layout.rs`).
//! * Ternary: for block `b` ascending, `lane[l] += s[b][l] * f32(Σ code * q)`, multiply and add rounded
//!   separately. Then the eight lanes are added as a fixed tree,
//!   `((0+4) + (2+6)) + ((1+5) + (3+7))`, the row-independent correction `Σ s * Σ q` is taken away (codes
//!   are sign + 1), and the difference is multiplied by the row's scale.
//! * Affine 4-bit: the same lanes over chunks of 64 columns, `lane[l] += scale[g] * (s[b][l] * f32(Σ nibble * q))`,
//!   the same tree, plus `Σ bias[g] * offset[g]`, where the offsets belong to the activations.
//! * f32 sums (dot, squares, softmax): element `i` goes to lane `i % 8`, then the same tree. Exponentials
//!   are computed here, not by the platform's libm, so they agree between machines.
//!
//! # Dispatch
//!
//! [`Kernels::detect`] looks at the CPU and the operating system once and returns a table of kernels;
//! [`Kernels::for_isa`] forces one. What was chosen is data: [`Kernels::ids`].

mod activation;
mod arch;
mod isa;
mod kernels;
mod rows;

pub use activation::{ACT_BLOCK, ACT_GROUP, ACT_HALF, QuantizedRow, padded_cols};
#[cfg(target_arch = "x86_64")]
pub use arch::x86_64::avx2::Avx2;
pub use isa::{Error, Isa};
pub use kernels::{KernelId, Kernels, KvSlice, Op};
pub use rows::{Affine4Rows, Bf16Rows, PANEL_ROWS, TernaryRows};
