//! What the caller decides about a conversion.

use serde::{Deserialize, Serialize};

/// What becomes of FlashHead data: clusters of head rows, for a runtime that computes the likeliest logits alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FlashHead {
    /// Those of the checkpoint, if it has some.
    #[default]
    Auto,
    /// New ones, in place of the checkpoint's if it has some.
    Build {
        /// Head rows in one cluster: a multiple of 4 that divides the vocabulary.
        cluster_size: u64,
    },
    /// None: head rows are stored in token order.
    None,
}

/// Choices for [`crate::plan()`] and [`crate::convert()`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// Keys a query sees on sliding layers, itself included; config.json's `sliding_window` if not given.
    pub window: Option<u64>,
    /// Round rows that are not ternary by the 0.7-mean rule instead of refusing them.
    pub ternarize: bool,
    /// Whose FlashHead data the output carries.
    pub flash_head: FlashHead,
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
    /// Journals of before this option lack it.
    #[serde(default)]
    flash_head: FlashHead,
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
            flash_head,
            force: _,
            resume: _,
            threads: _,
            name,
            license,
            source_repository,
            source_revision,
        } = options.clone();
        Self { window, ternarize, flash_head, name, license, source_repository, source_revision }
    }
}

impl BoundOptions {
    /// Whether rows that are not ternary are rounded.
    pub(crate) fn ternarize(&self) -> bool {
        self.ternarize
    }

    /// Names of the options in which two sets differ.
    pub(crate) fn differences(&self, other: &Self) -> Vec<&'static str> {
        let Self { window, ternarize, flash_head, name, license, source_repository, source_revision } = self;
        let differs = [
            ("window", *window != other.window),
            ("ternarize", *ternarize != other.ternarize),
            ("choice of FlashHead data", *flash_head != other.flash_head),
            ("name", *name != other.name),
            ("license", *license != other.license),
            ("source repository", *source_repository != other.source_repository),
            ("source revision", *source_revision != other.source_revision),
        ];
        differs.into_iter().filter_map(|(name, differs)| differs.then_some(name)).collect()
    }
}
