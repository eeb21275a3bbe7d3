//! One opened GPU: its device and queue, what it can do, and its pipelines.
//!
//! wgpu reports most faults later and elsewhere. All of them end up here: what no error scope caught is kept as text, a
//! lost device with its reason, and [`Gpu::check`] turns either into an error at the next chance. Nothing here panics
//! because a driver failed.

use std::{
    collections::HashMap,
    fmt,
    num::NonZeroU64,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use samara_shaders::{Kernel, Variant};

use super::{Adapter, each_adapter};
use crate::error::Error;

/// Fewest and most invocations of a subgroup that the kernels are written for.
const SUBGROUP_SIZES: [u32; 2] = [8, 128];

/// A submission that takes longer never ends.
const STUCK: Duration = Duration::from_secs(300);

/// A constant that all kernels with subgroup operations have.
const SUBGROUP_MIN: &str = "SUBGROUP_MIN";

/// Storage that kernels read and write, filled and read back by copies.
pub(super) const STORAGE: wgpu::BufferUsages =
    wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_DST).union(wgpu::BufferUsages::COPY_SRC);

/// Buffers are at least this long, bytes, so that any kernel may be given any of them.
pub(super) const MIN_BUFFER: u64 = 16;

/// An opened adapter.
pub(super) struct Gpu {
    adapter: Adapter,
    device: wgpu::Device,
    queue: wgpu::Queue,
    /// Longest buffer that a kernel may be given, bytes.
    max_buffer: u64,
    /// Fewest invocations of a subgroup.
    subgroup_min: u32,
    variants: Vec<Variant>,
    /// Nanoseconds of a tick of timestamps, if the device has them.
    tick: Option<f32>,
    trouble: Arc<Trouble>,
    pipelines: Arc<Mutex<HashMap<PipelineKey, Slot>>>,
    /// What is wrong on purpose.
    #[cfg(test)]
    fault: Mutex<Option<Fault>>,
}

/// A constant that one kernel is given another value of, in these variants: to see that checks see it.
#[cfg(test)]
#[derive(Clone, Debug)]
pub(super) struct Fault {
    pub(super) kernel: &'static str,
    pub(super) constant: &'static str,
    pub(super) value: f64,
    pub(super) variants: Vec<Variant>,
}

/// Kernel, variant, and the constants by name, their values as bits.
type PipelineKey = (&'static str, Variant, Vec<(String, u64)>);

/// A kernel once it is compiled. Whoever compiles it holds the lock, so that others wait for it instead of doing it too.
type Slot = Arc<Mutex<Option<Arc<Pipeline>>>>;

/// What has gone wrong and has not been told yet.
#[derive(Default)]
struct Trouble {
    /// Why the device is lost.
    lost: Mutex<Option<String>>,
    /// First error that no scope caught.
    error: Mutex<Option<String>>,
}

/// A compiled kernel.
#[derive(Debug)]
pub(super) struct Pipeline {
    pub(super) kernel: &'static Kernel,
    pub(super) raw: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu").field("adapter", &self.adapter).field("variants", &self.variants).finish()
    }
}

