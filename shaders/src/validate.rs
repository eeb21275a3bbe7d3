//! Checks one WGSL kernel and reads off what a backend must know to launch it.
//!
//! The build script and the tests compile this same file, so the tests can show that what the build relies on does refuse a
//! broken shader. A kernel passes only if naga parses it, validates it, and, with its constants at their defaults, can write it as
//! SPIR-V, MSL and HLSL: what one driver accepts is then not found to be impossible on another at run time. It runs nothing;
//! whether the numbers are right is for a GPU backend to show.

use crate::expand::Expanded;
use naga::back::PipelineConstants;
use naga::{AddressSpace, Expression, Literal, Module, ShaderStage, StorageAccess, back, valid};
use std::fmt;

/// What reflection found in one kernel.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Reflected {
    pub(crate) entry_point: String,
    pub(crate) workgroup_size: [u32; 3],
    /// Bytes of workgroup memory, with the defaults.
    pub(crate) workgroup_memory: u32,
    /// In (group, binding) order.
    pub(crate) bindings: Vec<ReflectedBinding>,
    /// In the order of the text.
    pub(crate) constants: Vec<ReflectedConstant>,
}

/// A storage array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReflectedBinding {
    pub(crate) group: u32,
    pub(crate) binding: u32,
    pub(crate) name: String,
    /// Bytes from one element of the array to the next.
    pub(crate) stride: u32,
    pub(crate) writable: bool,
}

/// A pipeline-overridable constant.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ReflectedConstant {
    pub(crate) name: String,
    pub(crate) default: f64,
}

/// Why a kernel was refused. Shown as `file:line:column: message`, with what naga says about it underneath.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) file: String,
    /// 1-based line and column, where the fault has a place.
    pub(crate) at: Option<(u32, u32)>,
    pub(crate) message: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file)?;
        if let Some((line, column)) = self.at {
            write!(f, ":{line}:{column}")?;
        }
        write!(f, ": {}", self.message)
    }
}

/// Parses, validates and translates `source`, and reflects its one compute entry point.
pub(crate) fn validate(source: &Expanded) -> Result<Reflected, Refusal> {
    let refuse = |message: String| Refusal { file: source.file().to_owned(), at: None, message };
    let placed = |at: Option<naga::SourceLocation>, message: String| match at {
        None => refuse(message),
        Some(at) => {
            let (file, line) = source.place(at.line_number);
            Refusal { file: file.to_owned(), at: Some((line, at.line_position)), message }
        }
    };
    // naga's own drawing of the place counts the lines of the whole text.
    let shown = format!("{} with its pieces", source.file());
    let text = source.text.as_str();
    let module = naga::front::wgsl::parse_str(text)
        .map_err(|e| placed(e.location(text), e.emit_to_string_with_path(text, &shown)))?;
    let info = valid::Validator::new(valid::ValidationFlags::all(), valid::Capabilities::SUBGROUP)
        .validate(&module)
        .map_err(|e| placed(e.location(text), e.emit_to_string_with_path(text, &shown)))?;
    let constants = constants(&module).map_err(refuse)?;
    let (fixed, info) =
        back::pipeline_constants::process_overrides(&module, &info, None, &PipelineConstants::default())
            .map_err(|e| refuse(format!("is not valid with its constants' defaults: {e}")))?;
    let reflected = reflect(&fixed, constants).map_err(refuse)?;
    translate(&fixed, &info, &reflected.entry_point).map_err(refuse)?;
    Ok(reflected)
}

