//! The table of kernels, chosen once: which function runs for each operation, and its printable name.

use std::fmt;
use std::ops::Range;

use crate::activation::{ACT_GROUP, ACT_HALF, QuantizedRow, padded_cols};
use crate::arch::scalar;
#[cfg(target_arch = "x86_64")]
use crate::arch::x86_64::avx2::{self, Avx2};
use crate::isa::{Error, Isa};
use crate::rows::{Affine4Rows, Bf16Rows, TernaryRows, panels_of};

/// Keys and values of one kv head at consecutive positions, f32 `[n, head_dim]` each.
#[derive(Clone, Copy, Debug)]
pub struct KvSlice<'a> {
    /// Keys, f32 `[n, head_dim]`.
    pub keys: &'a [f32],
    /// Values, f32 `[n, head_dim]`.
    pub values: &'a [f32],
}

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
    Affine4Gemv affine4_gemv affine4::gemv(&Affine4Rows<'_>, &QuantizedRow<'_>, Range<usize>, &mut [f32]),
        "Affine 4-bit rows times int8 activations.";
    Affine4Row affine4_row affine4::dequantize_row(&Affine4Rows<'_>, usize, &mut [f32]),
        "One affine 4-bit row as f32.";
    Bf16Gemv bf16_gemv dense::bf16_gemv(&Bf16Rows<'_>, &[f32], Range<usize>, &mut [f32]),
        "bf16 rows times f32 activations.";
    Quantize quantize dense::quantize(&[f32], &mut [i8], &mut [f32], &mut [f32]),
        "f32 activations to int8.";
    RmsNorm rms_norm dense::rms_norm(&[f32], &[f32], f32, &mut [f32]),
        "RMS norm.";
    RmsNormInPlace rms_norm_in_place dense::rms_norm_in_place(&mut [f32], &[f32], f32),
        "RMS norm over its own input.";
    SwigluClamped swiglu_clamped dense::swiglu_clamped(&[f32], &[f32], f32, f32, &mut [f32]),
        "Clamped SwiGLU.";
    Rope rope dense::rope(&mut [f32], &[f32], &[f32]),
        "Rotary position embedding of one head.";
    Softmax softmax dense::softmax(&mut [f32]),
        "Softmax.";
    TopKRouter top_k_router dense::top_k_router(&mut [f32], bool, &mut [u32], &mut [f32]),
        "Softmax and the best k experts.";
    Attention attention dense::attention(&[f32], &[KvSlice<'_>], f32, &mut [f32], &mut [f32]),
        "Attention of one query head.";
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
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 => Err(Error::IsaUnavailable { isa }),
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
        let panels = panels_of(rows.rows(), &row_range, out);
        // SAFETY: the table's invariant.
        unsafe { (self.ternary_gemv.run)(rows, act, panels, out) }
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
        let panels = panels_of(rows.rows(), &row_range, out);
        // SAFETY: the table's invariant.
        unsafe { (self.affine4_gemv.run)(rows, act, panels, out) }
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
        let panels = panels_of(rows.rows(), &row_range, out);
        // SAFETY: the table's invariant.
        unsafe { (self.bf16_gemv.run)(rows, x, panels, out) }
    }

    /// Quantises `x`, f32 `[cols]`, into the caller's buffers: `q` i8 `[padded_cols(cols)]`, `scales` f32
    /// `[padded / 16]`, `offsets` f32 `[padded / 64]`.
    ///
    /// Symmetric, max|x| of 16 inputs to 127, half to even. A group below 2^-100 becomes zeros; a group with a
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
        let padded = padded_cols(x.len());
        assert_eq!(q.len(), padded, "int8 buffer for {} activations", x.len());
        assert_eq!(scales.len(), padded / ACT_GROUP, "scale buffer for {} activations", x.len());
        assert_eq!(offsets.len(), padded / ACT_HALF, "offset buffer for {} activations", x.len());
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

    /// Attention of one query head, f32 `[head_dim]`, over `segments` of its kv head in order of position
    /// (a ring has two): `out = Σ softmax(scale * query . key) * value`, f32 `[head_dim]`.
    ///
    /// `scores`, f32 `[n_keys]`, is left holding the probabilities.
    ///
    /// # Panics
    /// If a segment is not whole keys and as many values, `scores` is not one f32 a key, `out` is not
    /// `[head_dim]`, or there is no dimension.
    pub fn attention(
        &self,
        query: &[f32],
        segments: &[KvSlice<'_>],
        scale: f32,
        scores: &mut [f32],
        out: &mut [f32],
    ) {
        let head_dim = query.len();
        assert!(head_dim > 0 && out.len() == head_dim, "query of {head_dim}, output of {}", out.len());
        let mut n_keys = 0;
        for segment in segments {
            assert!(segment.keys.len().is_multiple_of(head_dim), "keys are not whole heads of {head_dim}");
            assert_eq!(segment.keys.len(), segment.values.len(), "one value a key");
            n_keys += segment.keys.len() / head_dim;
        }
        assert_eq!(scores.len(), n_keys, "one score a key");
        // SAFETY: the table's invariant.
        unsafe { (self.attention.run)(query, segments, scale, scores, out) }
    }
}
