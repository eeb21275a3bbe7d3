//! FlashHead data: a head whose rows are grouped in clusters, with a centroid for each.
//!
//! The config says how many clusters there are and how many are probed; the token map says which token each row of
//! the clustered head belongs to. Which tensors hold them is the architecture's matter.

use std::sync::Arc;

use samara_format::Metadata;
use serde_json::json;

use crate::config::RawConfig;
use crate::error::Error;
use crate::source::{Checkpoint, TensorRef};

/// The `flash_head` object of config.json.
pub(super) struct FlashConfig {
    pub(super) n_clusters: u64,
    pub(super) cluster_size: u64,
    pub(super) n_probes: u64,
    pub(super) force_tokens: Vec<u64>,
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
            force_tokens: flash.token_ids("force_tokens")?,
        };
        if read.n_clusters * read.cluster_size != vocab_size {
            let wanted =
                format!("clusters of {} must hold the {vocab_size} tokens exactly", read.cluster_size);
            return Err(flash.refuse("n_clusters", wanted));
        }
        if read.n_probes > read.n_clusters {
            return Err(flash.refuse("n_probes", format!("at most the {} clusters can be", read.n_clusters)));
        }
        if read.force_tokens.iter().any(|&id| id >= vocab_size) {
            return Err(flash.refuse("force_tokens", format!("only ids below vocab_size {vocab_size} are")));
        }
        Ok(Some(read))
    }

    /// Writes the `flash.*` metadata.
    pub(super) fn describe(&self, metadata: &mut Metadata) {
        metadata.insert("flash.n_clusters", self.n_clusters);
        metadata.insert("flash.cluster_size", self.cluster_size);
        metadata.insert("flash.n_probes", self.n_probes);
        metadata.insert("flash.force_tokens", self.force_tokens.clone());
    }
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
