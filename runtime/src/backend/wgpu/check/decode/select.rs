//! Drawing a token.

use std::ops::RangeInclusive;

use super::super::trial::{Difference, Trial, equal, words};
use crate::error::Error;

/// What a token is drawn from, and how.
#[derive(Clone, Debug)]
pub(in crate::backend::wgpu::check) struct Drawing<'a> {
    /// `[vocab_size]`.
    pub(in crate::backend::wgpu::check) logits: &'a [f32],
    /// The token of each logit, if that is not its index.
    pub(in crate::backend::wgpu::check) token_map: Option<&'a [u32]>,
    pub(in crate::backend::wgpu::check) temperature: f32,
    pub(in crate::backend::wgpu::check) top_k: usize,
    pub(in crate::backend::wgpu::check) top_p: f32,
    pub(in crate::backend::wgpu::check) min_p: f32,
    pub(in crate::backend::wgpu::check) uniform: f32,
}

/// Most candidates, as in the kernel.
const MAX_TOP: usize = 64;
/// Words of a result.
const RESULT: usize = 2 + 2 * MAX_TOP;
/// Steps that the rings of the check hold.
const RING: usize = 4;
/// (token, slot, position, step) before.
const ROW: [u32; 4] = [9, 1, 77, 6];

/// What a step left.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Found {
    pub(super) token: u32,
    pub(super) status: u32,
    /// Tokens and logits, best first.
    pub(super) candidates: Vec<(u32, f32)>,
}

impl Drawing<'_> {
    fn token(&self, row: usize) -> u32 {
        self.token_map.map_or(row as u32, |map| map[row])
    }

    /// The `top_k` best, in order.
    pub(super) fn candidates(&self) -> Vec<(u32, f32)> {
        let mut all: Vec<(u32, f32)> =
            self.logits.iter().enumerate().map(|(row, logit)| (self.token(row), logit + 0.0)).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        all.truncate(self.top_k);
        all.retain(|(_, logit)| *logit > f32::NEG_INFINITY);
        all
    }

    /// Places among the candidates that may be drawn: one, or neighbours where the random number, or a bound, lies so near an edge
    /// that f32 may see it on either side.
    fn drawn(&self) -> RangeInclusive<usize> {
        if self.temperature == 0.0 {
            return 0..=0;
        }
        let candidates = self.candidates();
        let best = f64::from(candidates[0].1);
        let weight = |logit: f32| ((f64::from(logit) - best) / f64::from(self.temperature)).exp();
        let weights: Vec<f64> = candidates.iter().map(|(_, logit)| weight(*logit)).collect();
        let mut places = Vec::new();
        for nudge in [-2e-6, 0.0, 2e-6] {
            let goal = (f64::from(self.top_p) + nudge) * weights.iter().sum::<f64>();
            let mut mass = 0.0;
            let mut kept = weights.len();
            if self.top_p < 1.0 {
                let reached = weights.iter().position(|weight| {
                    mass += weight;
                    mass >= goal
                });
                kept = reached.map_or(kept, |last| last + 1);
            }
            let likely =
                weights.iter().take_while(|weight| **weight >= f64::from(self.min_p) * (1.0 + nudge));
            let kept = kept.min(likely.count());
            for nudge in [-2e-6, 0.0, 2e-6] {
                let mut left = (f64::from(self.uniform) + nudge) * weights[..kept].iter().sum::<f64>();
                let place = weights[..kept].iter().position(|weight| {
                    left -= weight;
                    left < 0.0
                });
                places.push(place.unwrap_or(kept - 1));
            }
        }
        let end = |by: fn(usize, usize) -> usize| places.iter().copied().reduce(by).unwrap_or(0);
        end(usize::min)..=end(usize::max)
    }
}

/// One step of `select_token`, with the status word `status` before it.
///
/// # Errors
/// Those of the device.
pub(super) fn step(trial: &Trial<'_>, drawing: &Drawing<'_>, status: u32) -> Result<Found, Error> {
    let Drawing { logits, token_map, temperature, top_k, top_p, min_p, uniform } = drawing;
    let key = |x: &f32| match x.to_bits() {
        bits if bits & 0x7fff_ffff > 0x7f80_0000 => u32::MAX,
        0x8000_0000 => 0x8000_0000,
        bits if bits >> 31 == 1 => !bits,
        bits => bits ^ 0x8000_0000,
    };
    let maxima: Vec<u32> = logits.chunks(32).map(|l| l.iter().map(key).fold(0, u32::max)).collect();
    let at = ROW[3] as usize % RING;
    let mut uniforms = vec![f32::NAN; RING];
    uniforms[at] = *uniform;
    let mut buffers = [
        words(logits),
        maxima,
        token_map.map_or(vec![0; 4], <[u32]>::to_vec),
        vec![temperature.to_bits(), *top_k as u32, top_p.to_bits(), min_p.to_bits()],
        words(&uniforms),
        ROW.to_vec(),
        vec![0xdead; RESULT * RING],
        vec![status, 24],
    ];
    let constants = [
        ("ROWS", logits.len() as f64),
        ("RING", RING as f64),
        ("MAPPED", f64::from(u8::from(token_map.is_some()))),
    ];
    trial.run("select_token", &constants, &mut buffers, [1, 1, 1])?;
    let [.., row, results, status] = &buffers;
    let result = &results[at * RESULT..][..RESULT];
    assert!(results[..at * RESULT].iter().chain(&results[(at + 1) * RESULT..]).all(|word| *word == 0xdead));
    assert_eq!(row[..], [result[0], ROW[1], ROW[2] + 1, ROW[3] + 1], "the next step's row");
    assert_eq!(status[1], 0, "layers counted anew");
    let (tokens, logits) = result[2..].split_at(MAX_TOP);
    let candidates = tokens.iter().zip(logits).take_while(|(token, _)| **token != u32::MAX);
    let candidates = candidates.map(|(token, logit)| (*token, f32::from_bits(*logit))).collect();
    Ok(Found { token: result[0], status: result[1], candidates })
}

/// `select_token`: candidates that are the `top_k` best, and one of them that may be drawn.
///
/// # Errors
/// Those of the device.
pub(in crate::backend::wgpu::check) fn select_token(
    trial: &Trial<'_>,
    drawing: &Drawing<'_>,
) -> Result<Difference, Error> {
    let found = step(trial, drawing, 0)?;
    let candidates = drawing.candidates();
    let may_be = candidates[drawing.drawn()].iter().any(|(token, _)| *token == found.token);
    let right = (found.status, &found.candidates, may_be);
    Ok(Difference::of("select_token", equal(right, (0, &candidates, true))))
}
