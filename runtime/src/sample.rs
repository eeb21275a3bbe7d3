//! From logits to the next token.
//!
//! The order is that of Hugging Face's generation code, and each filter looks at what the one before it left:
//!
//! 1. **logit bias**: added to the logits of single tokens;
//! 2. **penalties** for tokens in the last `repeat_window` tokens of the history: first the repetition penalty
//!    (Keskar et al., "CTRL", 2019: a positive logit is divided by it, a negative one multiplied), then
//!    presence and frequency (OpenAI's API: minus the presence penalty, and minus the frequency penalty for
//!    each time the token occurs);
//! 3. **temperature**: logits divided by it; 0 ends here with the largest logit (greedy);
//! 4. **top-k** (Fan et al., "Hierarchical Neural Story Generation", 2018): the k largest logits;
//! 5. **top-p** (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019): the fewest most
//!    probable tokens whose probabilities, normalised over what top-k left, reach p together;
//! 6. **min-p** (Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024): tokens at least min-p times as
//!    probable as the most probable one;
//! 7. one draw from the rest, normalised.
//!
//! Of equal logits, the lower id counts as larger, everywhere. Probabilities are f64 and added up in one fixed
//! order; random numbers come from ChaCha8. So a seed, the logits and the history decide the token. With top-k
//! or greedy, no step sorts the vocabulary.

use std::cmp::Ordering;

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

use crate::backend::{Draw, MAX_CANDIDATES};

/// Errors of sampling.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// A setting outside its range.
    #[error("sampling setting `{setting}` is {found}; it must be {wanted}")]
    Setting {
        /// Name of the field of [`SamplerSpec`].
        setting: &'static str,
        /// Its value.
        found: f32,
        /// The range.
        wanted: &'static str,
    },
    /// Two biases for one token.
    #[error("logit bias names token {id} more than once")]
    RepeatedBias {
        /// The token.
        id: u32,
    },
    /// A bias for a token that does not exist.
    #[error("logit bias names token {id}, and the model has {vocab_size} tokens")]
    BiasOutOfRange {
        /// The token.
        id: u32,
        /// Number of logits.
        vocab_size: usize,
    },
    /// A token of the history that does not exist.
    #[error("token {id} of the history is outside the vocabulary of {vocab_size}")]
    HistoryOutOfRange {
        /// The token.
        id: u32,
        /// Number of logits.
        vocab_size: usize,
    },
    /// A logit that is NaN or +infinity: the model's numbers are broken.
    #[error(
        "the logit of token {id} is {value} after bias and penalties; run `samara verify` on the model file"
    )]
    BadLogit {
        /// The first such token.
        id: usize,
        /// Its logit.
        value: f32,
    },
    /// No logits at all, or every one is -infinity.
    #[error("no token can be chosen: all {vocab_size} logits are -infinity; remove some logit bias")]
    NothingLeft {
        /// Number of logits.
        vocab_size: usize,
    },
}

/// Sampling settings. The default changes nothing: temperature 1, no filter, no penalty, seed 0.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerSpec {
    /// Finite, at least 0; 0 is greedy.
    pub temperature: f32,
    /// Tokens kept by top-k; 0 keeps all.
    pub top_k: usize,
    /// In (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// In [0, 1]; 0 keeps all.
    pub min_p: f32,
    /// Finite, above 0; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Finite; 0 changes nothing.
    pub presence_penalty: f32,
    /// Finite; 0 changes nothing.
    pub frequency_penalty: f32,
    /// How many of the latest tokens the penalties see; `None` is all of them.
    pub repeat_window: Option<usize>,
    /// Token and what is added to its logit: finite, or -infinity to forbid it. Each token once.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for SamplerSpec {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repeat_window: None,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl SamplerSpec {
    /// Checks every setting against its range.
    ///
    /// # Errors
    /// [`SampleError::Setting`] or [`SampleError::RepeatedBias`].
    pub fn validate(&self) -> Result<(), SampleError> {
        let p = |v: f32| (0.0..=1.0).contains(&v);
        let rules = [
            ("temperature", self.temperature, self.temperature >= 0.0, "finite and at least 0"),
            ("top_p", self.top_p, p(self.top_p) && self.top_p > 0.0, "above 0 and at most 1"),
            ("min_p", self.min_p, p(self.min_p), "from 0 to 1"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                self.repetition_penalty > 0.0,
                "finite and above 0",
            ),
            ("presence_penalty", self.presence_penalty, true, "finite"),
            ("frequency_penalty", self.frequency_penalty, true, "finite"),
        ];
        for (setting, found, in_range, wanted) in rules {
            if !in_range || !found.is_finite() {
                return Err(SampleError::Setting { setting, found, wanted });
            }
        }
        let mut ids: Vec<u32> = Vec::with_capacity(self.logit_bias.len());
        for &(id, bias) in &self.logit_bias {
            if bias.is_nan() || bias == f32::INFINITY {
                return Err(SampleError::Setting {
                    setting: "logit_bias",
                    found: bias,
                    wanted: "finite or -infinity",
                });
            }
            ids.push(id);
        }
        ids.sort_unstable();
        match ids.windows(2).find(|w| w[0] == w[1]) {
            Some(w) => Err(SampleError::RepeatedBias { id: w[0] }),
            None => Ok(()),
        }
    }
}

