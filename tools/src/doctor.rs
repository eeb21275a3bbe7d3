//! `samara doctor`: what this machine offers and what Samara makes of it.

use anyhow::Result;
use samara_runtime::{Adapter, adapters, format_bytes};
use samara_simd::{Isa, Kernels};
use serde_json::{Value, json};

use crate::{
    cli::Doctor,
    machine::{Machine, adapter_lines},
    output::{json as print_json, line},
};

pub(crate) fn run(args: &Doctor) -> Result<()> {
    let (machine, adapters, kernels) = (Machine::detect(), adapters(), Kernels::detect());
    if args.json {
        print_json(&to_json(&machine, &adapters, &kernels))?;
    } else {
        to_text(&machine, &adapters, &kernels).iter().try_for_each(|text| line(text))?;
    }
    Ok(())
}

/// Whether this machine can run the kernels of an instruction set.
fn runs(isa: Isa) -> bool {
    Kernels::for_isa(isa).is_ok()
}

fn to_json(machine: &Machine, adapters: &[Adapter], kernels: &Kernels) -> Value {
    let isas = Isa::ALL.iter().map(|isa| json!({ "name": isa.name(), "available": runs(*isa) }));
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "machine": machine.to_json(adapters),
        "instruction_sets": isas.collect::<Vec<_>>(),
        "chosen": kernels.isa().name(),
        "kernels": kernels.ids().iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}

fn to_text(machine: &Machine, adapters: &[Adapter], kernels: &Kernels) -> Vec<String> {
    let cores = machine.physical_cores.map_or_else(|| "unknown".to_owned(), |n| n.to_string());
    let mut lines = vec![
        format!("samara     {}, {}", env!("CARGO_PKG_VERSION"), machine.system),
        format!("cpu        {}; {cores} cores, {} threads usable", machine.cpu, machine.threads),
        format!("features   {}", machine.features.join(" ")),
    ];
    lines.extend(Isa::ALL.iter().map(|isa| {
        let state = match (runs(*isa), *isa == kernels.isa()) {
            (true, true) => "available, taken unless another is faster on a model's weights",
            (true, false) => "available",
            (false, _) => "not on this machine",
        };
        format!("kernels    {isa}: {state}")
    }));
    let (total, available) = (format_bytes(machine.memory_total), format_bytes(machine.memory_available));
    lines.push(format!("memory     {total}, {available} available"));
    if let Some(limit) = machine.memory_limit {
        lines.push(format!("           limited to {} by the control group", format_bytes(limit)));
    }
    if let Some(left) = machine.process_left {
        lines.push(format!("           the limits of this process (ulimit) leave {}", format_bytes(left)));
    }
    let page = machine.page_size.map_or_else(|| "unknown".to_owned(), |size| format!("{size} bytes"));
    lines.push(format!("page size  {page}"));
    lines.extend(adapter_lines(adapters));
    lines
}
