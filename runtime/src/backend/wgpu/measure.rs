//! Which variants of a block's kernels are fastest, of those that compute what they should.
//!
//! One block is copied to the device, and every variant of all its kernels runs with it: first against the CPU, then
//! against the clock. Kernels of steps of one token and of several are chosen apart.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use samara_shaders::Variant;

use super::{
    backend::{GpuBackend, several_tokens, tried},
    bandwidth,
    ops::{Extent, Variants},
    plan::Plan,
    segment::GpuSegment,
};
use crate::{backend::Limits, error::Error, flash::HeadMode, kv::KvType, model::Model, spec::BlockSpec};

/// Each variant is timed in this many turns, and its best turn counts.
const TURNS: usize = 4;

/// Steps of one token in a submission that is timed.
const STEPS: usize = 8;

/// Tokens of a step of several.
const TOKENS: usize = 64;

const LIMITS: Limits = Limits {
    threads: 1,
    fewer_threads: false,
    n_slots: 1,
    context: 2 * TOKENS,
    max_batch: TOKENS,
    max_logit_rows: 1,
    kv: KvType::Bf16,
    head: HeadMode::EXACT,
};

/// The fastest variant of each kernel of a block.
///
/// # Errors
/// A device that is lost or has too little memory; [`Error::DeviceFault`] if every variant computes wrong.
pub(super) fn fastest(
    backend: &GpuBackend,
    model: &Arc<Model>,
    spec: &BlockSpec,
    kernels: &[&'static str],
) -> Result<Variants, Error> {
    let specs = [spec.clone()];
    let limits = Limits { context: LIMITS.context.min(model.architecture().max_context), ..LIMITS };
    let plan = Plan::new(&backend.gpu, model, &specs, &limits)?;
    let mut segment = backend.upload(model, &plan, &limits, &mut |_, _| {})?;
    let (mut right, mut reasons) = (Vec::new(), Vec::new());
    for variant in tried(&backend.gpu) {
        // Without the instruction for it a device spells a dot product out by itself.
        if !variant.packed_dot && !right.is_empty() {
            continue;
        }
        let variants: Variants = kernels.iter().map(|kernel| (*kernel, variant)).collect();
        match backend.fit_out(&mut segment, model, &specs, &plan, &limits, &variants)? {
            None => right.push((variant, [Duration::MAX; 2])),
            Some(reason) => reasons.push(reason),
        }
    }
    if right.is_empty() {
        return Err(Error::DeviceFault { device: backend.gpu.name(), reason: reasons.join("; ") });
    }
    if right.len() > 1 {
        bandwidth::wake(&backend.gpu)?;
    }
    // A turn of each, so that a disturbance hits all alike.
    for _ in 0..if right.len() > 1 { TURNS } else { 0 } {
        for (variant, best) in &mut right {
            let variants: Variants = kernels.iter().map(|kernel| (*kernel, *variant)).collect();
            if backend.fit_out(&mut segment, model, &specs, &plan, &limits, &variants)?.is_none() {
                for (best, n_tokens) in best.iter_mut().zip([1, TOKENS]) {
                    *best = (*best).min(time(&mut segment, n_tokens)?);
                }
            }
        }
    }
    let [one, several] = [0, 1].map(|of| least(&right, |times| times[of]));
    Ok(kernels.iter().map(|kernel| (*kernel, if several_tokens(kernel) { several } else { one })).collect())
}

/// The variant whose time is least.
fn least(times: &[(Variant, [Duration; 2])], of: impl Fn(&[Duration; 2]) -> Duration) -> Variant {
    times.iter().min_by_key(|(_, times)| of(times)).map_or(Variant::default(), |(variant, _)| *variant)
}

/// What steps of so many tokens take.
fn time(segment: &mut GpuSegment, n_tokens: usize) -> Result<Duration, Error> {
    let steps = if n_tokens == 1 { STEPS } else { 1 };
    let position = (TOKENS - 1) as u32;
    let (n, decode) = (n_tokens as u32, n_tokens == 1);
    let extent = Extent { n_tokens: n, decode, position, n_logit_rows: 1, leaves_out: false };
    let tokens: Vec<_> = (0..n_tokens).map(|i| (0, i, 0)).collect();
    segment.write_rows(&tokens);
    let started = Instant::now();
    let submission = segment.submit(|this, recorder| {
        recorder.run((0..steps).flat_map(|_| this.ops(0..this.layers.len(), extent)));
    })?;
    segment.gpu.wait(Some(submission))?;
    Ok(started.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_time_counts() {
        let [a, b, ..] = Variant::ALL;
        let of = |one, several| [Duration::from_micros(one), Duration::from_micros(several)];
        let times = [(a, of(5, 9)), (b, of(6, 8))];
        assert_eq!((least(&times, |times| times[0]), least(&times, |times| times[1])), (a, b));
    }
}