/// A chosen token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Natural logarithm of the probability it was drawn with, after all filters; 0 when greedy. For the
    /// model's own probability see [`log_prob`](crate::log_prob).
    pub logprob: f32,
}

/// Draws tokens one after another; the state is that of the random numbers.
#[derive(Debug, Clone)]
pub struct Sampler {
    spec: SamplerSpec,
    rng: ChaCha8Rng,
    /// Scratch, reused for each token.
    kept: Vec<Candidate>,
}

/// A token still in the race; `weight` is its probability relative to the most probable token.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    logit: f32,
    weight: f64,
}

/// Larger logits first, then lower ids. Logits are never NaN here.
fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

/// Logits are scanned in blocks of this many for their largest values.
const BLOCK: usize = 64;
/// Top-p without top-k ranks this many candidates at first, and eight times as many each time they do not
/// reach p.
const FIRST_RANKED: usize = 256;

impl Sampler {
    /// A sampler at the beginning of its random numbers.
    ///
    /// # Errors
    /// As [`SamplerSpec::validate`].
    pub fn new(spec: SamplerSpec) -> Result<Self, SampleError> {
        spec.validate()?;
        let rng = ChaCha8Rng::seed_from_u64(spec.seed);
        Ok(Self { spec, rng, kept: Vec::new() })
    }

    /// The settings.
    pub fn spec(&self) -> &SamplerSpec {
        &self.spec
    }

    /// Chooses the next token. `logits` is `[vocab_size]`, f32, -infinity for tokens that cannot come; bias and
    /// penalties are left in it. `history` holds the tokens so far, the latest last.
    ///
    /// # Errors
    /// A logit that is NaN or +infinity, nothing to choose from, or an id outside the vocabulary.
    pub fn sample(&mut self, logits: &mut [f32], history: &[u32]) -> Result<Token, SampleError> {
        self.adjust(logits, history)?;
        let best = largest(logits)?;
        if self.spec.temperature == 0.0 {
            return Ok(Token { id: best.id, logprob: 0.0 });
        }
        self.keep_top_k(logits);
        Ok(self.draw_from_kept(best.logit))
    }

    /// How a device draws as this sampler does from logits, `[vocab_size]`; `None` where the sampler needs them all:
    /// with penalties or a bias, and unless it is greedy or keeps few of them.
    pub fn as_draw(&self, vocab_size: usize) -> Option<Draw> {
        let SamplerSpec {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            repeat_window: _,
            logit_bias,
            seed: _,
        } = &self.spec;
        let plain = *repetition_penalty == 1.0
            && *presence_penalty == 0.0
            && *frequency_penalty == 0.0
            && logit_bias.is_empty();
        let few = 1..=MAX_CANDIDATES.min(vocab_size.saturating_sub(1));
        let top_k = if *temperature == 0.0 { 1 } else { *top_k };
        (plain && few.contains(&top_k)).then_some(Draw {
            temperature: *temperature,
            top_k,
            top_p: *top_p,
            min_p: *min_p,
        })
    }