/// A guard, whatever happened to a thread that held it: the values are replaced whole.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpu {
    /// Adapter number `adapter` of [`adapters`](super::adapters) with all the pipelines that were made on it, as long as anything of
    /// this process has it open; otherwise, and when it is lost, it is opened.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when there is no such adapter, or when its driver refuses.
    pub(super) fn shared(adapter: usize) -> Result<Arc<Gpu>, Error> {
        static OPEN: Mutex<Vec<Weak<Gpu>>> = Mutex::new(Vec::new());
        Self::shared_among(&OPEN, adapter)
    }

    fn shared_among(open: &Mutex<Vec<Weak<Gpu>>>, adapter: usize) -> Result<Arc<Gpu>, Error> {
        let (raw, description) = find(adapter)?;
        let mut open = lock(open);
        let fit = |gpu: &Arc<Gpu>| gpu.adapter == description && lock(&gpu.trouble.lost).is_none();
        if let Some(gpu) = open.iter().filter_map(Weak::upgrade).find(fit) {
            return Ok(gpu);
        }
        let gpu = Self::open(&raw, description, u64::MAX)?;
        open.retain(|gpu| gpu.strong_count() > 0);
        open.push(Arc::downgrade(&gpu));
        Ok(gpu)
    }

    /// A device that nothing else uses, with no buffer longer than `max_buffer` bytes.
    ///
    /// # Errors
    /// Those of [`shared`](Self::shared).
    #[cfg(test)]
    pub(super) fn alone(adapter: usize, max_buffer: u64) -> Result<Arc<Gpu>, Error> {
        let (raw, description) = find(adapter)?;
        Self::open(&raw, description, max_buffer)
    }

    fn open(raw: &wgpu::Adapter, description: Adapter, max_buffer: u64) -> Result<Arc<Gpu>, Error> {
        let features = raw.features();
        let wanted = wgpu::Features::SUBGROUP | wgpu::Features::TIMESTAMP_QUERY;
        let limits = raw.limits();
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("samara"),
            required_features: features & wanted,
            required_limits: limits.clone(),
            memory_hints: wgpu::MemoryHints::MemoryUsage,
            ..wgpu::DeviceDescriptor::default()
        };
        // One after another: a driver has been seen to crash when threads opened its device at once.
        static OPENING: Mutex<()> = Mutex::new(());
        let opening = lock(&OPENING);
        let opened = pollster::block_on(raw.request_device(&descriptor));
        drop(opening);
        let (device, queue) = opened.map_err(|error| Error::NoDevice {
            reason: format!(
                "{} cannot be opened: {error}; update its driver, or use --device cpu",
                description.name
            ),
        })?;
        let trouble = Arc::new(Trouble::default());
        let told = Arc::clone(&trouble);
        device.set_device_lost_callback(move |reason, message| {
            lock(&told.lost).get_or_insert_with(|| format!("{message} ({reason:?})"));
        });
        let told = Arc::clone(&trouble);
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            lock(&told.error).get_or_insert_with(|| error.to_string());
        }));
        let info = raw.get_info();
        let sizes = SUBGROUP_SIZES[0]..=SUBGROUP_SIZES[1];
        let subgroups = features.contains(wgpu::Features::SUBGROUP)
            && sizes.contains(&info.subgroup_min_size)
            && sizes.contains(&info.subgroup_max_size);
        let variants = Variant::ALL.into_iter().filter(|variant| subgroups || !variant.subgroups).collect();
        let timestamps = features.contains(wgpu::Features::TIMESTAMP_QUERY);
        let tick = timestamps.then(|| queue.get_timestamp_period());
        let pipelines = Arc::default();
        let max_buffer = max_buffer.min(limits.max_storage_buffer_binding_size).min(limits.max_buffer_size);
        Ok(Arc::new(Gpu {
            adapter: description,
            device,
            queue,
            max_buffer,
            subgroup_min: info.subgroup_min_size,
            variants,
            tick,
            trouble,
            pipelines,
            #[cfg(test)]
            fault: Mutex::default(),
        }))
    }

    /// What the driver says about it.
    pub(super) fn adapter(&self) -> &Adapter {
        &self.adapter
    }

    /// Marketing name and id, for messages.
    pub(super) fn name(&self) -> String {
        format!("{} ({})", self.adapter.name, self.adapter.id)
    }

    pub(super) fn device(&self) -> &wgpu::Device {
        &self.device
    }

    pub(super) fn queue(&self) -> &wgpu::Queue {
        &self.queue
    }

    /// Longest buffer that a kernel may be given, bytes.
    pub(super) fn max_buffer(&self) -> u64 {
        self.max_buffer
    }

    /// Variants of kernels that may run here.
    pub(super) fn variants(&self) -> &[Variant] {
        &self.variants
    }

    /// Nanoseconds of a tick of timestamps, if the device has them.
    pub(super) fn tick(&self) -> Option<f32> {
        self.tick
    }

    /// An error of this device.
    pub(super) fn error(&self, reason: impl Into<String>) -> Error {
        Error::Gpu { device: self.name(), reason: reason.into() }
    }

    /// The device is lost, or something failed that no scope caught.
    ///
    /// # Errors
    /// [`Error::DeviceLost`], now and ever after; [`Error::Gpu`] once for each failure.
    pub(super) fn check(&self) -> Result<(), Error> {
        if let Some(reason) = lock(&self.trouble.lost).clone() {
            return Err(Error::DeviceLost { device: self.name(), reason });
        }
        lock(&self.trouble.error).take().map_or(Ok(()), |reason| Err(self.error(reason)))
    }

    /// Waits until a submission, or all of them, has been carried out.
    ///
    /// # Errors
    /// Those of [`check`](Self::check).
    pub(super) fn wait(&self, submission: Option<wgpu::SubmissionIndex>) -> Result<(), Error> {
        let how = wgpu::PollType::Wait { submission_index: submission, timeout: Some(STUCK) };
        // wgpu panics when the driver says that the device is lost while it waits.
        match catch_unwind(AssertUnwindSafe(|| self.device.poll(how))) {
            Ok(Ok(_)) => {}
            Ok(Err(wgpu::PollError::Timeout)) => {
                let reason = format!("it has not finished in {} seconds", STUCK.as_secs());
                lock(&self.trouble.lost).get_or_insert(reason);
            }
            Ok(Err(error)) => return Err(self.error(error.to_string())),
            Err(_) => {
                let reason = "the driver gave up while it was waited for".to_owned();
                lock(&self.trouble.lost).get_or_insert(reason);
            }
        }
        self.check()
    }

    /// Takes what has been carried out so far, without waiting.
    #[cfg(test)]
    pub(super) fn poll(&self) -> Result<(), Error> {
        if catch_unwind(AssertUnwindSafe(|| self.device.poll(wgpu::PollType::Poll))).is_err() {
            let reason = "the driver gave up".to_owned();
            lock(&self.trouble.lost).get_or_insert(reason);
        }
        self.check()
    }

    /// Runs `work`; an error that wgpu reports meanwhile is returned.
    pub(super) fn scoped<T>(&self, filter: wgpu::ErrorFilter, work: impl FnOnce() -> T) -> Result<T, String> {
        let scope = self.device.push_error_scope(filter);
        let made = work();
        match pollster::block_on(scope.pop()) {
            Some(error) => Err(error.to_string()),
            None => Ok(made),
        }
    }

    /// A kernel compiled with these values of its constants; the others have their defaults. Compiled once.
    ///
    /// # Errors
    /// [`Error::Gpu`] with what the compiler said.
    pub(super) fn pipeline(
        &self,
        kernel: &str,
        variant: Variant,
        constants: &[(&str, f64)],
    ) -> Result<Arc<Pipeline>, Error> {
        let Some(kernel) = samara_shaders::kernel(kernel) else {
            return Err(self.error(format!("this build has no kernel {kernel}")));
        };
        let mut constants = constants.to_vec();
        #[cfg(test)]
        if let Some(fault) = lock(&self.fault).as_ref()
            && fault.kernel == kernel.name
            && fault.variants.contains(&variant)
        {
            let faulty = constants.iter_mut().filter(|(name, _)| *name == fault.constant);
            faulty.for_each(|(_, value)| *value = fault.value);
        }
        if kernel.constants.iter().any(|constant| constant.name == SUBGROUP_MIN) {
            constants.push((SUBGROUP_MIN, f64::from(self.subgroup_min)));
        }
        // wgpu says nothing of a constant that is not there.
        let source = kernel.source(variant);
        if let Some((name, _)) =
            constants.iter().find(|(name, _)| !source.contains(&format!("override {name}: ")))
        {
            return Err(self.error(format!("kernel {} has no constant {name}", kernel.name)));
        }
        let variant = kernel.reduced(variant);
        let values = constants.iter().map(|(name, value)| ((*name).to_owned(), value.to_bits())).collect();
        let slot = Arc::clone(lock(&self.pipelines).entry((kernel.name, variant, values)).or_default());
        let mut compiled = lock(&slot);
        if let Some(pipeline) = &*compiled {
            return Ok(Arc::clone(pipeline));
        }
        let made = self.scoped(wgpu::ErrorFilter::Internal, || {
            self.scoped(wgpu::ErrorFilter::Validation, || self.compile(kernel, variant, &constants))
        });
        let pipeline = made.and_then(|made| made).map_err(|reason| {
            self.error(format!("kernel {}/{} does not compile: {reason}", kernel.name, variant.name()))
        })?;
        self.check()?;
        Ok(Arc::clone(compiled.insert(Arc::new(pipeline))))
    }

    fn compile(&self, kernel: &'static Kernel, variant: Variant, constants: &[(&str, f64)]) -> Pipeline {
        let entries: Vec<_> = kernel
            .bindings
            .iter()
            .map(|binding| wgpu::BindGroupLayoutEntry {
                binding: binding.binding,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: wgpu::BufferBindingType::Storage { read_only: !binding.writable },
                    has_dynamic_offset: false,
                    min_binding_size: NonZeroU64::new(u64::from(binding.stride)),
                },
                count: None,
            })
            .collect();
        let label = Some(kernel.name);
        let descriptor = wgpu::BindGroupLayoutDescriptor { label, entries: &entries };
        let layout = self.device.create_bind_group_layout(&descriptor);
        let pipeline_layout = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label,
            bind_group_layouts: &[Some(&layout)],
            ..wgpu::PipelineLayoutDescriptor::default()
        });
        let module = samara_gpu::module(&self.device, kernel, variant);
        let raw = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label,
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some(kernel.entry_point),
            // Kernels write workgroup memory before they read it.
            compilation_options: wgpu::PipelineCompilationOptions {
                constants,
                zero_initialize_workgroup_memory: false,
            },
            cache: None,
        });
        Pipeline { kernel, raw, layout }
    }

    /// A buffer of `bytes`, at least [`MIN_BUFFER`], a multiple of 4; zeros.
    pub(super) fn buffer(&self, label: &str, bytes: u64, usage: wgpu::BufferUsages) -> wgpu::Buffer {
        self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(label),
            size: buffer_size(bytes),
            usage,
            mapped_at_creation: false,
        })
    }

    /// Binds buffers in the order of the kernel's bindings.
    pub(super) fn bind(&self, pipeline: &Pipeline, buffers: &[wgpu::BindingResource<'_>]) -> wgpu::BindGroup {
        let kernel = pipeline.kernel;
        assert_eq!(buffers.len(), kernel.bindings.len(), "buffers of {}", kernel.name);
        let entries: Vec<_> = kernel
            .bindings
            .iter()
            .zip(buffers)
            .map(|(binding, buffer)| wgpu::BindGroupEntry {
                binding: binding.binding,
                resource: buffer.clone(),
            })
            .collect();
        let descriptor = wgpu::BindGroupDescriptor {
            label: Some(kernel.name),
            layout: &pipeline.layout,
            entries: &entries,
        };
        self.device.create_bind_group(&descriptor)
    }

    /// The words of a buffer from `first` on. For checks and for results that no staging buffer is kept for.
    ///
    /// # Errors
    /// Those of [`check`](Self::check).
    pub(super) fn read(&self, buffer: &wgpu::Buffer, first: u64, words: usize) -> Result<Vec<u32>, Error> {
        let bytes = 4 * words as u64;
        let usage = wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ;
        let staging = self.buffer("read back", bytes, usage);
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(buffer, 4 * first, &staging, 0, bytes);
        let submission = self.queue.submit([encoder.finish()]);
        staging.map_async(wgpu::MapMode::Read, 0..bytes, |_| {});
        self.wait(Some(submission))?;
        let mapped = staging.get_mapped_range(0..bytes).map_err(|error| self.error(error.to_string()))?;
        Ok(words_of(&mapped))
    }

    /// For checks and tests: uploads `buffers` in the order of the kernel's bindings, runs one dispatch, and reads back
    /// those that the kernel writes.
    ///
    /// # Errors
    /// A kernel that does not compile, and those of [`check`](Self::check).
    pub(super) fn run_once(
        &self,
        kernel: &str,
        variant: Variant,
        constants: &[(&str, f64)],
        buffers: &mut [Vec<u32>],
        grid: [u32; 3],
    ) -> Result<(), Error> {
        let pipeline = self.pipeline(kernel, variant, constants)?;
        let uploaded: Vec<_> = buffers
            .iter()
            .map(|words| {
                let buffer = self.buffer(kernel, 4 * words.len() as u64, STORAGE);
                self.queue.write_buffer(&buffer, 0, &bytes_of(words));
                buffer
            })
            .collect();
        let bound = self.scoped(wgpu::ErrorFilter::Validation, || {
            let entire: Vec<_> = uploaded.iter().map(wgpu::Buffer::as_entire_binding).collect();
            let group = self.bind(&pipeline, &entire);
            let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            pass.set_pipeline(&pipeline.raw);
            pass.set_bind_group(0, &group, &[]);
            pass.dispatch_workgroups(grid[0], grid[1], grid[2]);
            drop(pass);
            self.queue.submit([encoder.finish()])
        });
        let submission = bound.map_err(|reason| self.error(format!("{kernel}: {reason}")))?;
        self.wait(Some(submission))?;
        for ((words, buffer), binding) in buffers.iter_mut().zip(&uploaded).zip(pipeline.kernel.bindings) {
            if binding.writable {
                *words = self.read(buffer, 0, words.len())?;
            }
        }
        Ok(())
    }

    /// The same device, with the pipelines made on it, to plant faults in that it does not have itself.
    #[cfg(test)]
    pub(super) fn faulty(&self) -> Arc<Gpu> {
        Arc::new(Gpu {
            adapter: self.adapter.clone(),
            device: self.device.clone(),
            queue: self.queue.clone(),
            variants: self.variants.clone(),
            trouble: Arc::clone(&self.trouble),
            pipelines: Arc::clone(&self.pipelines),
            fault: Mutex::default(),
            ..*self
        })
    }

    /// Pipelines are wrong from now on.
    #[cfg(test)]
    pub(super) fn plant(&self, fault: Fault) {
        *lock(&self.fault) = Some(fault);
    }

    /// Makes the device as good as lost, as a driver would.
    #[cfg(test)]
    pub(super) fn lose(&self) {
        self.device.destroy();
        let _ = self.poll();
    }
}

