//! How much work goes into one submission.
//!
//! A desktop's GPU draws the screen too, and its driver kills what runs for seconds, so a submission stays well below a
//! fifth of a second. How long work takes is learnt from the submissions before; a device that has not been timed gets
//! little first. Time is proportional to tokens times layers, nearly, so a step is cut between layers first, which costs nothing,
//! and between tokens only where one layer of all tokens takes too long.

use std::time::Duration;

/// What one submission should take.
pub(super) const TARGET: Duration = Duration::from_millis(80);

/// Tokens of the first submission of a device that has not been timed.
const FIRST_TOKENS: usize = 16;

/// Seconds that one layer takes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    /// For each token of a step of several.
    prefill: Option<f64>,
    /// For a step of one token.
    decode: Option<f64>,
}

/// How a step is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pieces {
    /// Tokens of a sub-step.
    pub(super) tokens: usize,
    /// Layers of a submission.
    pub(super) layers: usize,
}

impl Pace {
    /// How a step of several tokens through `n_layers` is cut.
    pub(super) fn prefill(&self, n_tokens: usize, n_layers: usize) -> Pieces {
        let n_layers = n_layers.max(1);
        let Some(each) = self.prefill else {
            return Pieces { tokens: n_tokens.min(FIRST_TOKENS), layers: n_layers };
        };
        // Tokens times layers that fit.
        let budget = (TARGET.as_secs_f64() / each).clamp(1.0, 1e9) as usize;
        // Sub-steps of equal length.
        let n_pieces = n_tokens.div_ceil(budget);
        let tokens = n_tokens.div_ceil(n_pieces);
        Pieces { tokens, layers: (budget / tokens).clamp(1, n_layers) }
    }

    /// Steps of one token each that go into a submission.
    pub(super) fn decode(&self, n_layers: usize) -> usize {
        let Some(each) = self.decode else { return 1 };
        (TARGET.as_secs_f64() / (each * n_layers.max(1) as f64)).clamp(1.0, 1e6) as usize
    }

    /// Notes what a step of one token, or a piece of a longer one, took from its submission to its end.
    pub(super) fn took(&mut self, decode: bool, n_tokens: usize, n_layers: usize, time: Duration) {
        let of = if decode { &mut self.decode } else { &mut self.prefill };
        let now = time.as_secs_f64() / (n_tokens * n_layers.max(1)) as f64;
        // Small steps cost more for each token; the lesser of old and new would never forget a slip, so old fades.
        *of = Some(of.map_or(now, |before| if now < before { now } else { before + 0.5 * (now - before) }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_cut_between_layers_then_between_tokens() {
        let mut pace = Pace::default();
        assert_eq!(pace.prefill(512, 24), Pieces { tokens: 16, layers: 24 });
        assert_eq!(pace.prefill(3, 0), Pieces { tokens: 3, layers: 1 });
        for (micros, n_tokens, expected) in [
            (1, 2048, Pieces { tokens: 2048, layers: 24 }),
            (10, 2048, Pieces { tokens: 2048, layers: 3 }),
            (100, 2048, Pieces { tokens: 683, layers: 1 }),
            (100, 100, Pieces { tokens: 100, layers: 8 }),
            (1_000_000, 5, Pieces { tokens: 1, layers: 1 }),
        ] {
            pace = Pace::default();
            pace.took(false, 100, 10, Duration::from_micros(1000 * micros));
            assert_eq!(pace.prefill(n_tokens, 24), expected, "{micros} us, {n_tokens} tokens");
        }
    }

    #[test]
    fn decoding_is_timed_on_its_own() {
        let mut pace = Pace::default();
        assert_eq!(pace.decode(24), 1);
        pace.took(true, 1, 24, Duration::from_millis(1));
        assert_eq!(pace.decode(24), 80);
        assert_eq!(pace.prefill(64, 24).tokens, 16);
        pace.took(true, 1, 24, Duration::from_secs(1));
        assert_eq!(pace.decode(24), 1);
    }
}
