//! How a head that leaves rows out compares with the exact one: what `samara ppl` and `samara bench` say of it.

use samara_runtime::{Engine, HeadAgreement, HeadCounts, HeadKind, HeadMode};
use serde_json::{Value, json};

/// Of the engine's head, over some positions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadReport {
    mode: HeadMode,
    /// Logits that matter.
    top_k: usize,
    agreement: HeadAgreement,
    /// What was read for these positions.
    counts: HeadCounts,
    /// Bytes of the exact head.
    exact_bytes: u64,
}

impl HeadReport {
    /// Has `run` add positions, for each of which the engine's head is asked for its `top_k` largest logits once. `None` of an
    /// engine with the exact head, which runs nothing.
    pub(crate) fn of(
        engine: &mut Engine,
        top_k: usize,
        run: impl FnOnce(&mut Engine, &mut HeadAgreement) -> anyhow::Result<()>,
    ) -> anyhow::Result<Option<Self>> {
        let mode = engine.limits().head;
        if mode.kind == HeadKind::Exact {
            return Ok(None);
        }
        let before = engine.head_counts().unwrap_or_default();
        let mut agreement = HeadAgreement::default();
        run(engine, &mut agreement)?;
        let counts = engine.head_counts().unwrap_or_default().minus(before);
        Ok(Some(HeadReport { mode, top_k, agreement, counts, exact_bytes: engine.model().head_bytes() }))
    }

    /// `of` for each position.
    fn mean(&self, of: f64) -> f64 {
        of / self.agreement.positions.max(1) as f64
    }

    fn bytes(&self) -> f64 {
        self.mean(self.counts.bytes as f64)
    }

    /// `None` of a head that proves nothing.
    fn certified(&self) -> Option<f64> {
        (self.mode.kind == HeadKind::Certified).then(|| self.mean(self.counts.certified as f64))
    }

    pub(crate) fn to_json(self) -> Value {
        let HeadAgreement { positions, same_argmax, in_top, mass_outside, kl } = self.agreement;
        json!({
            "mode": self.mode.kind.name(),
            "n_probes": self.mode.n_probes,
            "top_k": self.top_k,
            "positions": positions,
            "argmax_agreement": self.mean(same_argmax as f64),
            "top20_overlap": self.mean(in_top as f64 / HeadAgreement::TOP as f64),
            "mass_outside": self.mean(mass_outside),
            "kl_mean": self.mean(kl),
            "certified_share": self.certified(),
            "bytes_per_token": self.bytes(),
            "share_of_exact_bytes": self.bytes() / self.exact_bytes as f64,
        })
    }

    pub(crate) fn to_text(self) -> String {
        let HeadAgreement { positions, same_argmax, in_top, mass_outside, kl } = self.agreement;
        let percent = |of: f64| 100.0 * self.mean(of);
        let certified = match self.certified() {
            Some(share) => format!("; the {} largest proven at once {:.2} %", self.top_k, 100.0 * share),
            None => String::new(),
        };
        format!(
            "{}, {} probes: same likeliest token {:.2} %, top 20 shared {:.2} %, probability left out {:.2e}, KL {:.2e} \
             nats; {:.0} bytes a token, {:.1} % of the exact head's{certified}; {positions} positions",
            self.mode.kind,
            self.mode.n_probes,
            percent(same_argmax as f64),
            percent(in_top as f64 / HeadAgreement::TOP as f64),
            self.mean(mass_outside),
            self.mean(kl),
            self.bytes(),
            100.0 * self.bytes() / self.exact_bytes as f64,
        )
    }
}
