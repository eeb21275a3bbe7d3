//! GPUs through wgpu: adapters, and the backend that runs blocks on one of them.
//!
//! `device` is an opened adapter, `plan` what a segment consists of, `weights` how it gets there, `layer` and `head` which kernels
//! run with which constants and buffers, `segment` a step and `ahead` decoding that does not wait for the host, `check`
//! whether the device computes what the CPU does.

mod ahead;
mod backend;
mod bandwidth;
mod check;
mod clock;
mod device;
mod head;
mod inventory;
mod layer;
mod measure;
mod ops;
mod pace;
mod plan;
mod segment;
mod staging;
#[cfg(test)]
mod tests;
mod weights;

use std::sync::OnceLock;

use super::Backend;
use crate::error::Error;

/// A GPU as its driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// Stable between runs on the same machine: API, PCI ids, and a count for identical cards.
    pub id: String,
    /// Marketing name.
    pub name: String,
    /// `Vulkan`, `Dx12` or `Metal`.
    pub api: String,
    /// Discrete, integrated, software, …
    pub kind: String,
    /// Driver name and version.
    pub driver: String,
    /// Largest storage buffer binding, bytes.
    pub max_binding: u64,
    /// Largest buffer, bytes.
    pub max_buffer: u64,
    /// Renders on the CPU: never chosen unless asked for.
    pub software: bool,
}

/// Every adapter that a Vulkan, DX12 or Metal driver offers; empty on a machine without one.
pub fn adapters() -> Vec<Adapter> {
    each_adapter().map(|(_, adapter)| adapter).collect()
}

const BACKENDS: wgpu::Backends =
    wgpu::Backends::VULKAN.union(wgpu::Backends::DX12).union(wgpu::Backends::METAL);

/// The way to the drivers, made once in a process: some do not bear being loaded and unloaded again and again.
fn instance() -> &'static wgpu::Instance {
    static INSTANCE: OnceLock<wgpu::Instance> = OnceLock::new();
    INSTANCE.get_or_init(|| {
        let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
        descriptor.backends = BACKENDS;
        wgpu::Instance::new(descriptor)
    })
}

/// Every adapter with its description, in the order of [`adapters`].
fn each_adapter() -> impl Iterator<Item = (wgpu::Adapter, Adapter)> {
    let mut seen: Vec<String> = Vec::new();
    pollster::block_on(instance().enumerate_adapters(BACKENDS)).into_iter().map(move |adapter| {
        let stem = stem(&adapter.get_info());
        let twins = seen.iter().filter(|other| **other == stem).count();
        let id = if twins == 0 { stem.clone() } else { format!("{stem}:{twins}") };
        seen.push(stem);
        let description = describe(&adapter, id);
        (adapter, description)
    })
}

/// API and PCI ids.
fn stem(info: &wgpu::AdapterInfo) -> String {
    format!("{:?}:{:04x}:{:04x}", info.backend, info.vendor, info.device).to_lowercase()
}

fn describe(adapter: &wgpu::Adapter, id: String) -> Adapter {
    let info = adapter.get_info();
    let limits = adapter.limits();
    Adapter {
        id,
        name: info.name,
        api: format!("{:?}", info.backend),
        kind: format!("{:?}", info.device_type),
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
        max_binding: limits.max_storage_buffer_binding_size,
        max_buffer: limits.max_buffer_size,
        software: info.device_type == wgpu::DeviceType::Cpu,
    }
}

/// The backend named `gpu` on the adapter of this index in [`adapters`]. Its device is opened unless the process has it
/// open: compiling kernels takes longer than anything else about a model.
///
/// # Errors
/// [`Error::NoDevice`] when there is no such adapter, or its driver refuses.
pub(super) fn open(index: usize) -> Result<Box<dyn Backend>, Error> {
    Ok(Box::new(backend::GpuBackend::new(device::Gpu::shared(index)?)))
}
