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
    /// Share of positions whose argmax is another.
    pub other_argmax: f64,
}

/// The trained model in f32.
pub const TINY_EXACT: Tolerance =
    Tolerance { max_abs: 1e-4, mean_kl: 1e-11, hidden: 1e-5, other_argmax: 0.0 };
/// The random model in f32.
pub const STRESS_EXACT: Tolerance =
    Tolerance { max_abs: 1e-4, mean_kl: 1e-10, hidden: 1e-5, other_argmax: 0.0 };

/// The trained model with int8 activations.
pub const TINY_INT8: Tolerance = Tolerance { max_abs: 0.5, mean_kl: 1e-6, hidden: 0.0, other_argmax: 0.003 };
/// The same with an 8 bit KV cache.
pub const TINY_KV8: Tolerance = Tolerance { max_abs: 1.0, mean_kl: 5e-6, hidden: 0.0, other_argmax: 0.003 };
/// The random model with int8 activations.
pub const STRESS_INT8: Tolerance = Tolerance { max_abs: 5.0, mean_kl: 4e-2, hidden: 0.0, other_argmax: 1.0 };

impl Tolerance {
    /// # Panics
    /// If what `engine` computes of `goldens` is further from them than this allows; prints how far it is.
    pub fn check(&self, what: &str, engine: &mut Engine, goldens: &[Golden]) {
        let Measured { mean_kl, max_abs, same, n } = measure(engine, goldens);
        let found =
            format!("{what}: mean KL {mean_kl:.3e}, max abs {max_abs:.3e}, {same} of {n} argmaxes agree");
        println!("{found}");
        let others = (n - same) as f64;
        assert!(mean_kl <= self.mean_kl && max_abs <= self.max_abs, "{found}");
        assert!(others <= self.other_argmax * n as f64, "{found}");
    }
}

/// What a backend computed, beside the exact function.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Mean KL at the last positions of each sequence, nats.
    pub mean_kl: f64,
    /// Largest difference of two logits there.
    pub max_abs: f64,
    /// Positions whose argmax is the exact one.
    pub same: usize,
    /// All positions.
    pub n: usize,
}

/// Runs all sequences, in steps of the engine's `max_batch`.
pub fn measure(engine: &mut Engine, goldens: &[Golden]) -> Measured {
    let mut all = Measured { mean_kl: 0.0, max_abs: 0.0, same: 0, n: 0 };
    let mut compared = 0;
    for golden in goldens {
        let mut rows = Vec::new();
        samara_runtime::score(engine, &golden.ids, &mut |_, step| rows.extend_from_slice(step))
            .expect("runs");
        let vocab_size = golden.logits[0].len();
        let argmax = rows.chunks_exact(vocab_size).map(|row| samara_runtime::argmax(row) as u32);
        all.same += argmax.zip(&golden.argmax).filter(|(a, b)| a == *b).count();
        all.n += golden.argmax.len();
        let last = &rows[rows.len() - golden.logits.len() * vocab_size..];
        let (kl, max, _) = compare_rows(golden.logits.iter().map(Vec::as_slice), last);
        all.mean_kl += kl * golden.logits.len() as f64;
        all.max_abs = all.max_abs.max(max);
        compared += golden.logits.len();
    }
    all.mean_kl /= compared as f64;
    all
}
