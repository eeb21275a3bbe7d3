//! FlashHead data: a head whose rows are grouped in clusters, with a centroid for each.
//!
//! The config says how many clusters there are and how many are probed, unless new ones are to be built; the token map
//! says which token each row of the clustered head belongs to. Which tensors hold them is the architecture's matter.

use std::sync::Arc;

use samara_format::Metadata;
use samara_format::layout::PANEL_ROWS;
use serde_json::json;

use crate::config::RawConfig;
use crate::error::Error;
use crate::source::{Checkpoint, TensorRef};

/// The formula that bounds a cluster's logits, for `flash.bound`; SPEC.md has it.
const BOUND: u64 = 1;
/// Share of built clusters to probe: about that of Maple-Preview, 512 of 4748.
const PROBED_SHARE: f64 = 0.108;

/// The `flash_head` object of config.json, or what takes its place.
pub(super) struct FlashConfig {
    pub(super) n_clusters: u64,
    pub(super) cluster_size: u64,
    pub(super) n_probes: u64,
    /// `None` until the tokenizer is known.
    pub(super) force_tokens: Option<Vec<u64>>,
}

impl FlashConfig {
    /// The config, if there is one. Data without a config are refused.
    pub(super) fn read(
        config: &RawConfig,
        checkpoint: &Checkpoint,
        vocab_size: u64,
    ) -> Result<Option<Self>, Error> {
        let Some(flash) = config.object("flash_head")? else {
            let has_data = checkpoint.tensors.keys().any(|name| name.starts_with("lm_head_flash."));
            return if has_data {
                Err(Error::ConfigMissing { key: "flash_head".to_owned() })
            } else {
                Ok(None)
            };
        };
        for (key, wanted) in [("bits", 4), ("group_size", 64), ("head_bits", 4), ("head_group_size", 64)] {
            flash.only(key, &json!(wanted))?;
        }
        flash.only("scaled_centroids", &json!(true))?;
        let read = Self {
            n_clusters: flash.size("n_clusters")?,
            cluster_size: flash.size("cluster_size")?,
            n_probes: flash.size("n_probes")?,
            force_tokens: Some(flash.token_ids("force_tokens")?),
        };
        if read.n_clusters * read.cluster_size != vocab_size {
            let wanted =
                format!("clusters of {} must hold the {vocab_size} tokens exactly", read.cluster_size);
            return Err(flash.refuse("n_clusters", wanted));
        }
        if !read.cluster_size.is_multiple_of(PANEL_ROWS as u64) {
            let wanted = "a multiple of 4 is needed, since rows are stored in panels of 4; FlashHead data can be built anew or \
                          left out (the flash_head option)";
            return Err(flash.refuse("cluster_size", wanted));
        }
        if read.n_probes > read.n_clusters {
            return Err(flash.refuse("n_probes", format!("at most the {} clusters can be", read.n_clusters)));
        }
        if read.force_tokens.iter().flatten().any(|&id| id >= vocab_size) {
            return Err(flash.refuse("force_tokens", format!("only ids below vocab_size {vocab_size} are")));
        }
        Ok(Some(read))
    }

    /// Clusters of `cluster_size` rows that are to be built.
    pub(super) fn build(cluster_size: u64, vocab_size: u64) -> Result<Self, Error> {
        let possible = |size: &u64| {
            *size != 0 && size.is_multiple_of(PANEL_ROWS as u64) && vocab_size.is_multiple_of(*size)
        };
        if !possible(&cluster_size) {
            let nearest = (1..=vocab_size).filter(possible).min_by_key(|size| size.abs_diff(cluster_size));
            let advice = match nearest {
                Some(size) => format!("{size} is possible"),
                None => "none is possible with this vocabulary".to_owned(),
            };
            return Err(Error::ClusterSize { cluster_size, vocab_size, advice });
        }
        let n_clusters = vocab_size / cluster_size;
        let n_probes = ((PROBED_SHARE * n_clusters as f64).round() as u64).max(1);
        Ok(Self { n_clusters, cluster_size, n_probes, force_tokens: None })
    }

    /// Writes the `flash.*` metadata; `flash.force_tokens` only if they are known.
    pub(super) fn describe(&self, metadata: &mut Metadata) {
        metadata.insert("flash.n_clusters", self.n_clusters);
        metadata.insert("flash.cluster_size", self.cluster_size);
        metadata.insert("flash.n_probes", self.n_probes);
        metadata.insert("flash.bound", BOUND);
        if let Some(force_tokens) = &self.force_tokens {
            metadata.insert(FORCE_TOKENS, force_tokens.clone());
        }
    }
}

/// Metadata key of the tokens whose logits are always computed.
const FORCE_TOKENS: &str = "flash.force_tokens";

/// Checks the tokens whose logits are always computed, or says which they are where FlashHead data are built: those
/// that end an answer, and the one that ends reasoning.
pub(crate) fn settle_force_tokens(
    metadata: &mut Metadata,
    stop_ids: &[u64],
    end_of_thought: Option<u64>,
) -> Result<(), Error> {
    if metadata.get("flash.n_clusters").is_none() {
        return Ok(());
    }
    let Ok(found) = metadata.u64s(FORCE_TOKENS) else {
        let mut tokens: Vec<u64> = stop_ids.iter().copied().chain(end_of_thought).collect();
        tokens.sort_unstable();
        tokens.dedup();
        metadata.insert(FORCE_TOKENS, tokens);
        return Ok(());
    };
    let missing: Vec<u64> = stop_ids.iter().copied().filter(|id| !found.contains(id)).collect();
    if missing.is_empty() { Ok(()) } else { Err(Error::ForceTokens { found: found.to_vec(), missing }) }
}

/// Reads the token map and proves that it is a permutation of all ids.
pub(super) fn token_map(
    map: &TensorRef,
    checkpoint: &Checkpoint,
    vocab_size: u64,
) -> Result<Arc<[u32]>, Error> {
    let mut bytes = vec![0; usize::try_from(map.len).expect("64-bit target")];
    checkpoint.files[map.file].read_exact_at(&mut bytes, map.offset)?;
    let mut first_entry = vec![None; usize::try_from(vocab_size).expect("64-bit target")];
    let mut order = Vec::with_capacity(first_entry.len());
    for (entry, four) in bytes.chunks_exact(4).enumerate() {
        let id = i32::from_le_bytes([four[0], four[1], four[2], four[3]]);
        let slot = usize::try_from(id).ok().and_then(|id| first_entry.get_mut(id));
        let refuse = |reason: String| Err(Error::TokenMap { entry, reason });
        match slot {
            None => return refuse(format!("{id} is not a token id below {vocab_size}")),
            Some(Some(first)) => return refuse(format!("token {id} is in entry {first} already")),
            Some(slot) => *slot = Some(entry),
        }
        order.push(id.cast_unsigned());
    }
    Ok(order.into())
}
