//! The architectures that can be converted: one registry, one file each.

mod flash;
mod maple;
mod tensors;

pub(crate) use flash::settle_force_tokens;

use crate::config::RawConfig;
use crate::error::Error;
use crate::options::Options;
use crate::recipe::Draft;
use crate::source::Checkpoint;

/// How one architecture is recognised and drafted.
pub(crate) struct Architecture {
    /// Names in `architectures` or `model_type` that mean this architecture.
    pub(crate) names: &'static [&'static str],
    /// What can be converted, for messages.
    pub(crate) supported: &'static str,
    /// Checks the config and every tensor, and says how each output tensor is made. Reads headers, and besides them
    /// only small tensors that decide the order of others.
    pub(crate) draft: fn(&RawConfig, &Checkpoint, &Options) -> Result<Draft, Error>,
}

/// Every architecture known.
const ARCHITECTURES: &[Architecture] = &[maple::ARCHITECTURE];

/// The architecture that `config` names.
pub(crate) fn find(config: &RawConfig, checkpoint: &Checkpoint) -> Result<&'static Architecture, Error> {
    let found = config.architecture();
    let known = ARCHITECTURES
        .iter()
        .find(|architecture| found.is_some_and(|name| architecture.names.contains(&name)));
    known.ok_or_else(|| Error::UnsupportedArchitecture {
        found: config.describe(),
        kind: tensors::kind(config, checkpoint),
        supported: ARCHITECTURES
            .iter()
            .map(|architecture| architecture.supported)
            .collect::<Vec<_>>()
            .join("; "),
    })
}
