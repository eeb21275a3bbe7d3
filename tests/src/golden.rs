//! Golden logits: the exact function in float64, from an independent engine.

use safetensors::SafeTensors;
use samara_runtime::{Divergence, divergence};

use crate::{emulated, fixture};

/// One golden sequence.
#[derive(Clone, Debug)]
pub struct Golden {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Exact logits of the last positions, `[n, vocab_size]`.
    pub logits: Vec<Vec<f32>>,
    /// Residual after each layer at the last position, `[n_layers, hidden_size]`.
    pub hidden: Vec<Vec<f32>>,
    /// Argmax at every position.
    pub argmax: Vec<u32>,
}

/// The sequences of `tests/fixtures/golden/{name}.safetensors`; the shortest where the others would take too long.
pub fn golden(name: &str) -> Vec<Golden> {
    let bytes = std::fs::read(fixture(&format!("golden/{name}.safetensors"))).expect("a golden file");
    let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let words = |name: String| -> (Vec<usize>, Vec<[u8; 4]>) {
        let view = tensors.tensor(&name).expect("a golden tensor");
        (view.shape().to_vec(), view.data().as_chunks::<4>().0.to_vec())
    };
    let ids = |name: String| words(name).1.into_iter().map(u32::from_le_bytes).collect::<Vec<_>>();
    let rows = |name: String| -> Vec<Vec<f32>> {
        let (shape, words) = words(name);
        let values: Vec<f32> = words.into_iter().map(f32::from_le_bytes).collect();
        values.chunks_exact(shape[1]).map(<[f32]>::to_vec).collect()
    };
    (0..tensors.names().iter().filter(|name| name.ends_with(".ids")).count())
        .map(|j| Golden {
            ids: ids(format!("{j}.ids")),
            logits: rows(format!("{j}.logits")),
            hidden: rows(format!("{j}.hidden")),
            argmax: ids(format!("{j}.argmax")),
        })
        .filter(|golden| golden.ids.len() <= 18 || !emulated())
        .collect()
}

/// Mean KL, largest absolute difference and share of equal argmaxes over rows of logits.
pub fn compare_rows<'a>(exact: impl IntoIterator<Item = &'a [f32]>, got: &[f32]) -> (f64, f64, f64) {
    let pairs: Vec<Divergence> = {
        let exact: Vec<&[f32]> = exact.into_iter().collect();
        let vocab_size = exact[0].len();
        assert_eq!(exact.len() * vocab_size, got.len(), "as many rows on both sides");
        exact.iter().zip(got.chunks_exact(vocab_size)).map(|(p, q)| divergence(p, q)).collect()
    };
    let n = pairs.len() as f64;
    let kl = pairs.iter().map(|d| d.kl).sum::<f64>() / n;
    let max_abs = pairs.iter().map(|d| d.max_abs).fold(0.0, f64::max);
    let top1 = pairs.iter().filter(|d| d.same_top1).count() as f64 / n;
    (kl, max_abs, top1)
}
