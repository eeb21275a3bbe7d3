//! The instruction sets there are kernels for, and whether this machine may run them.

use std::fmt;
use std::str::FromStr;

/// An instruction set with kernels of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust, on every machine: the definition of each operation.
    Scalar,
    /// x86-64 with AVX2.
    Avx2,
}

/// Why an instruction set cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name is not one of [`Isa::ALL`].
    #[error("unknown instruction set {name:?}; known are scalar and avx2")]
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
    /// Every instruction set, slowest first.
    pub const ALL: [Isa; 2] = [Isa::Scalar, Isa::Avx2];

    /// The name used in `--isa` and in a printed [`KernelId`](crate::KernelId).
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
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
