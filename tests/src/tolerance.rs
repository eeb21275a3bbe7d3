//! How far a backend is from the exact function, and how far it may be.

use samara_runtime::Engine;

use crate::{Golden, compare_rows};

/// What a backend may differ from the exact logits by. Reference: f32 rounding only. CPU: int8
/// activations, one scale for 32 inputs. Its largest difference is at tokens the model finds hopeless,
/// whose logits are tens below the best, so the KL is the bound that means something. The stress model is random:
/// its routers are near ties, so rounding changes experts, and its bound only tells the same function from another.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Largest difference of two logits.
    pub max_abs: f64,
    /// Mean KL, nats.
    pub mean_kl: f64,
    /// Relative difference of a residual; 0 where it is not looked at.
    pub hidden: f32,
}

/// The trained model in f32.
pub const TINY_EXACT: Tolerance = Tolerance { max_abs: 1e-4, mean_kl: 1e-11, hidden: 1e-5 };
/// The random model in f32.
pub const STRESS_EXACT: Tolerance = Tolerance { max_abs: 1e-4, mean_kl: 1e-10, hidden: 1e-5 };

/// The trained model with int8 activations.
pub const TINY_INT8: Tolerance = Tolerance { max_abs: 0.5, mean_kl: 1e-6, hidden: 0.0 };
/// The same with an 8 bit KV cache.
pub const TINY_KV8: Tolerance = Tolerance { max_abs: 1.0, mean_kl: 5e-6, hidden: 0.0 };
/// The random model with int8 activations.
pub const STRESS_INT8: Tolerance = Tolerance { max_abs: 5.0, mean_kl: 4e-2, hidden: 0.0 };

/// Logits of every position of a sequence, run in steps of `max_batch`.
fn all_logits(engine: &mut Engine, ids: &[u32]) -> Vec<f32> {
    let mut rows = Vec::new();
    samara_runtime::score(engine, ids, &mut |_, step| rows.extend_from_slice(step)).expect("runs");
    rows
}

/// Mean KL over all compared rows of all sequences, and the largest difference of two logits.
pub fn measure(engine: &mut Engine, goldens: &[Golden]) -> (f64, f64) {
    let (mut kl, mut max_abs, mut n) = (0.0, 0.0f64, 0);
    for golden in goldens {
        let rows = all_logits(engine, &golden.ids);
        let vocab_size = golden.logits[0].len();
        let last = &rows[rows.len() - golden.logits.len() * vocab_size..];
        let (mean, max, _) = compare_rows(golden.logits.iter().map(Vec::as_slice), last);
        kl += mean * golden.logits.len() as f64;
        max_abs = max_abs.max(max);
        n += golden.logits.len();
    }
    (kl / f64::from(u32::try_from(n).expect("few rows")), max_abs)
}

/// Positions whose argmax is the exact one, and all of them.
pub fn agreeing(engine: &mut Engine, goldens: &[Golden]) -> (usize, usize) {
    let (mut same, mut n) = (0, 0);
    for golden in goldens {
        let rows = all_logits(engine, &golden.ids);
        let got = rows.chunks_exact(golden.logits[0].len()).map(|row| samara_runtime::argmax(row) as u32);
        same += got.zip(&golden.argmax).filter(|(a, b)| a == *b).count();
        n += golden.argmax.len();
    }
    (same, n)
}