/// Writes the module for every graphics API a backend may meet, and throws the result away.
fn translate(module: &Module, info: &valid::ModuleInfo, entry_point: &str) -> Result<(), String> {
    let spirv = back::spv::Options { lang_version: (1, 3), ..Default::default() };
    back::spv::write_vec(module, info, &spirv, None)
        .map_err(|e| format!("cannot be written as SPIR-V: {e}"))?;

    let msl = back::msl::Options { lang_version: (2, 1), ..Default::default() };
    let (_, translated) = back::msl::write_string(module, info, &msl, &back::msl::PipelineOptions::default())
        .map_err(|e| format!("cannot be written as MSL: {e}"))?;
    for name in translated.entry_point_names {
        name.map_err(|e| format!("entry point {entry_point} cannot be written as MSL: {e}"))?;
    }

    // DX12 without DXC has 6_0 at most, where naga spells the packed dot product out.
    for shader_model in [back::hlsl::ShaderModel::V6_0, back::hlsl::ShaderModel::V6_4] {
        let hlsl = back::hlsl::Options { shader_model, ..Default::default() };
        let mut text = String::new();
        back::hlsl::Writer::new(&mut text, &hlsl, &back::hlsl::PipelineOptions::default())
            .write(module, info, None)
            .map_err(|e| format!("cannot be written as HLSL {}: {e}", shader_model.to_str()))?;
    }
    Ok(())
}

/// Constants with a literal default. Those computed from others are not for the host to set.
fn constants(module: &Module) -> Result<Vec<ReflectedConstant>, String> {
    let mut constants = Vec::new();
    for (_, constant) in module.overrides.iter() {
        let Some(name) = constant.name.clone() else { continue };
        let init = constant.init.ok_or_else(|| format!("constant {name} has no default"))?;
        let default = match module.global_expressions[init] {
            Expression::Literal(Literal::U32(value)) => f64::from(value),
            Expression::Literal(Literal::I32(value)) => f64::from(value),
            Expression::Literal(Literal::F32(value)) => f64::from(value),
            Expression::Literal(Literal::Bool(value)) => f64::from(u8::from(value)),
            _ => continue,
        };
        constants.push(ReflectedConstant { name, default });
    }
    Ok(constants)
}

fn reflect(module: &Module, constants: Vec<ReflectedConstant>) -> Result<Reflected, String> {
    let [entry] = module.entry_points.as_slice() else {
        let found = module.entry_points.len();
        return Err(format!("has {found} entry points; a kernel file has exactly one"));
    };
    if entry.stage != ShaderStage::Compute {
        return Err(format!(
            "entry point {} is a {:?} stage; kernels are compute shaders",
            entry.name, entry.stage
        ));
    }
    let mut layouter = naga::proc::Layouter::default();
    layouter.update(module.to_ctx()).map_err(|e| format!("has a type without a layout: {e}"))?;

    let mut workgroup_memory = 0;
    let mut bindings = Vec::new();
    for (_, global) in module.global_variables.iter() {
        let name = global.name.clone().unwrap_or_default();
        let (stride, writable) = match global.space {
            AddressSpace::WorkGroup => {
                workgroup_memory += layouter[global.ty].size;
                continue;
            }
            AddressSpace::Private => continue,
            AddressSpace::Storage { access } => {
                let stride = array_stride(module, global.ty)
                    .ok_or_else(|| format!("storage buffer {name} is not a run-time sized array"))?;
                (stride, access.contains(StorageAccess::STORE))
            }
            other => return Err(format!("{name} is in the address space {other:?}, which no backend binds")),
        };
        let at = global.binding.ok_or_else(|| format!("{name} has no @group and @binding"))?;
        bindings.push(ReflectedBinding { group: at.group, binding: at.binding, name, stride, writable });
    }
    bindings.sort_by_key(|b| (b.group, b.binding));
    if let Some(pair) = bindings.windows(2).find(|w| (w[0].group, w[0].binding) == (w[1].group, w[1].binding))
    {
        let (a, b) = (&pair[0], &pair[1]);
        return Err(format!("{} and {} share @group({}) @binding({})", a.name, b.name, a.group, a.binding));
    }
    Ok(Reflected {
        entry_point: entry.name.clone(),
        workgroup_size: entry.workgroup_size,
        workgroup_memory,
        bindings,
        constants,
    })
}

fn array_stride(module: &Module, ty: naga::Handle<naga::Type>) -> Option<u32> {
    match module.types[ty].inner {
        naga::TypeInner::Array { stride, size: naga::ArraySize::Dynamic, .. } => Some(stride),
        _ => None,
    }
}
