//! What this machine is: CPU, memory, operating system, as far as it matters to a model and to a record of one.

use samara_runtime::{Adapter, format_bytes};
use serde_json::{Value, json};
use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};

/// The machine, and what of it this process may use.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    /// CPU model, as the system names it.
    pub(crate) cpu: String,
    /// Cores without simultaneous threads, if known.
    pub(crate) physical_cores: Option<usize>,
    /// Threads this process may run at once: affinity and quota counted.
    pub(crate) threads: usize,
    /// Instruction sets of interest that are present.
    pub(crate) features: Vec<&'static str>,
    /// RAM, bytes.
    pub(crate) memory_total: u64,
    /// Bytes that can still be allocated without swapping, control group included.
    pub(crate) memory_available: u64,
    /// Limit of the control group, bytes, if it is below the RAM.
    pub(crate) memory_limit: Option<u64>,
    /// Bytes that this process may still map or allocate by its own limits (`ulimit -v`, `ulimit -d`), if it has any.
    pub(crate) process_left: Option<u64>,
    /// Operating system and architecture.
    pub(crate) system: String,
    /// Bytes of a page, if known.
    pub(crate) page_size: Option<u64>,
}

impl Machine {
    /// Looks.
    pub(crate) fn detect() -> Self {
        let refresh = RefreshKind::nothing()
            .with_cpu(CpuRefreshKind::nothing())
            .with_memory(MemoryRefreshKind::nothing().with_ram());
        let system = System::new_with_specifics(refresh).ok();
        let cgroup = system.as_ref().and_then(System::cgroup_limits);
        let process_left = process_left();
        let total = system.as_ref().map_or(0, System::total_memory);
        // Unknown is no reason to refuse.
        let available = system.as_ref().map_or(u64::MAX, System::available_memory);
        let cpu =
            system.as_ref().and_then(|system| system.cpus().first()).map(|cpu| cpu.brand().trim().to_owned());
        Machine {
            cpu: cpu.unwrap_or_else(|| "unknown".to_owned()),
            physical_cores: System::physical_core_count().ok(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            features: features(),
            memory_total: total,
            // A group's free memory would count the page cache as used, a model's own pages among it.
            memory_available: cgroup
                .as_ref()
                .map_or(available, |limit| available.min(limit.total_memory.saturating_sub(limit.rss)))
                .min(process_left.unwrap_or(u64::MAX)),
            process_left,
            memory_limit: cgroup.map(|limit| limit.total_memory).filter(|limit| *limit < total),
            system: format!(
                "{}, {}",
                System::long_os_version().unwrap_or_else(|_| std::env::consts::OS.to_owned()),
                std::env::consts::ARCH
            ),
            page_size: page_size(),
        }
    }

    /// For a record.
    pub(crate) fn to_json(&self, adapters: &[Adapter]) -> Value {
        json!({
            "cpu": self.cpu,
            "physical_cores": self.physical_cores,
            "usable_threads": self.threads,
            "features": self.features,
            "memory_total": self.memory_total,
            "memory_available": self.memory_available,
            "memory_limit": self.memory_limit,
            "process_memory_left": self.process_left,
            "system": self.system,
            "page_size": self.page_size,
            "gpus": adapters.iter().map(adapter_json).collect::<Vec<_>>(),
        })
    }
}

/// A GPU, for machines.
pub(crate) fn adapter_json(adapter: &Adapter) -> Value {
    let Adapter { id, name, api, kind, driver, max_binding, max_buffer, software } = adapter;
    json!({
        "id": id, "name": name, "api": api, "kind": kind, "driver": driver,
        "max_binding": max_binding, "max_buffer": max_buffer, "software": software,
    })
}

/// GPUs, for people; numbered as `--device` takes them.
pub(crate) fn adapter_lines(adapters: &[Adapter]) -> Vec<String> {
    let line = |(number, adapter): (usize, &Adapter)| {
        let Adapter { id, name, api, kind, driver, max_binding, max_buffer, software } = adapter;
        let kind = if *software { "renders on the CPU, used only by its number" } else { kind };
        let (binding, buffer) = (format_bytes(*max_binding), format_bytes(*max_buffer));
        format!(
            "{:<11}{name} [{id}], {api}, {kind}, driver {driver}; bindings to {binding}, buffers to {buffer}",
            format!("gpu:{number}")
        )
    };
    match adapters {
        [] => vec!["gpu        none found".to_owned()],
        found => found.iter().enumerate().map(line).collect(),
    }
}

macro_rules! present {
    ($detect:ident: $($name:tt),* $(,)?) => {
        [$(($name, std::arch::$detect!($name))),*].into_iter().filter_map(|(name, here)| here.then_some(name)).collect()
    };
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    present!(is_x86_feature_detected:
        "ssse3", "sse4.1", "avx", "f16c", "fma", "avx2", "avxvnni", "avx512f", "avx512bw", "avx512vl", "avx512vnni")
}

#[cfg(target_arch = "aarch64")]
fn features() -> Vec<&'static str> {
    present!(is_aarch64_feature_detected: "neon", "fp16", "dotprod", "i8mm", "bf16", "sve", "sve2")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn features() -> Vec<&'static str> {
    Vec::new()
}

