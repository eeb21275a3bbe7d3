//! The table of kernels, chosen once: which function runs for each operation, and its printable name.

use std::fmt;
use std::ops::Range;

use crate::activation::{QuantizedRow, QuantizedRows, offsets_len, padded_cols, scales_len};
#[cfg(target_arch = "aarch64")]
use crate::arch::aarch64::{
    neon::{self, Neon},
    neon_dotprod::{self, NeonDotprod},
};
use crate::arch::scalar;
#[cfg(target_arch = "x86_64")]
use crate::arch::x86_64::{
    avx_vnni::{self, AvxVnni},
    avx2::{self, Avx2},
    avx512::{self, Avx512},
    avx512_vnni::{self, Avx512Vnni},
};
use crate::isa::{Error, Isa};
use crate::kv::{KV_PART, KvSlice, attention_state_len};
use crate::rows::{Affine4Rows, Bf16Rows, TernaryRows, panels_of};

/// Which kernel serves an operation, printed as `ternary_gemv/avx2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelId {
    /// The operation.
    pub op: Op,
    /// The instruction set its kernel is written for.
    pub isa: Isa,
}

impl fmt::Display for KernelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.op, self.isa)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A kernel and the instruction set it needs.
#[derive(Clone, Copy, Debug)]
struct Kernel<F> {
    isa: Isa,
    run: F,
}

/// Declares the operations once: the enum, the table, and its constructor from an `arch` folder.
macro_rules! kernel_table {
    ($($op:ident $name:ident $path:ident :: $function:ident ($($arg:ty),* $(,)?), $doc:literal;)*) => {
        /// An operation that has kernels.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Op {
            $(#[doc = $doc] $op,)*
        }

        impl Op {
            /// Every operation.
            pub const ALL: [Op; [$(Op::$op),*].len()] = [$(Op::$op),*];

            /// The name in a printed [`KernelId`].
            pub fn name(self) -> &'static str {
                match self {
                    $(Op::$op => stringify!($name),)*
                }
            }
        }

        /// One kernel for each operation. Cheap to copy; make it once and pass it down.
        ///
        /// Every method checks the lengths it is given and panics if they do not fit.
        // Invariant: the instruction set of each entry was shown to be present by its token when the
        // table was made. That is what the calls below rest on.
        #[derive(Clone, Copy, Debug)]
        pub struct Kernels {
            isa: Isa,
            $($name: Kernel<unsafe fn($($arg),*)>,)*
        }

        impl Kernels {
            /// The definitions.
            pub fn scalar() -> Self {
                Self { isa: Isa::Scalar, $($name: Kernel { isa: Isa::Scalar, run: scalar::$path::$function },)* }
            }

            #[cfg(target_arch = "x86_64")]
            fn avx2(_present: Avx2) -> Self {
                Self { isa: Isa::Avx2, $($name: Kernel { isa: Isa::Avx2, run: avx2::$path::$function },)* }
            }

            #[cfg(target_arch = "x86_64")]
            fn avx_vnni(_present: AvxVnni) -> Self {
                let isa = Isa::AvxVnni;
                Self { isa, $($name: Kernel { isa, run: avx_vnni::$path::$function },)* }
            }

            #[cfg(target_arch = "x86_64")]
            fn avx512(_present: Avx512) -> Self {
                let isa = Isa::Avx512;
                Self { isa, $($name: Kernel { isa, run: avx512::$path::$function },)* }
            }

            #[cfg(target_arch = "x86_64")]
            fn avx512_vnni(_present: Avx512Vnni) -> Self {
                let isa = Isa::Avx512Vnni;
                Self { isa, $($name: Kernel { isa, run: avx512_vnni::$path::$function },)* }
            }

            #[cfg(target_arch = "aarch64")]
            fn neon(_present: Neon) -> Self {
                Self { isa: Isa::Neon, $($name: Kernel { isa: Isa::Neon, run: neon::$path::$function },)* }
            }

            #[cfg(target_arch = "aarch64")]
            fn neon_dotprod(_present: NeonDotprod) -> Self {
                let isa = Isa::NeonDotprod;
                Self { isa, $($name: Kernel { isa, run: neon_dotprod::$path::$function },)* }
            }

            /// This table with the kernel of `other` for `op`.
            #[must_use]
            pub fn with(mut self, op: Op, other: &Self) -> Self {
                match op {
                    $(Op::$op => self.$name = other.$name,)*
                }
                self
            }

            /// The kernel that serves `op`.
            pub fn id(&self, op: Op) -> KernelId {
                let isa = match op {
                    $(Op::$op => self.$name.isa,)*
                };
                KernelId { op, isa }
            }
        }
    };
}

