//! GPUs through wgpu. So far this lists adapters; the backend that runs blocks on them comes with its
//! kernels, and until then `--device gpu` is refused.

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
    let backends = wgpu::Backends::VULKAN | wgpu::Backends::DX12 | wgpu::Backends::METAL;
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = backends;
    let instance = wgpu::Instance::new(descriptor);
    let mut adapters: Vec<Adapter> = Vec::new();
    for adapter in pollster::block_on(instance.enumerate_adapters(backends)) {
        let info = adapter.get_info();
        let limits = adapter.limits();
        let stem = format!("{:?}:{:04x}:{:04x}", info.backend, info.vendor, info.device).to_lowercase();
        let twins = adapters.iter().filter(|other| other.id.starts_with(&stem)).count();
        adapters.push(Adapter {
            id: if twins == 0 { stem } else { format!("{stem}:{twins}") },
            name: info.name,
            api: format!("{:?}", info.backend),
            kind: format!("{:?}", info.device_type),
            driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
            max_binding: limits.max_storage_buffer_binding_size,
            max_buffer: limits.max_buffer_size,
            software: info.device_type == wgpu::DeviceType::Cpu,
        });
    }
    adapters
}
