//! Shader modules of this workspace's own kernels, without the counter that wgpu adds to every loop.
//!
//! The counter is there so that a shader wgpu does not know cannot run for ever, and it keeps a driver's compiler from unrolling
//! loops: on an NVIDIA H200 a matrix times a vector takes 2.7 times as long (12.8 us against 4.7). The kernels are text of this
//! workspace, so they can be trusted; that is the whole crate, apart from `runtime` because that has no `unsafe`.

use samara_shaders::{Kernel, Variant, kernel};

/// The module of one of the kernels in [`samara_shaders::KERNELS`]. Accesses out of bounds are checked as wgpu always does.
///
/// # Panics
/// If `of` is not one of those.
pub fn module(device: &wgpu::Device, of: &'static Kernel, variant: Variant) -> wgpu::ShaderModule {
    // What is compiled without the counter can only be text that was there when this program was built.
    let own = kernel(of.name).filter(|own| std::ptr::eq(*own, of)).expect("a kernel of the table");
    let source = wgpu::ShaderSource::Wgsl(own.source(variant).into());
    let descriptor = wgpu::ShaderModuleDescriptor { label: Some(own.name), source };
    let checks =
        wgpu::ShaderRuntimeChecks { force_loop_bounding: false, ..wgpu::ShaderRuntimeChecks::default() };
    // SAFETY: without the counter, every loop must end. The text is one of this workspace's kernels, whose loops count up to a
    // constant, to a length, or to a number of tokens, experts or keys.
    unsafe { device.create_shader_module_trusted(descriptor, checks) }
}
