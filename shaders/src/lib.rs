//! GPU kernels as data: WGSL text, and what reflection says a backend must bind to run it.
//!
//! Each file of `wgsl/` is one kernel with one compute entry point of the same name. The build script has naga parse and
//! validate it and write it as SPIR-V, MSL and HLSL, and turns it into a row of [`KERNELS`]; a shader that fails is a build
//! error with file, line and column. Nothing here touches a GPU, so this crate proves that a kernel is well formed and fits its
//! host-side structs, not that its numbers are right: that comparison belongs to the backend that can run it.

#![forbid(unsafe_code)]

#[cfg(test)]
mod validate;

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// One validated kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    /// Name of the file without its ending.
    pub name: &'static str,
    /// WGSL text, as in the file.
    pub source: &'static str,
    /// Name of the compute entry point.
    pub entry_point: &'static str,
    /// Invocations in a workgroup, by axis.
    pub workgroup_size: [u32; 3],
    /// Bytes of workgroup memory the kernel declares.
    pub workgroup_memory: u32,
    /// Resources to bind, in (group, binding) order.
    pub bindings: &'static [Binding],
}

impl Kernel {
    /// Size in bytes of the uniform struct bound under `name`, if there is one.
    pub const fn uniform_size(&self, name: &str) -> Option<u32> {
        let mut i = 0;
        while i < self.bindings.len() {
            let binding = &self.bindings[i];
            if let BindingKind::Uniform { size } = binding.kind
                && same(binding.name, name)
            {
                return Some(size);
            }
            i += 1;
        }
        None
    }
}

/// One resource of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binding {
    /// `@group` number.
    pub group: u32,
    /// `@binding` number.
    pub binding: u32,
    /// Name of the variable in the WGSL text.
    pub name: &'static str,
    /// What is bound.
    pub kind: BindingKind,
}

/// The kinds of resource a kernel binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BindingKind {
    /// A uniform struct.
    Uniform {
        /// Bytes.
        size: u32,
    },
    /// A run-time sized array in a storage buffer.
    Storage {
        /// Bytes from one element to the next.
        stride: u32,
        /// Whether the kernel writes to it.
        writable: bool,
    },
}

/// The kernel called `name`, if there is one.
pub const fn kernel(name: &str) -> Option<&'static Kernel> {
    let mut i = 0;
    while i < KERNELS.len() {
        if same(KERNELS[i].name, name) {
            return Some(&KERNELS[i]);
        }
        i += 1;
    }
    None
}

/// Host side of `Params` in `ternary_gemv.wgsl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct TernaryGemvParams {
    /// Rows of the matrix; the dispatch is one workgroup for each 4.
    pub n_rows: u32,
    /// Column blocks of 128, rounded up.
    pub n_col_blocks: u32,
    /// Offset of the codes in the weights buffer, in 4-byte words.
    pub codes_at: u32,
    /// Offset of the bf16 row scales in the weights buffer, in 4-byte words.
    pub scales_at: u32,
}

const _: () = {
    let Some(gemv) = kernel("ternary_gemv") else { panic!("ternary_gemv is not in the table") };
    let Some(size) = gemv.uniform_size("params") else { panic!("ternary_gemv has no uniform named params") };
    assert!(size as usize == size_of::<TernaryGemvParams>());
};

/// `==` for strings, where constants are computed.
const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len() != b.len() {
        return false;
    }
    let mut i = 0;
    while i < a.len() {
        if a[i] != b[i] {
            return false;
        }
        i += 1;
    }
    true
}

#[cfg(test)]
mod tests;
