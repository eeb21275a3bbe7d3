//! The experts of one token.

use super::super::{
    made::{Made, Ternary},
    trial::{Difference, Trial, equal, words, worst},
};
use super::quantized::{POISON, Quantized, Within, row_values, worst_within};
use crate::{backend::wgpu::device::bytes_of, error::Error};

/// Blocks of experts as the file has them, or the first few of them.
#[derive(Clone, Debug)]
pub(in crate::backend::wgpu::check) struct ExpertBlocks {
    /// `[n_experts]` blocks.
    pub(in crate::backend::wgpu::check) words: Vec<u32>,
    /// Words of a block, and of it before up and before down.
    pub(in crate::backend::wgpu::check) block: usize,
    pub(in crate::backend::wgpu::check) up_at: usize,
    pub(in crate::backend::wgpu::check) down_at: usize,
    pub(in crate::backend::wgpu::check) hidden_size: usize,
    pub(in crate::backend::wgpu::check) expert_size: usize,
    pub(in crate::backend::wgpu::check) n_used: usize,
    pub(in crate::backend::wgpu::check) norm_topk: bool,
    /// Bounds of gate and up before SwiGLU.
    pub(in crate::backend::wgpu::check) gate_max: f32,
    pub(in crate::backend::wgpu::check) up_abs_max: f32,
    /// Experts in the first of two buffers; all of them if there are no more.
    pub(in crate::backend::wgpu::check) per_split: usize,
}

impl ExpertBlocks {
    /// Made-up blocks with the parts where the file's rules put them.
    #[cfg(test)]
    pub(in crate::backend::wgpu::check) fn made(
        made: &mut Made,
        n_experts: usize,
        hidden_size: usize,
        expert_size: usize,
    ) -> Self {
        let mut blocks = ExpertBlocks {
            words: Vec::new(),
            block: 0,
            up_at: 0,
            down_at: 0,
            hidden_size,
            expert_size,
            n_used: 1,
            norm_topk: true,
            // Low enough that made-up rows reach them.
            gate_max: 0.3,
            up_abs_max: 0.25,
            per_split: n_experts,
        };
        for expert in 0..n_experts {
            let start = blocks.words.len();
            blocks.words.extend(made.ternary(expert_size, hidden_size).words);
            blocks.up_at = blocks.words.len() - start;
            blocks.words.extend(made.ternary(expert_size, hidden_size).words);
            blocks.down_at = blocks.words.len() - start;
            blocks.words.extend(made.ternary(hidden_size, expert_size).words);
            blocks.block = (blocks.words.len() - start).next_multiple_of(1024);
            blocks.words.resize((expert + 1) * blocks.block, 0);
        }
        blocks
    }

    fn n_experts(&self) -> usize {
        self.words.len() / self.block
    }

    fn matrix(&self, expert: usize, at: usize, rows: usize, cols: usize) -> Ternary {
        let len = samara_format::TernaryLayout::new(rows, cols).expect("an expert's matrix").len() / 4;
        Ternary::of(&bytes_of(&self.words[expert * self.block + at..][..len]), rows, cols)
    }

    /// The two buffers.
    fn split(&self) -> [Vec<u32>; 2] {
        let (first, second) = self.words.split_at(self.per_split.min(self.n_experts()) * self.block);
        [first.to_vec(), if second.is_empty() { vec![0; 4] } else { second.to_vec() }]
    }

    fn constants(&self) -> Vec<(&'static str, f64)> {
        let all = self.per_split >= self.n_experts();
        vec![
            ("BLOCK_WORDS", self.block as f64),
            ("PER_SPLIT", if all { u32::MAX.into() } else { self.per_split as f64 }),
        ]
    }

    /// silu(min(gate, max)) * clamp(up).
    fn swiglu(&self, gate: f64, up: f64) -> f64 {
        let (gate, up_abs_max) = (gate.min(self.gate_max.into()), f64::from(self.up_abs_max));
        gate / (1.0 + (-gate).exp()) * up.clamp(-up_abs_max, up_abs_max)
    }

