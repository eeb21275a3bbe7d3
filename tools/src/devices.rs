//! `samara devices`: what a model can run on.

use anyhow::Result;
use samara_runtime::{adapters, backends};
use serde_json::json;

use crate::{
    cli::Devices,
    machine::{Machine, adapter_json, adapter_text},
    output::{json as print_json, line},
};

pub(crate) fn run(args: &Devices) -> Result<()> {
    let (machine, adapters, backends) = (Machine::detect(), adapters(), backends());
    let names: Vec<&str> = backends.iter().map(|backend| backend.name()).collect();
    if args.json {
        return Ok(print_json(&json!({
            "cpu": { "name": machine.cpu, "threads": machine.threads },
            "backends": names,
            "gpus": adapters.iter().map(adapter_json).collect::<Vec<_>>(),
        }))?);
    }
    line(&format!("cpu        {}, {} threads usable", machine.cpu, machine.threads))?;
    line("reference  the slow exact definition, on the CPU")?;
    if adapters.is_empty() {
        line("gpu        none found")?;
    }
    for adapter in &adapters {
        line(&format!("gpu        {}", adapter_text(adapter)))?;
    }
    if !names.contains(&"gpu") {
        line("This build has no GPU backend: GPUs are listed, and models run on the CPU.")?;
    }
    Ok(())
}
