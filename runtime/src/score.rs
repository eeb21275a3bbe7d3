//! Log-likelihood of a text, and distance between two sets of logits: what `samara ppl` reports.

use crate::{
    backend::{Logits, Sequence, Step},
    engine::Engine,
    error::Error,
};

/// Runs `tokens` through slot 0 and hands each step's logits to `on_rows(first_position, rows)`, rows
/// `[n, vocab_size]`. Tokens beyond the context start again at position 0.
///
/// # Errors
/// What [`Engine::forward`] reports; [`Error::NonFiniteLogits`] for logits that are NaN or +infinity.
pub fn score(
    engine: &mut Engine,
    tokens: &[u32],
    on_rows: &mut dyn FnMut(usize, &[f32]),
) -> Result<(), Error> {
    let limits = engine.limits();
    let batch = limits.max_batch.min(limits.max_logit_rows);
    for (window, tokens) in tokens.chunks(limits.context).enumerate() {
        engine.rewind(0, 0);
        for (step, chunk) in tokens.chunks(batch).enumerate() {
            let position = step * batch;
            let sequence = Sequence { slot: 0, position, tokens: chunk, logits: Logits::All };
            let rows = engine.forward(&Step { sequences: &[sequence] })?;
            let first = window * limits.context + position;
            if let Some(at) = rows.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY) {
                return Err(Error::NonFiniteLogits { position: first + at / (rows.len() / chunk.len()) });
            }
            on_rows(first, rows);
        }
    }
    Ok(())
}

/// Runs `tokens` through slot 0, one a step, and hands each token's logits to `on_row(position, exact, head)`: of the exact head,
/// and of the engine's own, `[vocab_size]` each, of which the `top` largest matter. Tokens beyond the context start again at
/// position 0.
///
/// # Errors
/// As [`score`].
pub fn score_head(
    engine: &mut Engine,
    tokens: &[u32],
    top: usize,
    mut on_row: impl FnMut(usize, &[f32], &[f32]),
) -> Result<(), Error> {
    let context = engine.limits().context;
    let mut exact = Vec::new();
    for (window, tokens) in tokens.chunks(context).enumerate() {
        engine.rewind(0, 0);
        for (position, token) in tokens.iter().enumerate() {
            let tokens = std::slice::from_ref(token);
            let sequence = Sequence { slot: 0, position, tokens, logits: Logits::Last };
            engine.forward(&Step { sequences: &[sequence] })?.clone_into(&mut exact);
            let at = window * context + position;
            if exact.iter().any(|logit| logit.is_nan() || *logit == f32::INFINITY) {
                return Err(Error::NonFiniteLogits { position: at });
            }
            on_row(at, &exact, engine.logits_again(Some(top))?);
        }
    }
    Ok(())
}

/// How a head that leaves rows out agrees with the exact one: sums over positions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HeadAgreement {
    /// Positions.
    pub positions: usize,
    /// Those with the same likeliest token.
    pub same_argmax: usize,
    /// Of the [`TOP`](Self::TOP) likeliest tokens by the exact head, how many are among as many by the other.
    pub in_top: usize,
    /// Probability, by the exact head, of tokens left out.
    pub mass_outside: f64,
    /// KL(head || exact), nats. The other way around a token left out makes it infinite.
    pub kl: f64,
}

impl HeadAgreement {
    /// Tokens that `in_top` looks at for each position.
    pub const TOP: usize = 20;

    /// Adds a position. In `head` tokens left out are -infinity.
    pub fn add(&mut self, exact: &[f32], head: &[f32]) {
        let (p_sum, q_sum) = (log_sum_exp(exact), log_sum_exp(head));
        for (&p, &q) in exact.iter().zip(head) {
            let log_p = f64::from(p) - p_sum;
            if q == f32::NEG_INFINITY {
                self.mass_outside += log_p.exp();
            } else {
                let log_q = f64::from(q) - q_sum;
                self.kl += log_q.exp() * (log_q - log_p);
            }
        }
        let (of_exact, of_head) = (likeliest(exact, Self::TOP), likeliest(head, Self::TOP));
        self.positions += 1;
        self.same_argmax += usize::from(argmax(exact) == argmax(head));
        self.in_top += of_exact.iter().filter(|id| of_head.contains(id)).count();
    }
}

/// The ids of the `n` largest logits; of equal ones the lower ids.
fn likeliest(logits: &[f32], n: usize) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    if n < ids.len() {
        ids.select_nth_unstable_by(n, |a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    }
    ids.truncate(n);
    ids
}

