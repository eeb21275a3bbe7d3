//! How many threads take part. More are not always faster: decoding waits for memory, and on many machines half of the
//! threads share their core with the other half.

use std::time::{Duration, Instant};

/// Finds by trying, while tokens are decoded, how many threads decode fastest. Results do not depend on it.
#[derive(Debug)]
pub(super) struct DecodeThreads {
    /// Counts to try, and the best time of a token with each.
    tried: Vec<(usize, Duration)>,
    /// Tokens timed so far.
    timed: usize,
    chosen: Option<usize>,
}

/// Tokens timed with each count, in turn. The best of them counts, since the first tokens also wait for the disk.
const TOKENS: usize = 4;

/// Fewer threads are taken if they need at most this share of the time that more threads need.
const WORTH: f64 = 0.97;

impl DecodeThreads {
    /// Tries all `threads`, half and a quarter of them; or takes them as they are given.
    pub(super) fn new(threads: usize, measure: bool) -> Self {
        let mut counts = vec![threads, threads.div_ceil(2), threads.div_ceil(4)];
        counts.dedup();
        let chosen = (!measure || counts.len() == 1).then_some(threads);
        DecodeThreads { tried: counts.into_iter().map(|n| (n, Duration::MAX)).collect(), timed: 0, chosen }
    }

    /// Threads for the next token.
    pub(super) fn next(&self) -> usize {
        self.chosen.unwrap_or(self.tried[self.timed % self.tried.len()].0)
    }

    /// The token that began at `started` is done.
    pub(super) fn done(&mut self, started: Instant) {
        if self.chosen.is_some() {
            return;
        }
        let at = self.timed % self.tried.len();
        self.tried[at].1 = self.tried[at].1.min(started.elapsed());
        self.timed += 1;
        if self.timed == TOKENS * self.tried.len() {
            self.chosen = Some(best(&self.tried));
        }
    }
}

/// The count that is worth its threads; counts descend.
pub(super) fn best(tried: &[(usize, Duration)]) -> usize {
    let better = |best: (usize, Duration), next: &(usize, Duration)| {
        if next.1.as_secs_f64() < WORTH * best.1.as_secs_f64() { *next } else { best }
    };
    tried[1..].iter().fold(tried[0], better).0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_threads_have_to_be_faster() {
        for (millis, expected) in [
            ([10, 10, 10], 8),
            ([100, 98, 99], 8),
            ([100, 90, 89], 4),
            ([100, 90, 80], 2),
            ([100, 200, 90], 2),
        ] {
            let tried: Vec<_> = [8, 4, 2].into_iter().zip(millis.map(Duration::from_millis)).collect();
            assert_eq!(best(&tried), expected, "{millis:?}");
        }
    }

    #[test]
    fn each_count_is_tried_and_one_is_kept() {
        let mut threads = DecodeThreads::new(8, true);
        let mut seen = Vec::new();
        for _ in 0..3 * TOKENS {
            seen.push(threads.next());
            threads.done(Instant::now());
        }
        assert_eq!(seen[..4], [8, 4, 2, 8]);
        let kept = threads.next();
        threads.done(Instant::now());
        assert_eq!(threads.next(), kept);
        assert_eq!(DecodeThreads::new(8, false).next(), 8);
        assert_eq!(DecodeThreads::new(1, true).chosen, Some(1));
    }
}