kernel_table! {
    TernaryGemv ternary_gemv ternary::gemv(&TernaryRows<'_>, &QuantizedRow<'_>, Range<usize>, &mut [f32]),
        "Ternary rows times int8 activations.";
    TernaryGemm ternary_gemm ternary::gemm(
        &TernaryRows<'_>, &QuantizedRows<'_>, &[u32], Range<usize>, usize, &mut [f32]),
        "Ternary rows times the int8 activations of several tokens.";
    Affine4Gemv affine4_gemv affine4::gemv(&Affine4Rows<'_>, &QuantizedRow<'_>, Range<usize>, &mut [f32]),
        "Affine 4-bit rows times int8 activations.";
    Affine4Gemm affine4_gemm affine4::gemm(
        &Affine4Rows<'_>, &QuantizedRows<'_>, &[u32], Range<usize>, usize, &mut [f32]),
        "Affine 4-bit rows times the int8 activations of several tokens.";
    Affine4Row affine4_row affine4::dequantize_row(&Affine4Rows<'_>, usize, &mut [f32]),
        "One affine 4-bit row as f32.";
    Bf16Gemv bf16_gemv dense::bf16_gemv(&Bf16Rows<'_>, &[f32], Range<usize>, &mut [f32]),
        "bf16 rows times f32 activations.";
    Bf16Gemm bf16_gemm dense::bf16_gemm(&Bf16Rows<'_>, &[f32], Range<usize>, usize, &mut [f32]),
        "bf16 rows times the f32 activations of several tokens.";
    Quantize quantize dense::quantize(&[f32], &mut [i8], &mut [f32], &mut [f32]),
        "f32 activations to int8.";
    RmsNorm rms_norm dense::rms_norm(&[f32], &[f32], f32, &mut [f32]),
        "RMS norm.";
    RmsNormInPlace rms_norm_in_place dense::rms_norm_in_place(&mut [f32], &[f32], f32),
        "RMS norm over its own input.";
    SwigluClamped swiglu_clamped dense::swiglu_clamped(&[f32], &[f32], f32, f32, &mut [f32]),
        "Clamped SwiGLU.";
    Combine combine dense::combine(&[f32], &[u32], &[f32], &mut [f32]),
        "Weighted sum of the experts' outputs.";
    Rope rope dense::rope(&mut [f32], &[f32], &[f32]),
        "Rotary position embedding of one head.";
    Softmax softmax dense::softmax(&mut [f32]),
        "Softmax.";
    TopKRouter top_k_router dense::top_k_router(&mut [f32], bool, &mut [u32], &mut [f32]),
        "Softmax and the best k experts.";
    AttentionPart attention_part dense::attention_part(
        &[f32], &KvSlice<'_>, usize, f32, &mut [f32], &mut [f32]),
        "Query heads of one kv head over some of its keys.";
    AttentionMerge attention_merge dense::attention_merge(&mut [f32], &[f32], usize),
        "The results over two runs of keys as one.";
    AttentionFinish attention_finish dense::attention_finish(&[f32], usize, &mut [f32]),
        "The attention's output.";
}

impl Kernels {
    /// The fastest kernels that this CPU and operating system can run.
    pub fn detect() -> Self {
        let fastest = Isa::ALL.iter().rev().find_map(|&isa| Self::for_isa(isa).ok());
        fastest.unwrap_or_else(Self::scalar)
    }

    /// The kernels of `isa`.
    ///
    /// # Errors
    /// [`Error::IsaUnavailable`] if this machine cannot run them.
    pub fn for_isa(isa: Isa) -> Result<Self, Error> {
        match isa {
            Isa::Scalar => Ok(Self::scalar()),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Avx2::try_new().map(Self::avx2).ok_or(Error::IsaUnavailable { isa }),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => AvxVnni::try_new().map(Self::avx_vnni).ok_or(Error::IsaUnavailable { isa }),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Avx512::try_new().map(Self::avx512).ok_or(Error::IsaUnavailable { isa }),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => {
                Avx512Vnni::try_new().map(Self::avx512_vnni).ok_or(Error::IsaUnavailable { isa })
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => Neon::try_new().map(Self::neon).ok_or(Error::IsaUnavailable { isa }),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod => {
                NeonDotprod::try_new().map(Self::neon_dotprod).ok_or(Error::IsaUnavailable { isa })
            }
            _ => Err(Error::IsaUnavailable { isa }),
        }
    }

    /// The instruction set the table was made for.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// What runs for each operation.
    pub fn ids(&self) -> [KernelId; Op::ALL.len()] {
        Op::ALL.map(|op| self.id(op))
    }

    /// `out[i] = rows[row_range.start + i] . act`, f32 `[row_range.len()]`.
    ///
    /// # Panics
    /// If `row_range` cuts a panel (its end may be the last row), or lengths differ.
    pub fn ternary_gemv(
        &self,
        rows: &TernaryRows<'_>,
        act: &QuantizedRow<'_>,
        row_range: Range<usize>,
        out: &mut [f32],
    ) {
        assert_eq!(rows.padded_cols(), act.q().len(), "ternary columns and activations, padded to 128");
        assert_eq!(out.len(), row_range.len(), "one output a row");
        let panels = panels_of(rows.rows(), &row_range);
        // SAFETY: the table's invariant.
        unsafe { (self.ternary_gemv.run)(rows, act, panels, out) }
    }

    /// `out[t][i] = rows[row_range.start + i] . acts[tokens[t]]`, f32 `[tokens.len(), row_range.len()]`: the same bits as
    /// [`ternary_gemv`](Self::ternary_gemv) of each.
    ///
    /// # Panics
    /// If `row_range` cuts a panel (its end may be the last row), a token is not in `acts`, or lengths differ.
    pub fn ternary_gemm(
        &self,
        rows: &TernaryRows<'_>,
        acts: &QuantizedRows<'_>,
        tokens: &[u32],
        row_range: Range<usize>,
        out: &mut [f32],
    ) {
        assert_eq!(rows.padded_cols(), acts.padded_cols(), "ternary columns and activations, padded to 128");
        let n_rows = row_range.len();
        let panels = gemm_panels(rows.rows(), acts, tokens, &row_range, out);
        if n_rows > 0 {
            // SAFETY: the table's invariant.
            unsafe { (self.ternary_gemm.run)(rows, acts, tokens, panels, n_rows, out) }
        }
    }

    /// `out[i] = rows[row_range.start + i] . act`, f32 `[row_range.len()]`.
    ///
    /// # Panics
    /// If `row_range` cuts a panel (its end may be the last row), or lengths differ.
    pub fn affine4_gemv(
        &self,
        rows: &Affine4Rows<'_>,
        act: &QuantizedRow<'_>,
        row_range: Range<usize>,
        out: &mut [f32],
    ) {
        assert_eq!(padded_cols(rows.cols()), act.q().len(), "4-bit columns and activations, padded to 128");
        assert_eq!(out.len(), row_range.len(), "one output a row");
        let panels = panels_of(rows.rows(), &row_range);
        // SAFETY: the table's invariant.
        unsafe { (self.affine4_gemv.run)(rows, act, panels, out) }
    }

    /// `out[t][i] = rows[row_range.start + i] . acts[tokens[t]]`, f32 `[tokens.len(), row_range.len()]`: the same bits as
    /// [`affine4_gemv`](Self::affine4_gemv) of each.
    ///
    /// # Panics
    /// If `row_range` cuts a panel (its end may be the last row), a token is not in `acts`, or lengths differ.
    pub fn affine4_gemm(
        &self,
        rows: &Affine4Rows<'_>,
        acts: &QuantizedRows<'_>,
        tokens: &[u32],
        row_range: Range<usize>,
        out: &mut [f32],
    ) {
        assert_eq!(
            padded_cols(rows.cols()),
            acts.padded_cols(),
            "4-bit columns and activations, padded to 128"
        );
        let n_rows = row_range.len();
        let panels = gemm_panels(rows.rows(), acts, tokens, &row_range, out);
        if n_rows > 0 {
            // SAFETY: the table's invariant.
            unsafe { (self.affine4_gemm.run)(rows, acts, tokens, panels, n_rows, out) }
        }
    }

    /// Row `row` as f32 `[cols]`: an embedding.
    ///
    /// # Panics
    /// If there is no such row or `out` is not `[cols]`.
    pub fn affine4_row(&self, rows: &Affine4Rows<'_>, row: usize, out: &mut [f32]) {
        assert!(row < rows.rows(), "row {row} of {}", rows.rows());
        assert_eq!(out.len(), rows.cols(), "one output a column");
        // SAFETY: the table's invariant.
        unsafe { (self.affine4_row.run)(rows, row, out) }
    }

    /// `out[i] = rows[row_range.start + i] . x`, `x` f32 `[cols]`, `out` f32 `[row_range.len()]`.
    ///
    /// # Panics
    /// If `row_range` cuts a panel (its end may be the last row), or lengths differ.
    pub fn bf16_gemv(&self, rows: &Bf16Rows<'_>, x: &[f32], row_range: Range<usize>, out: &mut [f32]) {
        assert_eq!(rows.cols(), x.len(), "bf16 columns and activations");
        assert_eq!(out.len(), row_range.len(), "one output a row");
        let panels = panels_of(rows.rows(), &row_range);
        // SAFETY: the table's invariant.
        unsafe { (self.bf16_gemv.run)(rows, x, panels, out) }
    }

    /// `out[t][i] = rows[row_range.start + i] . x[t]`, `x` f32 `[n, cols]`, `out` f32 `[n, row_range.len()]`: the same bits
    /// as [`bf16_gemv`](Self::bf16_gemv) of each.
    ///
    /// # Panics
    /// If `row_range` cuts a panel (its end may be the last row), or lengths differ.
    pub fn bf16_gemm(&self, rows: &Bf16Rows<'_>, x: &[f32], row_range: Range<usize>, out: &mut [f32]) {
        assert!(x.len().is_multiple_of(rows.cols()), "{} activations for {} columns", x.len(), rows.cols());
        let n_rows = row_range.len();
        assert_eq!(out.len(), x.len() / rows.cols() * n_rows, "one output a row and token");
        let panels = panels_of(rows.rows(), &row_range);
        // SAFETY: the table's invariant.
        unsafe { (self.bf16_gemm.run)(rows, x, panels, n_rows, out) }
    }

    /// Quantises `x`, f32 `[cols]`, into the caller's buffers: `q` i8 `[padded_cols(cols)]`, `scales` f32
    /// `[scales_len(cols)]`, `offsets` f32 `[offsets_len(cols)]`.
    ///
    /// Symmetric, max|x| of a lane's 32 inputs to 127, half to even. A lane below 2^-100 becomes zeros; a lane with a
    /// NaN or an infinity gets scale NaN, which every result of it then shows.
    ///
    /// # Panics
    /// If a buffer has another length.
    pub fn quantize<'a>(
        &self,
        x: &[f32],
        q: &'a mut [i8],
        scales: &'a mut [f32],
        offsets: &'a mut [f32],
    ) -> QuantizedRow<'a> {
        assert_eq!(q.len(), padded_cols(x.len()), "int8 buffer for {} activations", x.len());
        assert_eq!(scales.len(), scales_len(x.len()), "scale buffer for {} activations", x.len());
        assert_eq!(offsets.len(), offsets_len(x.len()), "offset buffer for {} activations", x.len());
        // SAFETY: the table's invariant.
        unsafe { (self.quantize.run)(x, q, scales, offsets) }
        QuantizedRow::new(q, scales, offsets)
    }

    /// `out = weight * x / sqrt(mean(x^2) + eps)`, all f32 `[n]`; NaN where the mean overflows.
    ///
    /// # Panics
    /// If lengths differ.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        assert!(x.len() == weight.len() && x.len() == out.len(), "norm lengths differ");
        // SAFETY: the table's invariant.
        unsafe { (self.rms_norm.run)(x, weight, eps, out) }
    }

    /// [`rms_norm`](Self::rms_norm) over its own input, f32 `[n]`.
    ///
    /// # Panics
    /// If lengths differ.
    pub fn rms_norm_in_place(&self, x: &mut [f32], weight: &[f32], eps: f32) {
        assert_eq!(x.len(), weight.len(), "norm lengths differ");
        // SAFETY: the table's invariant.
        unsafe { (self.rms_norm_in_place.run)(x, weight, eps) }
    }

    /// `out = silu(min(gate, gate_max)) * clamp(up, -up_abs_max, up_abs_max)`, all f32 `[n]`.
    ///
    /// # Panics
    /// If lengths differ.
    pub fn swiglu_clamped(&self, gate: &[f32], up: &[f32], gate_max: f32, up_abs_max: f32, out: &mut [f32]) {
        assert!(gate.len() == up.len() && gate.len() == out.len(), "gate, up and output lengths differ");
        // SAFETY: the table's invariant.
        unsafe { (self.swiglu_clamped.run)(gate, up, gate_max, up_abs_max, out) }
    }

    /// `out += Σ weights[i] * y[rows[i]]`, `out` f32 `[cols]`, `y` f32 `[n, cols]`; the sum first, `i` ascending from 0.
    ///
    /// # Panics
    /// If there is no such row, or not a weight for each.
    pub fn combine(&self, y: &[f32], rows: &[u32], weights: &[f32], out: &mut [f32]) {
        assert_eq!(rows.len(), weights.len(), "a weight for each row");
        // SAFETY: the table's invariant.
        unsafe { (self.combine.run)(y, rows, weights, out) }
    }

    /// Rotates one head `x`, f32 `[head_dim]`, in place: pairs `(i, i + n)` by the angle whose cosine and sine
    /// are `cos[i]`, `sin[i]`, f32 `[n]`, `n` half the rotated dimensions. The rest of `x` stays.
    ///
    /// # Panics
    /// If `cos` and `sin` differ in length or `x` is shorter than `2n`.
    pub fn rope(&self, x: &mut [f32], cos: &[f32], sin: &[f32]) {
        assert_eq!(cos.len(), sin.len(), "one sine a cosine");
        assert!(x.len() >= 2 * cos.len(), "{} rotated pairs in {} dimensions", cos.len(), x.len());
        // SAFETY: the table's invariant.
        unsafe { (self.rope.run)(x, cos, sin) }
    }

    /// Softmax of `x`, f32 `[n]`, in place. A NaN, +infinity or nothing above -infinity makes it all NaN.
    pub fn softmax(&self, x: &mut [f32]) {
        // SAFETY: the table's invariant.
        unsafe { (self.softmax.run)(x) }
    }

    /// Turns router `logits`, f32 `[n_experts]`, into probabilities in place and writes the k best, best
    /// first: `experts` u32 `[k]`, `weights` f32 `[k]`, divided by their sum + 1e-20 if `normalize`.
    ///
    /// Equal probabilities: lower index first. NaN ranks last, so an index is always below `n_experts`.
    ///
    /// # Panics
    /// If `experts` and `weights` differ in length or there are fewer logits than that.
    pub fn top_k_router(
        &self,
        logits: &mut [f32],
        normalize: bool,
        experts: &mut [u32],
        weights: &mut [f32],
    ) {
        assert_eq!(experts.len(), weights.len(), "one weight an expert");
        assert!(experts.len() <= logits.len(), "best {} of {} experts", experts.len(), logits.len());
        // SAFETY: the table's invariant.
        unsafe { (self.top_k_router.run)(logits, normalize, experts, weights) }
    }

    /// Query heads `queries`, f32 `[n, head_dim]`, over the keys `first..n_keys` of one part of their kv head:
    /// `weight = exp(scale * query . key - largest)`, then Σ weight * value.
    ///
    /// `state`, f32 [`attention_state_len`], is replaced: `[n, head_dim]` sums, `[n]` largest scores, `[n]` sums of weights.
    /// `weights` is a buffer, f32 `[n, KV_PART]`.
    ///
    /// # Panics
    /// If there are no keys, the slice does not hold them, or lengths differ.
    pub fn attention_part(
        &self,
        queries: &[f32],
        kv: &KvSlice<'_>,
        first: usize,
        scale: f32,
        weights: &mut [f32],
        state: &mut [f32],
    ) {
        kv.check();
        assert!(first < kv.n_keys, "keys {first}..{}", kv.n_keys);
        assert!(queries.len().is_multiple_of(kv.head_dim), "queries are not whole heads of {}", kv.head_dim);
        let n = queries.len() / kv.head_dim;
        assert_eq!(weights.len(), n * KV_PART, "a weight for each query and key of a part");
        assert_eq!(state.len(), attention_state_len(n, kv.head_dim), "state of {n} queries");
        // SAFETY: the table's invariant.
        unsafe { (self.attention_part.run)(queries, kv, first, scale, weights, state) }
    }

    /// Makes of `state` and of `part`, the result over the keys that follow, the result over both.
    ///
    /// # Panics
    /// If the two differ in length.
    pub fn attention_merge(&self, state: &mut [f32], part: &[f32], head_dim: usize) {
        assert!(state.len() == part.len() && state.len().is_multiple_of(head_dim + 2), "states differ");
        // SAFETY: the table's invariant.
        unsafe { (self.attention_merge.run)(state, part, head_dim) }
    }

    /// The output of a state: `out[q] = Σ weight * value / Σ weight`, f32 `[n, head_dim]`.
    ///
    /// # Panics
    /// If `out` is not what `state` is for.
    pub fn attention_finish(&self, state: &[f32], head_dim: usize, out: &mut [f32]) {
        assert!(head_dim > 0 && out.len().is_multiple_of(head_dim), "output of whole heads");
        assert_eq!(state.len(), attention_state_len(out.len() / head_dim, head_dim), "one state a head");
        // SAFETY: the table's invariant.
        unsafe { (self.attention_finish.run)(state, head_dim, out) }
    }
}

/// The panels of a gemm, after the checks that all have in common.
fn gemm_panels(
    rows: usize,
    acts: &QuantizedRows<'_>,
    tokens: &[u32],
    row_range: &Range<usize>,
    out: &[f32],
) -> Range<usize> {
    assert!(tokens.iter().all(|&token| (token as usize) < acts.n_rows()), "tokens of {} rows", acts.n_rows());
    assert_eq!(out.len(), tokens.len() * row_range.len(), "one output a row and token");
    panels_of(rows, row_range)
}
