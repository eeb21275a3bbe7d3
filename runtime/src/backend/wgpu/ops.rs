//! Dispatches as values: a kernel with its buffers bound, and how its grid follows from a step.
//!
//! Everything but the grid is settled when a segment is compiled. Recording a step is a walk along a list.

use std::{collections::BTreeMap, sync::Arc};

use samara_shaders::Variant;

use super::{
    clock::Clock,
    device::{Gpu, Pipeline},
    inventory::{BufferId, Buffers},
};
use crate::error::Error;

/// What a step's dispatches and their grids depend on.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Extent {
    /// Tokens.
    pub(super) n_tokens: u32,
    /// Whether the step is of one token, for which there are kernels of their own. A piece of a longer step never is, even if it is of one
    /// token: what is computed does not depend on how a step is cut.
    pub(super) decode: bool,
    /// Position of the only token of a step of one.
    pub(super) position: u32,
    /// Rows of logits.
    pub(super) n_logit_rows: u32,
    /// Whether the head may leave rows out.
    pub(super) leaves_out: bool,
}

/// Workgroups of a step; none is no dispatch.
pub(super) type Grid = Box<dyn Fn(&Extent) -> [u32; 3] + Send>;

/// Weight and cache bytes that a step's dispatch reads.
pub(super) type Bytes = Box<dyn Fn(&Extent) -> u64 + Send>;

/// A kernel bound to its buffers.
pub(super) struct Op {
    pipeline: Arc<Pipeline>,
    group: wgpu::BindGroup,
    grid: Grid,
    bytes: Bytes,
}

/// Makes dispatches of kernels in the variants chosen.
pub(super) struct Maker<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) buffers: &'a Buffers,
    pub(super) variants: &'a Variants,
}

/// Which variant of each kernel runs; kernels not named run in the first that the device has.
pub(super) type Variants = BTreeMap<&'static str, Variant>;

impl Maker<'_> {
    /// A kernel with its constants and with the buffers of its bindings.
    ///
    /// # Errors
    /// A kernel that does not compile.
    pub(super) fn op(
        &self,
        kernel: &'static str,
        constants: &[(&str, f64)],
        buffers: &[BufferId],
        grid: impl Fn(&Extent) -> [u32; 3] + Send + 'static,
        bytes: impl Fn(&Extent) -> u64 + Send + 'static,
    ) -> Result<Op, Error> {
        let variant = self.variants.get(kernel).copied().unwrap_or(self.gpu.variants()[0]);
        let pipeline = self.gpu.pipeline(kernel, variant, constants)?;
        let buffers: Vec<_> = buffers.iter().map(|id| self.buffers[*id].as_entire_binding()).collect();
        let group = self
            .gpu
            .scoped(wgpu::ErrorFilter::Validation, || self.gpu.bind(&pipeline, &buffers))
            .map_err(|reason| self.gpu.error(format!("{kernel}: {reason}")))?;
        Ok(Op { pipeline, group, grid: Box::new(grid), bytes: Box::new(bytes) })
    }
}

/// Commands of one submission.
pub(super) struct Recorder<'a> {
    encoder: wgpu::CommandEncoder,
    clock: Option<&'a mut Clock>,
    pub(super) n_dispatches: u64,
}

impl<'a> Recorder<'a> {
    /// With a clock, each dispatch is timed.
    pub(super) fn new(gpu: &Gpu, clock: Option<&'a mut Clock>) -> Self {
        let encoder = gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        Recorder { encoder, clock, n_dispatches: 0 }
    }

    /// Copies and clears between dispatches.
    pub(super) fn encoder(&mut self) -> &mut wgpu::CommandEncoder {
        &mut self.encoder
    }

    /// Dispatches, in order, each with the step it is of.
    pub(super) fn run<'o>(&mut self, ops: impl IntoIterator<Item = (&'o Op, Extent)>) {
        match &mut self.clock {
            None => {
                let mut pass = self.encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                for (op, extent) in ops {
                    self.n_dispatches += u64::from(op.dispatch(&mut pass, &extent));
                }
            }
            Some(clock) => {
                for (op, extent) in ops {
                    let extent = &extent;
                    if (op.grid)(extent).contains(&0) || !clock.has_room(1) {
                        continue;
                    }
                    let descriptor = wgpu::ComputePassDescriptor {
                        label: None,
                        timestamp_writes: Some(clock.around(op.kernel(), (op.bytes)(extent))),
                    };
                    let mut pass = self.encoder.begin_compute_pass(&descriptor);
                    self.n_dispatches += u64::from(op.dispatch(&mut pass, extent));
                }
            }
        }
    }

    /// Hands the commands to the device.
    pub(super) fn submit(mut self, gpu: &Gpu) -> wgpu::SubmissionIndex {
        if let Some(clock) = self.clock {
            clock.resolve(&mut self.encoder);
        }
        gpu.queue().submit([self.encoder.finish()])
    }
}

impl Op {
    /// Its kernel's name.
    pub(super) fn kernel(&self) -> &'static str {
        self.pipeline.kernel.name
    }

    /// Whether there was anything to do.
    fn dispatch(&self, pass: &mut wgpu::ComputePass<'_>, extent: &Extent) -> bool {
        let [x, y, z] = (self.grid)(extent);
        if x == 0 || y == 0 || z == 0 {
            return false;
        }
        pass.set_pipeline(&self.pipeline.raw);
        pass.set_bind_group(0, &self.group, &[]);
        pass.dispatch_workgroups(x, y, z);
        true
    }
}
