//! GPU kernels as data: WGSL text, and what reflection says a backend must bind to run it.
//!
//! Each file of `wgsl/` is one kernel with one compute entry point of the same name; pieces that kernels share are in `wgsl/lib`.
//! A kernel has a text for each [`Variant`]. The build script has naga parse and validate every text and write it as SPIR-V, MSL
//! and HLSL, and turns the kernel into a row of [`KERNELS`]; a shader that fails is a build error with file, line and column.
//! Dimensions are pipeline-overridable constants. Nothing here touches a GPU, so this crate proves that a kernel is well formed, not
//! that its numbers are right: that comparison belongs to the backend that can run it.

#![forbid(unsafe_code)]

#[cfg(test)]
mod expand;
#[cfg(test)]
mod validate;

use std::fmt;

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// Which of its texts a kernel is run with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Variant {
    /// Sums are made with subgroup operations; subgroups have at least 8 invocations. Otherwise through workgroup memory.
    pub subgroups: bool,
    /// Dot products of bytes with `dot4I8Packed`; otherwise spelled out.
    pub packed_dot: bool,
}

impl Variant {
    /// Every variant, the one that runs anywhere first.
    pub const ALL: [Variant; 4] = [
        Variant { subgroups: false, packed_dot: false },
        Variant { subgroups: false, packed_dot: true },
        Variant { subgroups: true, packed_dot: false },
        Variant { subgroups: true, packed_dot: true },
    ];

    /// For messages and tables: `subgroup+packed`.
    pub const fn name(self) -> &'static str {
        match (self.subgroups, self.packed_dot) {
            (false, false) => "shared+plain",
            (false, true) => "shared+packed",
            (true, false) => "subgroup+plain",
            (true, true) => "subgroup+packed",
        }
    }

    const fn index(self) -> usize {
        2 * self.subgroups as usize + self.packed_dot as usize
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One validated kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kernel {
    /// Name of the file without its ending.
    pub name: &'static str,
    /// WGSL text by [`Variant::index`].
    sources: [&'static str; 4],
    /// What the text depends on.
    uses: Variant,
    /// Name of the compute entry point.
    pub entry_point: &'static str,
    /// Invocations in a workgroup, by axis.
    pub workgroup_size: [u32; 3],
    /// Bytes of workgroup memory the kernel declares, with the constants' defaults and in the variant that takes most.
    pub workgroup_memory: u32,
    /// Resources to bind, in (group, binding) order.
    pub bindings: &'static [Binding],
    /// What the host may set when it makes a pipeline.
    pub constants: &'static [Constant],
}

impl Kernel {
    /// WGSL text.
    pub const fn source(&self, variant: Variant) -> &'static str {
        self.sources[variant.index()]
    }

    /// `variant` without what makes no difference to this kernel: two variants with equal results have equal texts.
    pub const fn reduced(&self, variant: Variant) -> Variant {
        Variant {
            subgroups: variant.subgroups && self.uses.subgroups,
            packed_dot: variant.packed_dot && self.uses.packed_dot,
        }
    }

    /// The variants with different texts.
    pub fn variants(&self) -> impl Iterator<Item = Variant> + '_ {
        Variant::ALL.into_iter().filter(|&variant| self.reduced(variant) == variant)
    }
}

/// A run-time sized array in a storage buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binding {
    /// `@group` number.
    pub group: u32,
    /// `@binding` number.
    pub binding: u32,
    /// Name of the variable in the WGSL text.
    pub name: &'static str,
    /// Bytes from one element to the next.
    pub stride: u32,
    /// Whether the kernel writes to it.
    pub writable: bool,
}

/// A pipeline-overridable constant.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Constant {
    /// Name in the WGSL text.
    pub name: &'static str,
    /// Its value if the host gives none; 0 and 1 for a bool.
    pub default: f64,
}

/// The kernel called `name`, if there is one.
pub fn kernel(name: &str) -> Option<&'static Kernel> {
    KERNELS.binary_search_by(|kernel| kernel.name.cmp(name)).ok().map(|i| &KERNELS[i])
}

#[cfg(test)]
mod tests;