    /// How many of the largest logits decide the next token, of `vocab_size`, after `n_tokens` tokens: with any values below
    /// those for the others, [`Sampler::sample`] does the same.
    pub fn top_of(&self, vocab_size: usize, n_tokens: usize) -> usize {
        let SamplerSpec {
            temperature,
            top_k,
            top_p: _,
            min_p: _,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            repeat_window,
            logit_bias,
            seed: _,
        } = &self.spec;
        let penalties = [*repetition_penalty - 1.0, *presence_penalty, *frequency_penalty];
        let raised = logit_bias.iter().any(|(_, bias)| *bias > 0.0) || penalties.iter().any(|p| *p < 0.0);
        let top = if *temperature == 0.0 { 1 } else { *top_k };
        if raised || top == 0 {
            return vocab_size;
        }
        // Whatever is lowered makes room for one that was below.
        let penalised = if penalties.iter().any(|p| *p > 0.0) { n_tokens } else { 0 };
        let lowered = logit_bias.len() + penalised.min(repeat_window.unwrap_or(usize::MAX));
        top.saturating_add(lowered).min(vocab_size)
    }

    /// Uniform random numbers in [0, 1) that this sampler is going to use, `n` of them after the next `skip`. They are not
    /// used by this.
    pub fn peek(&self, skip: usize, n: usize) -> Vec<f32> {
        // The largest f32 below 1, which rounding could give.
        const BELOW_ONE: f32 = 1.0 - f32::EPSILON / 2.0;
        let mut rng = self.rng.clone();
        (0..skip + n).map(|_| (uniform(&mut rng) as f32).min(BELOW_ONE)).skip(skip).collect()
    }

    /// Chooses the next token as [`Sampler::sample`] does from all logits, given only the largest: as many as
    /// [`Sampler::as_draw`] asks for, id and logit.
    ///
    /// # Errors
    /// A logit that is NaN or +infinity, or nothing to choose from.
    pub fn choose(&mut self, candidates: &[(u32, f32)]) -> Result<Token, SampleError> {
        if let Some((id, value)) =
            candidates.iter().find(|(_, logit)| logit.is_nan() || *logit == f32::INFINITY)
        {
            return Err(SampleError::BadLogit { id: *id as usize, value: *value });
        }
        self.kept.clear();
        let able = candidates.iter().filter(|(_, logit)| *logit > f32::NEG_INFINITY);
        // Adding 0 turns -0 into 0, so that the two tie.
        self.kept.extend(able.map(|&(id, logit)| Candidate { id, logit: logit + 0.0, weight: 0.0 }));
        self.kept.sort_unstable_by(by_rank);
        let best = *self.kept.first().ok_or(SampleError::NothingLeft { vocab_size: candidates.len() })?;
        if self.spec.temperature == 0.0 {
            return Ok(Token { id: best.id, logprob: 0.0 });
        }
        Ok(self.draw_from_kept(best.logit))
    }

    /// Temperature, top-p, min-p and the draw, on what top-k has left.
    fn draw_from_kept(&mut self, best: f32) -> Token {
        let temperature = f64::from(self.spec.temperature);
        for c in &mut self.kept {
            // Not the platform's: what is drawn does not depend on it.
            c.weight = libm::exp((f64::from(c.logit) - f64::from(best)) / temperature);
        }
        if self.spec.top_p < 1.0 {
            self.keep_top_p();
        }
        let min_p = f64::from(self.spec.min_p);
        self.kept.retain(|c| c.weight >= min_p);
        self.draw()
    }

    /// Bias and penalties.
    fn adjust(&self, logits: &mut [f32], history: &[u32]) -> Result<(), SampleError> {
        let vocab_size = logits.len();
        for &(id, bias) in &self.spec.logit_bias {
            let logit = logits.get_mut(id as usize).ok_or(SampleError::BiasOutOfRange { id, vocab_size })?;
            *logit += bias;
        }
        let SamplerSpec { repetition_penalty, presence_penalty, frequency_penalty, repeat_window, .. } =
            self.spec;
        if repetition_penalty == 1.0 && presence_penalty == 0.0 && frequency_penalty == 0.0 {
            return Ok(());
        }
        let window = repeat_window.unwrap_or(history.len()).min(history.len());
        let mut recent = history[history.len() - window..].to_vec();
        recent.sort_unstable();
        for same in recent.chunk_by(|a, b| a == b) {
            let id = same[0];
            let logit =
                logits.get_mut(id as usize).ok_or(SampleError::HistoryOutOfRange { id, vocab_size })?;
            *logit = if *logit > 0.0 { *logit / repetition_penalty } else { *logit * repetition_penalty };
            *logit -= presence_penalty + frequency_penalty * same.len() as f32;
        }
        Ok(())
    }

