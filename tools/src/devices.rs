//! `samara devices`: what a model can run on.

use anyhow::Result;
use samara_runtime::{adapters, backends};
use samara_simd::Kernels;
use serde_json::json;

use crate::{
    cli::Devices,
    machine::{Machine, adapter_json, adapter_lines},
    output::{json as print_json, line},
};

pub(crate) fn run(args: &Devices) -> Result<()> {
    let (machine, adapters, backends) = (Machine::detect(), adapters(), backends(Kernels::detect()));
    let names = backends.iter().map(|backend| backend.name()).chain(["gpu"]);
    if args.json {
        return Ok(print_json(&json!({
            "cpu": { "name": machine.cpu, "threads": machine.threads },
            "backends": names.collect::<Vec<_>>(),
            "gpus": adapters.iter().map(adapter_json).collect::<Vec<_>>(),
        }))?);
    }
    line(&format!("cpu        {}, {} threads usable", machine.cpu, machine.threads))?;
    line("reference  the slow exact definition, on the CPU")?;
    Ok(adapter_lines(&adapters).iter().try_for_each(|text| line(text))?)
}

/// Starts the program again with an XDG_RUNTIME_DIR if there is none: some drivers write to standard error without
/// one, and a running process cannot safely give itself a variable. What it names holds no socket, so that nothing
/// is connected to.
#[cfg(target_os = "linux")]
pub(crate) fn silence_drivers() {
    use std::{env, os::unix::process::CommandExt, path::Path, process::Command};

    const VARIABLE: &str = "XDG_RUNTIME_DIR";
    if env::var_os(VARIABLE).is_some_and(|folder| Path::new(&folder).is_absolute()) {
        return;
    }
    let (mut args, Ok(program)) = (env::args_os(), env::current_exe()) else { return };
    // Given to a loader by name (`ld-linux-x86-64.so.2 samara`), what runs is the loader, and it would not know its arguments.
    if program.file_name().is_some_and(|name| name.to_string_lossy().contains(".so")) {
        return;
    }
    let mut command = Command::new(program);
    if let Some(name) = args.next() {
        command.arg0(name);
    }
    // Comes back only if it failed; then the drivers may speak.
    let _ = command.args(args).env(VARIABLE, "/nonexistent").exec();
}

/// Elsewhere drivers say nothing.
#[cfg(not(target_os = "linux"))]
pub(crate) fn silence_drivers() {}
