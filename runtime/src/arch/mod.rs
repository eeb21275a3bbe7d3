//! Architectures: from a file's metadata to a list of blocks.
//!
//! One file and one line of [`REGISTRY`] each. Everything a backend will rely on (shapes, dtypes,
//! divisibility) is checked here, once.

mod maple;

use samara_format::Index;

use crate::{error::Error, spec::BlockSpec};

/// What an architecture makes of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Architecture {
    /// Value of `general.architecture`.
    pub name: &'static str,
    /// Embed, layers, head, in the order they run.
    pub blocks: Vec<BlockSpec>,
    /// Rows of the embedding and of the logits.
    pub vocab_size: usize,
    /// Width of the residual.
    pub hidden_size: usize,
    /// Positions the model was made for.
    pub max_context: usize,
}

type Build = fn(&Index) -> Result<Architecture, Error>;

const REGISTRY: &[(&str, Build)] = &[(maple::NAME, maple::build)];

impl Architecture {
    /// Reads the architecture named in the metadata.
    ///
    /// # Errors
    /// An unknown name, a missing key, or a tensor that is absent or of another shape.
    pub fn from_index(index: &Index) -> Result<Self, Error> {
        let name = index.metadata().str("general.architecture")?;
        match REGISTRY.iter().find(|(known, _)| *known == name) {
            Some((_, build)) => build(index),
            None => Err(Error::UnknownArchitecture {
                found: name.to_owned(),
                known: REGISTRY.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", "),
            }),
        }
    }
}