/// Bytes that a buffer for `bytes` takes.
pub(super) fn buffer_size(bytes: u64) -> u64 {
    bytes.next_multiple_of(4).max(MIN_BUFFER)
}

/// Little-endian words.
pub(super) fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

/// Little-endian bytes.
pub(super) fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn find(adapter: usize) -> Result<(wgpu::Adapter, Adapter), Error> {
    let reason = || format!("this machine has no adapter number {adapter}");
    each_adapter().nth(adapter).ok_or_else(|| Error::NoDevice { reason: reason() })
}

/// The first device, which stays open until the process ends, or a note that a test is skipped. `SAMARA_NO_GPU` says that where
/// this runs there is none.
#[cfg(test)]
pub(super) fn any() -> Option<Arc<Gpu>> {
    static KEPT: Mutex<Option<Arc<Gpu>>> = Mutex::new(None);
    if std::env::var_os("SAMARA_NO_GPU").is_some() {
        println!("skipped: optional: SAMARA_NO_GPU is set");
        return None;
    }
    if super::adapters().is_empty() {
        let reason = "no Vulkan, DX12 or Metal device here";
        assert!(std::env::var_os("SAMARA_NO_SKIPS").is_none(), "cannot run: {reason}");
        println!("skipped: {reason}");
        return None;
    }
    let gpu = Gpu::shared(0).expect("a device that is listed opens");
    Some(Arc::clone(lock(&KEPT).get_or_insert(gpu)))
}