/// `ln softmax(logits)[token]`, in f64.
pub fn log_prob(logits: &[f32], token: u32) -> f64 {
    f64::from(logits[token as usize]) - log_sum_exp(logits)
}

/// How far `q` is from the exact logits `p` at one position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Divergence {
    /// KL(softmax(p) || softmax(q)), nats.
    pub kl: f64,
    /// Largest difference of two logits.
    pub max_abs: f64,
    /// Both have the same argmax.
    pub same_top1: bool,
}

/// Compares two rows of logits of equal length. A logit of -infinity is a token left out: where both rows
/// leave it out it adds nothing, where only `q` does the divergence is infinite. A NaN anywhere makes both numbers NaN and the argmaxes differ.
pub fn divergence(p: &[f32], q: &[f32]) -> Divergence {
    assert_eq!(p.len(), q.len(), "rows of one vocabulary");
    if p.iter().chain(q).any(|logit| logit.is_nan()) {
        return Divergence { kl: f64::NAN, max_abs: f64::NAN, same_top1: false };
    }
    let (p_sum, q_sum) = (log_sum_exp(p), log_sum_exp(q));
    let mut kl = 0.0;
    let mut max_abs = 0.0f64;
    for (&p, &q) in p.iter().zip(q) {
        let (p, q) = (f64::from(p), f64::from(q));
        if p == f64::NEG_INFINITY {
            max_abs = if q == p { max_abs } else { f64::INFINITY };
            continue;
        }
        max_abs = max_abs.max((p - q).abs());
        let log_p = p - p_sum;
        kl += log_p.exp() * (log_p - (q - q_sum));
    }
    Divergence { kl, max_abs, same_top1: argmax(p) == argmax(q) }
}

/// Index of the largest logit, the lower one on ties.
pub fn argmax(logits: &[f32]) -> usize {
    let mut best = 0;
    for (i, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = i;
        }
    }
    best
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + logits.iter().map(|logit| (f64::from(*logit) - max).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_of_known_rows() {
        let half = divergence(&[0.0, 0.0], &[0.0, 3f32.ln()]);
        // KL((1/2, 1/2) || (1/4, 3/4)) = ln 2 - ln 3 / 2.
        assert!((half.kl - (2f64.ln() - 3f64.ln() / 2.0)).abs() < 1e-7, "{half:?}");
        assert!(!half.same_top1);
        let same = divergence(&[1.0, 2.0, -5.0], &[1.0, 2.0, -5.0]);
        assert!(same.kl.abs() < 1e-15 && same.max_abs == 0.0 && same.same_top1);
        let left_out = divergence(&[0.0, f32::NEG_INFINITY, 0.0], &[0.0, f32::NEG_INFINITY, 0.0]);
        assert!(left_out.kl == 0.0 && left_out.max_abs == 0.0 && left_out.same_top1);
        assert_eq!(divergence(&[0.0, 0.0], &[0.0, f32::NEG_INFINITY]).kl, f64::INFINITY);
        let nan = divergence(&[0.0, 0.0, 1.0], &[0.0, f32::NAN, 1.0]);
        assert!(nan.kl.is_nan() && nan.max_abs.is_nan() && !nan.same_top1);
        // A constant shift changes no probability.
        let shifted = divergence(&[1.0, 2.0], &[11.0, 12.0]);
        assert!(shifted.kl.abs() < 1e-6 && shifted.max_abs == 10.0);
    }

    #[test]
    fn agreement_of_known_rows() {
        let (exact, out) = ([0.0, 2f32.ln(), 0.0], f32::NEG_INFINITY);
        let mut same = HeadAgreement::default();
        same.add(&exact, &exact);
        assert!((same.positions, same.same_argmax, same.in_top) == (1, 1, 3), "{same:?}");
        assert!(same.mass_outside == 0.0 && same.kl.abs() < 1e-12, "{same:?}");
        // Half the probability is left out; what is left is renormalised.
        let mut other = HeadAgreement::default();
        other.add(&exact, &[0.0, out, 0.0]);
        assert!((other.same_argmax, other.in_top) == (0, 3), "{other:?}");
        assert!((other.mass_outside - 0.5).abs() < 1e-7 && (other.kl - 2f64.ln()).abs() < 1e-7, "{other:?}");
        assert_eq!(likeliest(&[1.0, 3.0, 3.0, 2.0, 3.0], 2), [1, 2]);
    }

    #[test]
    fn log_prob_survives_large_logits() {
        assert!((log_prob(&[1000.0, 1000.0], 1) + 2f64.ln()).abs() < 1e-9);
        assert_eq!(argmax(&[1.0, 3.0, 3.0, f32::NEG_INFINITY]), 1);
    }
}