    /// The chosen experts, best first, and their weights.
    fn chosen(&self, logits: &[f32]) -> Vec<(usize, f64)> {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        // Adding 0 turns -0 into 0: the two are equal.
        order.sort_by(|a, b| (logits[*b] + 0.0).total_cmp(&(logits[*a] + 0.0)).then(a.cmp(b)));
        let most = f64::from(logits[order[0]]);
        let total: f64 = logits.iter().map(|logit| (f64::from(*logit) - most).exp()).sum();
        let mut chosen: Vec<(usize, f64)> = order[..self.n_used]
            .iter()
            .map(|expert| (*expert, (f64::from(logits[*expert]) - most).exp() / total))
            .collect();
        if self.norm_topk {
            let sum: f64 = chosen.iter().map(|(_, weight)| weight).sum();
            chosen.iter_mut().for_each(|(_, weight)| *weight /= sum);
        }
        chosen
    }
}

/// What `experts_in` leaves: activations, (expert, weight) of those chosen, and the status.
///
/// # Errors
/// Those of the device.
pub(super) fn entered(
    trial: &Trial<'_>,
    experts: &ExpertBlocks,
    row: &[u32],
    logits: &[f32],
    panels: usize,
    status: [u32; 2],
) -> Result<[Vec<u32>; 3], Error> {
    let ExpertBlocks { hidden_size, expert_size, n_used, .. } = *experts;
    let [x0, x1] = experts.split();
    let mut buffers = [
        row.to_vec(),
        words(logits),
        x0,
        x1,
        vec![POISON; n_used * expert_size],
        vec![POISON; 2 * n_used],
        status.to_vec(),
    ];
    let own = [
        ("COLS", hidden_size as f64),
        ("EXPERT_SIZE", expert_size as f64),
        ("N_EXPERTS", logits.len() as f64),
        ("N_USED", n_used as f64),
        ("UP_AT", experts.up_at as f64),
        ("NORM_TOPK", f64::from(u8::from(experts.norm_topk))),
        ("GATE_MAX", experts.gate_max.into()),
        ("UP_ABS_MAX", experts.up_abs_max.into()),
        ("PANELS", panels as f64),
    ];
    let grid = [expert_size.div_ceil(4 * panels) as u32 + 1, n_used as u32, 1];
    trial.run("experts_in", &[experts.constants(), own.to_vec()].concat(), &mut buffers, grid)?;
    let [_, _, _, _, act, chosen, status] = buffers;
    Ok([act, chosen, status])
}

/// `experts_in` of a quantised row: who is chosen, with which weights, their activations, and the status; `panels` of gate and of up
/// to a workgroup.
///
/// # Errors
/// Those of the device.
pub(in crate::backend::wgpu::check) fn experts_in(
    trial: &Trial<'_>,
    experts: &ExpertBlocks,
    logits: &[f32],
    panels: usize,
    seed: u64,
) -> Result<Difference, Error> {
    let ExpertBlocks { hidden_size, expert_size, .. } = *experts;
    let row = Quantized::made(&mut Made::new(seed), hidden_size).row();
    let values = row_values(&row, hidden_size);
    let chosen = experts.chosen(logits);
    let mut expected = Vec::new();
    for &(expert, _) in &chosen {
        let [gate, up] =
            [0, experts.up_at].map(|at| experts.matrix(expert, at, expert_size, hidden_size).times(&values));
        expected.extend(gate.into_iter().zip(up).map(|(gate, up)| experts.swiglu(gate, up)));
    }
    let [act, found, status] = entered(trial, experts, &row, logits, panels, [0, 4])?;
    let (ids, weights): (Vec<u32>, Vec<u32>) =
        found.as_chunks::<2>().0.iter().map(|[id, w]| (*id, *w)).unzip();
    let expected_ids: Vec<u32> = chosen.iter().map(|(expert, _)| *expert as u32).collect();
    let expected_weights: Vec<f64> = chosen.iter().map(|(_, weight)| *weight).collect();
    let found = equal(ids, expected_ids)
        .max(equal(status, vec![0, 5]))
        .max(worst(&weights, &expected_weights))
        .max(worst(&act, &expected));
    Ok(Difference::of("experts_in", found))
}