/// The same for what breaks a device: one that no other test has.
#[cfg(test)]
pub(super) fn breakable() -> Option<Arc<Gpu>> {
    any().map(|_| Gpu::alone(0, u64::MAX).expect("a device that is listed opens"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_without_an_adapter_is_an_error() {
        let error = Gpu::shared(99).expect_err("hardly a hundred adapters");
        assert!(matches!(error, Error::NoDevice { .. }), "{error}");
    }

    #[test]
    fn a_lost_device_is_an_error_and_stays_one() {
        let Some(gpu) = breakable() else { return };
        gpu.check().expect("sound");
        gpu.lose();
        for _ in 0..2 {
            let error = gpu.wait(None).expect_err("lost");
            assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
        }
        let buffer = gpu.buffer("after", 64, STORAGE);
        assert!(gpu.read(&buffer, 0, 4).is_err());
    }

    #[test]
    fn an_open_device_is_shared_until_it_is_lost() {
        if any().is_none() {
            return;
        }
        let open = Mutex::default();
        let shared = || Gpu::shared_among(&open, 0).expect("a device");
        let first = shared();
        assert!(Arc::ptr_eq(&first, &shared()));
        first.lose();
        let second = shared();
        second.check().expect("sound");
        assert!(!Arc::ptr_eq(&first, &second) && Arc::ptr_eq(&second, &shared()));
        drop((first, second));
        assert_eq!(lock(&open).iter().filter(|gpu| gpu.strong_count() > 0).count(), 0);
    }

    #[test]
    fn a_fault_that_no_scope_caught_is_told_once() {
        let Some(gpu) = breakable() else { return };
        let _ = gpu.buffer("both", 16, wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::STORAGE);
        let error = gpu.check().expect_err("an invalid usage");
        assert!(error.to_string().contains("both"), "{error}");
        gpu.check().expect("told once");
    }

    #[test]
    fn a_kernel_that_is_not_there_is_named() {
        let Some(gpu) = any() else { return };
        let error = gpu.pipeline("nothing", gpu.variants()[0], &[]).expect_err("no such kernel");
        assert!(error.to_string().contains("nothing"), "{error}");
    }
}
