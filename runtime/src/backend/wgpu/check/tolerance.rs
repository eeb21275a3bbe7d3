//! How far a GPU may be from the CPU: one table, for the check at start-up and for the tests.
//!
//! A difference is of f32 results from the same inputs, computed in f64 on the CPU, and is divided by the largest result
//! in magnitude unless said otherwise. What is integer or an index must be equal; a check that finds it is not returns infinity.

/// Kernel, the largest difference allowed.
const TOLERANCES: &[(&str, f64)] = &[
    // A squared sum of some thousand terms, a root and a division (2.5 units in the last place each in Vulkan).
    ("norm_quantize", 3e-6),
    // Beyond half a step of the int8 scale, and of the scale itself.
    ("quantize_rows", 3e-6),
    // f32 sums of exact integers times scales, 8 for each 256 columns.
    ("ternary_gemm", 2e-6),
    // The same, then an exponential.
    ("experts_in_gemm", 1e-5),
    ("experts_out_gemm", 2e-6),
    ("combine", 1e-6),
    // f32 sums over all columns, 128 at a time.
    ("router_gemm", 5e-6),
    // Weights, that are below 1.
    ("route", 1e-5),
    ("sort_pairs", 0.0),
    // A norm and a rotation of q; k and v beyond half a unit of bf16.
    ("rope_append", 5e-6),
    // Exponentials of differences of scores some tens apart.
    ("attention_prefill", 2e-5),
    // Beyond steps of the int8 scale that may go either way: a norm's root and divisions, then as in ternary_gemm.
    ("norm_gemv", 3e-6),
    // As ternary_gemm.
    ("gemv_add", 2e-6),
    // As norm_quantize and router_gemm; scales of the row by their own size, its int8 beyond steps that may go either way.
    ("norm_router", 5e-6),
    // Exponentials of differences of scores some tens apart.
    ("attention", 2e-5),
    // Scales of the row by their own size, its int8 beyond steps that may go either way: sums of some ten parts, and a division.
    ("attention_merge", 3e-6),
    // As gemv_add, then an exponential.
    ("experts_in", 1e-5),
    ("experts_out", 3e-6),
    // One multiplication and one addition.
    ("embed", 2e-7),
    // As norm_gemv, with two more sums for the bias.
    ("head", 3e-6),
    ("centroids", 3e-6),
    ("select_token", 0.0),
];

/// The largest difference allowed to a kernel.
///
/// # Panics
/// If the kernel is not in the table: an oversight.
pub(super) fn tolerance(kernel: &str) -> f64 {
    let found = TOLERANCES.iter().find(|(name, _)| *name == kernel);
    found.unwrap_or_else(|| panic!("kernel {kernel} has no tolerance")).1
}