/// The status that `experts_in` leaves in layer 5 (of those counted from 0) when its logits are these.
///
/// # Errors
/// Those of the device.
#[cfg(test)]
pub(super) fn status_of(
    trial: &Trial<'_>,
    experts: &ExpertBlocks,
    logits: &[f32],
    before: u32,
) -> Result<Vec<u32>, Error> {
    let row = Quantized::made(&mut Made::new(1), experts.hidden_size).row();
    let [_, chosen, status] = entered(trial, experts, &row, logits, 1, [before, 5])?;
    assert!(chosen.as_chunks::<2>().0.iter().all(|[expert, _]| (*expert as usize) < logits.len()));
    Ok(status)
}

/// Whether all activations of a row with a scale that is no number are none either.
///
/// # Errors
/// Those of the device.
#[cfg(test)]
pub(super) fn experts_in_keeps_nan(
    trial: &Trial<'_>,
    experts: &ExpertBlocks,
    logits: &[f32],
) -> Result<bool, Error> {
    let mut x = Quantized::made(&mut Made::new(1), experts.hidden_size);
    x.lose_unit(experts.hidden_size / 2);
    let [act, ..] = entered(trial, experts, &x.row(), logits, 1, [0, 0])?;
    Ok(act.iter().all(|act| f32::from_bits(*act).is_nan()))
}

/// `experts_out` of made-up activations of `chosen` (expert, weight), `panels` to a workgroup.
///
/// # Errors
/// Those of the device.
pub(in crate::backend::wgpu::check) fn experts_out(
    trial: &Trial<'_>,
    experts: &ExpertBlocks,
    chosen: &[(u32, f32)],
    panels: usize,
    seed: u64,
) -> Result<Difference, Error> {
    let ExpertBlocks { hidden_size, expert_size, .. } = *experts;
    let made = &mut Made::new(seed);
    let act = made.values(chosen.len() * expert_size, 3.0);
    let h = made.values(hidden_size, 1.0);
    let mut expected: Vec<Within> = h.iter().map(|h| Within { value: f64::from(*h), slack: 0.0 }).collect();
    for (&(expert, weight), act) in chosen.iter().zip(act.chunks_exact(expert_size)) {
        let act: Vec<f64> = act.iter().copied().map(f64::from).collect();
        let down = experts.matrix(expert as usize, experts.down_at, hidden_size, expert_size);
        for (sum, y) in expected.iter_mut().zip(Quantized::of(&act).times(&down.weights)) {
            sum.value += f64::from(weight) * y.value;
            sum.slack += f64::from(weight) * y.slack;
        }
    }
    let [x0, x1] = experts.split();
    let pairs = chosen.iter().flat_map(|(expert, weight)| [*expert, weight.to_bits()]).collect();
    let mut buffers = [words(&act), pairs, x0, x1, words(&h)];
    let own = [
        ("ROWS", hidden_size as f64),
        ("COLS", expert_size as f64),
        ("Q_ROWS", chosen.len() as f64),
        ("DOWN_AT", experts.down_at as f64),
        ("PANELS", panels as f64),
    ];
    let grid = [hidden_size.div_ceil(4 * panels) as u32, 1, 1];
    trial.run("experts_out", &[experts.constants(), own.to_vec()].concat(), &mut buffers, grid)?;
    Ok(Difference::of("experts_out", worst_within(&buffers[4], &expected)))
}
