//! The instruction sets there are kernels for, and whether this machine may run them.

use std::fmt;
use std::str::FromStr;

/// An instruction set with kernels of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust, on every machine: the definition of each operation.
    Scalar,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX2, FMA and the integer dot product of AVX-VNNI.
    AvxVnni,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with the integer dot product of VNNI.
    Avx512Vnni,
    /// aarch64.
    Neon,
    /// aarch64 with the integer dot product.
    NeonDotprod,
}

/// Why an instruction set cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name is not one of [`Isa::ALL`].
    #[error("unknown instruction set {name:?}; known are {}", Isa::ALL.map(Isa::name).join(", "))]
    UnknownIsa {
        /// The name as given.
        name: String,
    },
    /// The CPU lacks the instructions, or the operating system does not save their registers.
    #[error(
        "this machine cannot run {isa} kernels: the CPU or the operating system does not offer them; use scalar"
    )]
    IsaUnavailable {
        /// The instruction set that was asked for.
        isa: Isa,
    },
}

impl Isa {
    /// Every instruction set; of one architecture, slowest first.
    pub const ALL: [Isa; 7] =
        [Isa::Scalar, Isa::Avx2, Isa::AvxVnni, Isa::Avx512, Isa::Avx512Vnni, Isa::Neon, Isa::NeonDotprod];

    /// The name used in `--isa` and in a printed [`KernelId`](crate::KernelId).
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avx-vnni",
            Isa::Avx512 => "avx512",
            Isa::Avx512Vnni => "avx512-vnni",
            Isa::Neon => "neon",
            Isa::NeonDotprod => "neon-dotprod",
        }
    }

    /// Whether it belongs to the architecture this program was built for.
    pub fn is_native(self) -> bool {
        match self {
            Isa::Scalar => true,
            Isa::Avx2 | Isa::AvxVnni | Isa::Avx512 | Isa::Avx512Vnni => cfg!(target_arch = "x86_64"),
            Isa::Neon | Isa::NeonDotprod => cfg!(target_arch = "aarch64"),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = Error;

    fn from_str(name: &str) -> Result<Isa, Error> {
        Isa::ALL
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| Error::UnknownIsa { name: name.to_owned() })
    }
}