    /// Fills `kept` with the `top_k` largest logits in rank order, or with all that are not -infinity by id.
    fn keep_top_k(&mut self, logits: &[f32]) {
        let k = self.spec.top_k;
        let limited = k > 0 && k < logits.len();
        let floor = if limited { floor_of_top(logits, k) } else { f32::NEG_INFINITY };
        self.kept.clear();
        let able = (0u32..).zip(logits).filter(|(_, l)| **l >= floor && **l > f32::NEG_INFINITY);
        // Adding 0 turns -0 into 0, so that the two tie.
        self.kept.extend(able.map(|(id, &logit)| Candidate { id, logit: logit + 0.0, weight: 0.0 }));
        if limited {
            rank(&mut self.kept, k);
            self.kept.truncate(k);
        }
    }

    /// Leaves the fewest candidates, in rank order, whose weights reach `top_p` of the sum of all.
    fn keep_top_p(&mut self) {
        let goal = f64::from(self.spec.top_p) * self.kept.iter().map(|c| c.weight).sum::<f64>();
        let mut ranked = FIRST_RANKED;
        loop {
            rank(&mut self.kept, ranked);
            let mut mass = 0.0;
            let reached = self.kept.iter().take(ranked).position(|c| {
                mass += c.weight;
                mass >= goal
            });
            if let Some(last) = reached {
                self.kept.truncate(last + 1);
            }
            if reached.is_some() || ranked >= self.kept.len() {
                return;
            }
            ranked = ranked.saturating_mul(8);
        }
    }

    /// One token of `kept`, each with its weight's share of the sum.
    fn draw(&mut self) -> Token {
        let total: f64 = self.kept.iter().map(|c| c.weight).sum();
        let mut left = uniform(&mut self.rng) * total;
        let mut chosen = self.kept[0];
        for c in self.kept.iter().filter(|c| c.weight > 0.0) {
            chosen = *c;
            left -= c.weight;
            if left < 0.0 {
                break;
            }
        }
        Token { id: chosen.id, logprob: (chosen.weight / total).ln() as f32 }
    }
}

/// The 53 highest bits, uniform in [0, 1).
fn uniform(rng: &mut ChaCha8Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 * (-53f64).exp2()
}

/// Puts the first `n` of `candidates` in rank order, ahead of the others.
fn rank(candidates: &mut [Candidate], n: usize) {
    let n = n.min(candidates.len());
    if n > 0 && n < candidates.len() {
        candidates.select_nth_unstable_by(n - 1, by_rank);
    }
    candidates[..n].sort_unstable_by(by_rank);
}

/// The largest logit, of equal ones the lowest id.
fn largest(logits: &[f32]) -> Result<Candidate, SampleError> {
    // As integers that compare as the numbers do, so that the compiler makes vectors of it. NaN is beyond an infinity.
    let key = |logit: &f32| {
        let bits = logit.to_bits().cast_signed();
        bits ^ ((bits >> 31) & i32::MAX)
    };
    let (least, most) = logits
        .iter()
        .map(key)
        .fold((i32::MAX, i32::MIN), |(least, most), key| (least.min(key), most.max(key)));
    let bad = |logit: &f32| logit.is_nan() || *logit == f32::INFINITY;
    if (least < key(&f32::NEG_INFINITY) || most >= key(&f32::INFINITY))
        && let Some(id) = logits.iter().position(bad)
    {
        return Err(SampleError::BadLogit { id, value: logits[id] });
    }
    let best = f32::from_bits((most ^ ((most >> 31) & i32::MAX)).cast_unsigned());
    // Equal to it as numbers are: 0 and -0 tie.
    match logits.iter().position(|logit| *logit == best) {
        Some(id) if best > f32::NEG_INFINITY => {
            Ok(Candidate { id: id as u32, logit: logits[id], weight: 1.0 })
        }
        _ => Err(SampleError::NothingLeft { vocab_size: logits.len() }),
    }
}

/// A value that at least `k` logits reach, close to the k-th largest: the k-th largest of the blocks' maxima.
/// -infinity when there are fewer blocks than that.
fn floor_of_top(logits: &[f32], k: usize) -> f32 {
    let mut maxima: Vec<f32> =
        logits.chunks(BLOCK).map(|b| b.iter().copied().fold(f32::NEG_INFINITY, f32::max)).collect();
    if k > maxima.len() {
        return f32::NEG_INFINITY;
    }
    *maxima.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
}
