//! Heads that leave rows out: what they read, and how they compare with the exact one.

use samara_runtime::{Engine, HeadAgreement, HeadCounts, HeadKind, HeadMode};
use serde_json::{Value, json};

/// What a head has read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadReads {
    mode: HeadMode,
    counts: HeadCounts,
    /// Bytes of the exact head.
    exact_bytes: u64,
}

impl HeadReads {
    /// Of all tokens so far; `None` of the exact head.
    pub(crate) fn of(engine: &mut Engine) -> Option<Self> {
        let counts = engine.head_counts()?;
        Some(HeadReads { mode: engine.limits().head, counts, exact_bytes: engine.model().head_bytes() })
    }

    /// What came after `before`.
    pub(crate) fn since(self, before: Self) -> Self {
        HeadReads { counts: self.counts.minus(before.counts), ..self }
    }

    /// Bytes a token; 0 before the first.
    pub(crate) fn bytes(&self) -> f64 {
        self.counts.bytes as f64 / self.counts.tokens.max(1) as f64
    }

    /// Share of the tokens that the clusters read at first proved; `None` of a head that proves nothing.
    fn certified(&self) -> Option<f64> {
        let share = self.counts.certified as f64 / self.counts.tokens.max(1) as f64;
        (self.mode.kind == HeadKind::Certified).then_some(share)
    }

    pub(crate) fn to_json(self) -> Value {
        json!({
            "mode": self.mode.kind.name(),
            "n_probes": self.mode.n_probes,
            "certified_share": self.certified(),
            "bytes_per_token": self.bytes(),
            "share_of_exact_bytes": self.bytes() / self.exact_bytes as f64,
        })
    }

    pub(crate) fn to_text(self) -> String {
        let certified = self.certified().map_or(String::new(), |share| {
            format!(", and the first clusters were enough for {:.2} % of the tokens", 100.0 * share)
        });
        format!(
            "{} head with {} probes: {:.0} bytes a token, {:.1} % of the exact head's{certified}",
            self.mode.kind,
            self.mode.n_probes,
            self.bytes(),
            100.0 * self.bytes() / self.exact_bytes as f64
        )
    }
}

/// How the engine's head compares with the exact one, over some positions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadReport {
    /// Logits that matter.
    top_k: usize,
    agreement: HeadAgreement,
    reads: HeadReads,
}

impl HeadReport {
    /// Has `run` add positions, for each of which the engine's head is asked for its `top_k` largest logits once. `None` of an
    /// engine with the exact head, which runs nothing.
    pub(crate) fn of(
        engine: &mut Engine,
        top_k: usize,
        run: impl FnOnce(&mut Engine, &mut HeadAgreement) -> anyhow::Result<()>,
    ) -> anyhow::Result<Option<Self>> {
        let Some(before) = HeadReads::of(engine) else { return Ok(None) };
        let mut agreement = HeadAgreement::default();
        run(engine, &mut agreement)?;
        let reads = HeadReads::of(engine).map(|after| after.since(before));
        Ok(reads.map(|reads| HeadReport { top_k, agreement, reads }))
    }

    /// `of` for each position.
    fn mean(&self, of: f64) -> f64 {
        of / self.agreement.positions.max(1) as f64
    }

    pub(crate) fn to_json(self) -> Value {
        let HeadAgreement { positions, same_argmax, in_top, mass_outside, kl } = self.agreement;
        let mut object = self.reads.to_json();
        object["top_k"] = json!(self.top_k);
        object["positions"] = json!(positions);
        object["argmax_agreement"] = json!(self.mean(same_argmax as f64));
        object["top20_overlap"] = json!(self.mean(in_top as f64 / HeadAgreement::TOP as f64));
        object["mass_outside"] = json!(self.mean(mass_outside));
        object["kl_mean"] = json!(self.mean(kl));
        object
    }

    pub(crate) fn to_text(self) -> String {
        let HeadAgreement { positions, same_argmax, in_top, mass_outside, kl } = self.agreement;
        format!(
            "{}; top {} asked for; of {positions} positions {:.2} % have the exact head's likeliest token, {:.2} % of its top 20 \
             are shared; probability left out {:.2e}, KL {:.2e} nats",
            self.reads.to_text(),
            self.top_k,
            100.0 * self.mean(same_argmax as f64),
            100.0 * self.mean(in_top as f64 / HeadAgreement::TOP as f64),
            self.mean(mass_outside),
            self.mean(kl),
        )
    }
}