/// From the vector that the kernel hands to each process: pairs of a type and a value, both u64; 6 is the page size.
#[cfg(target_os = "linux")]
fn page_size() -> Option<u64> {
    const AT_PAGESZ: u64 = 6;
    let vector = std::fs::read("/proc/self/auxv").ok()?;
    let (words, _) = vector.as_chunks::<8>();
    words
        .chunks_exact(2)
        .find(|pair| u64::from_ne_bytes(pair[0]) == AT_PAGESZ)
        .map(|pair| u64::from_ne_bytes(pair[1]))
}

/// Windows has pages of 4 KiB on x86-64 and on ARM64.
#[cfg(not(target_os = "linux"))]
fn page_size() -> Option<u64> {
    cfg!(windows).then_some(4096)
}

/// What the limits of this process leave, with all that it has mapped so far counted.
#[cfg(target_os = "linux")]
pub(crate) fn process_left() -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/self/{name}")).ok();
    left(&read("limits")?, &read("status")?)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn process_left() -> Option<u64> {
    None
}

/// The smaller rest of address space and data size, from the kernel's tables of limits and of use.
#[cfg(any(target_os = "linux", test))]
fn left(limits: &str, status: &str) -> Option<u64> {
    let number = |table: &str, row: &str| {
        let rest = table.lines().find_map(|line| line.strip_prefix(row))?;
        rest.split_whitespace().next()?.parse::<u64>().ok()
    };
    let rest = |limit: &str, used: &str| {
        let used = number(status, used)?.checked_mul(1024)?;
        Some(number(limits, limit)?.saturating_sub(used))
    };
    [rest("Max address space", "VmSize:"), rest("Max data size", "VmData:")].into_iter().flatten().min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_sound_numbers() {
        let machine = Machine::detect();
        assert!(machine.threads >= 1 && !machine.cpu.is_empty(), "{machine:?}");
        assert!(machine.memory_total > 0 && machine.memory_available <= machine.memory_total, "{machine:?}");
        assert!(machine.page_size.is_none_or(|size| size.is_power_of_two() && size >= 4096), "{machine:?}");
    }

    #[test]
    fn the_smaller_rest_of_two_limits_counts() {
        let check = |space: &str, data: &str, want: Option<u64>| {
            let limits = format!(
                "Limit                     Soft Limit           Hard Limit           Units     \n\
                 Max data size             {data}            unlimited            bytes     \n\
                 Max address space         {space}            unlimited            bytes     \n"
            );
            let status = "Name:\tsamara\nVmPeak:\t    9000 kB\nVmSize:\t    3000 kB\nVmData:\t     200 kB\n";
            assert_eq!(left(&limits, status), want, "{space} {data}");
        };
        check("unlimited", "unlimited", None);
        check("4096000", "unlimited", Some(4_096_000 - 3000 * 1024));
        check("unlimited", "4096000", Some(4_096_000 - 200 * 1024));
        check("4096000", "4096000", Some(4_096_000 - 3000 * 1024));
        check("4096000", "300000", Some(300_000 - 200 * 1024));
        check("1024", "unlimited", Some(0));
        assert_eq!(left("", ""), None);
    }
}
