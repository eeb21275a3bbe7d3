//! What all checks have in common: a kernel is run, perhaps with a fault planted in what the GPU is given, and its results are
//! compared.

use samara_shaders::Variant;

use super::tolerance::tolerance;
use crate::{backend::wgpu::device::Gpu, error::Error};

/// Runs kernels in one variant.
#[derive(Clone, Copy)]
pub(super) struct Trial<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) variant: Variant,
    /// What is wrong on purpose.
    pub(super) fault: Option<Fault>,
}

/// The variants of a kernel that make a difference and that the device can run. A device in software takes a second for a pipeline: of
/// the four of two choices it has the first and the last, which differ in both.
#[cfg(test)]
pub(super) fn variants(gpu: &Gpu, kernel: &str) -> Vec<Variant> {
    let kernel = samara_shaders::kernel(kernel).expect("in the table");
    let all: Vec<Variant> = kernel.variants().filter(|variant| gpu.variants().contains(variant)).collect();
    match all[..] {
        [first, _, _, last] if gpu.adapter().software => vec![first, last],
        _ => all,
    }
}

/// A change of what a kernel is given on the GPU; the CPU does not hear of it. A harness that does not see it is worth nothing.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(test), expect(dead_code, reason = "faults are planted by tests"))]
pub(super) enum Fault {
    /// Kernel, constant, another value of it.
    Constant(&'static str, &'static str, f64),
    /// Kernel, binding, word of its buffer, and the bits to flip.
    Bits(&'static str, usize, usize, u32),
}

/// How far apart two results are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Difference {
    pub(super) kernel: &'static str,
    pub(super) found: f64,
    pub(super) allowed: f64,
}

impl Difference {
    /// `found` is what the table of tolerances means by a difference.
    pub(super) fn of(kernel: &'static str, found: f64) -> Self {
        Difference { kernel, found, allowed: tolerance(kernel) }
    }

    /// Whether it is small enough; NaN is not.
    pub(super) fn is_small(&self) -> bool {
        self.found <= self.allowed
    }
}

impl Trial<'_> {
    /// [`Gpu::run_once`] with the fault.
    ///
    /// # Errors
    /// Those of that.
    pub(super) fn run(
        &self,
        kernel: &str,
        constants: &[(&str, f64)],
        buffers: &mut [Vec<u32>],
        grid: [u32; 3],
    ) -> Result<(), Error> {
        let mut constants = constants.to_vec();
        match self.fault {
            Some(Fault::Constant(of, name, value)) if of == kernel => {
                let constant = constants.iter_mut().find(|(own, _)| *own == name);
                constant.unwrap_or_else(|| panic!("{kernel} is not given {name}")).1 = value;
            }
            Some(Fault::Bits(of, binding, word, bits)) if of == kernel => buffers[binding][word] ^= bits,
            _ => {}
        }
        self.gpu.run_once(kernel, self.variant, &constants, buffers, grid)
    }
}

/// f32 words.
pub(super) fn words(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The values of f32 words.
pub(super) fn floats(words: &[u32]) -> Vec<f32> {
    words.iter().map(|word| f32::from_bits(*word)).collect()
}

/// The largest difference of f32 words from what was expected, divided by the largest value expected. Infinity if one of them is no
/// number.
pub(super) fn worst(found: &[u32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len(), "results compared");
    let largest = expected.iter().fold(f64::MIN_POSITIVE, |largest, value| value.abs().max(largest));
    let worst = found.iter().zip(expected).fold(0.0f64, |worst, (found, expected)| {
        let difference = (f64::from(f32::from_bits(*found)) - expected).abs();
        if difference.is_finite() { worst.max(difference) } else { f64::INFINITY }
    });
    worst / largest
}

/// 0 if two results that must be equal are, else infinity.
pub(super) fn equal<T: PartialEq>(found: T, expected: T) -> f64 {
    if found == expected { 0.0 } else { f64::INFINITY }
}
