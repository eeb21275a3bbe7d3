//! What the caller decides about a conversion.

use serde::{Deserialize, Serialize};

/// Choices for [`crate::plan()`] and [`crate::convert()`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// Keys a query sees on sliding layers, itself included; config.json's `sliding_window` if not given.
    pub window: Option<u64>,
    /// Round rows that are not ternary by the 0.7-mean rule instead of refusing them.
    pub ternarize: bool,
    /// Replace an existing output, and discard an unfinished one.
    pub force: bool,
    /// Continue an unfinished conversion if there is one.
    pub resume: bool,
    /// Threads to use; 0 means as many as the process may use.
    pub threads: usize,
    /// Stored as `general.name`.
    pub name: Option<String>,
    /// Stored as `general.license`.
    pub license: Option<String>,
    /// Stored as `general.source.repository`.
    pub source_repository: Option<String>,
    /// Stored as `general.source.revision`.
    pub source_revision: Option<String>,
}

/// The options that change the output's bytes; a journal binds to them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BoundOptions {
    window: Option<u64>,
    ternarize: bool,
    name: Option<String>,
    license: Option<String>,
    source_repository: Option<String>,
    source_revision: Option<String>,
}

impl From<&Options> for BoundOptions {
    fn from(options: &Options) -> Self {
        let Options {
            window,
            ternarize,
            force: _,
            resume: _,
            threads: _,
            name,
            license,
            source_repository,
            source_revision,
        } = options.clone();
        Self { window, ternarize, name, license, source_repository, source_revision }
    }
}

impl BoundOptions {
    /// Whether rows that are not ternary are rounded.
    pub(crate) fn ternarize(&self) -> bool {
        self.ternarize
    }

    /// Names of the options in which two sets differ.
    pub(crate) fn differences(&self, other: &Self) -> Vec<&'static str> {
        let Self { window, ternarize, name, license, source_repository, source_revision } = self;
        let differs = [
            ("window", *window != other.window),
            ("ternarize", *ternarize != other.ternarize),
            ("name", *name != other.name),
            ("license", *license != other.license),
            ("source repository", *source_repository != other.source_repository),
            ("source revision", *source_revision != other.source_revision),
        ];
        differs.into_iter().filter_map(|(name, differs)| differs.then_some(name)).collect()
    }
}
