//! Taking tensors out of a checkpoint by name, shape and dtype, and remembering all that do not fit.

use std::collections::BTreeSet;

use safetensors::Dtype;

use crate::config::RawConfig;
use crate::error::{Error, TensorProblem};
use crate::source::{Checkpoint, TensorRef};

/// A ledger of a checkpoint's tensors: each is taken once, what is left over is unexpected.
pub(super) struct Ledger<'a> {
    checkpoint: &'a Checkpoint,
    taken: BTreeSet<String>,
    problems: Vec<TensorProblem>,
}

impl<'a> Ledger<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint, taken: BTreeSet::new(), problems: checkpoint.misplaced.clone() }
    }

    /// The tensor `name`, if it is there and has this dtype and shape; otherwise the problem is noted.
    pub(super) fn take(&mut self, name: &str, dtype: Dtype, shape: &[u64]) -> Option<&'a TensorRef> {
        self.taken.insert(name.to_owned());
        let Some(tensor) = self.checkpoint.tensors.get(name) else {
            let placed = |problem: &TensorProblem| matches!(problem, TensorProblem::NotInShard { tensor, .. } if tensor == name);
            if !self.problems.iter().any(placed) {
                self.problems.push(TensorProblem::Missing { tensor: name.to_owned() });
            }
            return None;
        };
        let tensor_name = || name.to_owned();
        if tensor.dtype != dtype {
            let (found, expected) = (tensor.dtype.to_string(), dtype.to_string());
            self.problems.push(TensorProblem::Dtype { tensor: tensor_name(), found, expected });
            return None;
        }
        if tensor.shape != shape {
            let (found, expected) = (tensor.shape.clone(), shape.to_vec());
            self.problems.push(TensorProblem::Shape { tensor: tensor_name(), found, expected });
            return None;
        }
        Some(tensor)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.checkpoint.tensors.contains_key(name)
    }

    /// Marks tensors that nothing needs as known; returns their names.
    pub(super) fn ignore(&mut self, known: impl Fn(&str) -> bool) -> Vec<String> {
        let names: Vec<String> = self.checkpoint.tensors.keys().filter(|name| known(name)).cloned().collect();
        self.taken.extend(names.iter().cloned());
        names
    }

    /// Fails with every problem noted, and every tensor that was not taken.
    pub(super) fn close(mut self) -> Result<(), Error> {
        for (name, tensor) in &self.checkpoint.tensors {
            if !self.taken.contains(name) {
                let file = self.checkpoint.files[tensor.file].name.clone();
                self.problems.push(TensorProblem::Unexpected { tensor: name.clone(), file });
            }
        }
        if self.problems.is_empty() { Ok(()) } else { Err(Error::Tensors { problems: self.problems }) }
    }
}

/// Packed integers, when config.json does not say of how many bits.
pub(super) const PACKED: &str = "packed U32";

/// What form most of the weights have: "8-bit MLX", "float16", ...
pub(super) fn kind(config: &RawConfig, checkpoint: &Checkpoint) -> String {
    let bytes = |dtype: Dtype| -> u64 {
        checkpoint
            .tensors
            .values()
            .filter(|tensor| tensor.dtype == dtype)
            .map(|tensor| tensor.len)
            .fold(0, u64::saturating_add)
    };
    let mut dtypes: Vec<Dtype> = checkpoint.tensors.values().map(|tensor| tensor.dtype).collect();
    dtypes.sort_unstable();
    dtypes.dedup();
    let Some(most) = dtypes.into_iter().max_by_key(|&dtype| bytes(dtype)) else {
        return "no tensors".to_owned();
    };
    let bits =
        config.object("quantization").ok().flatten().and_then(|quantization| quantization.size("bits").ok());
    match (most, bits) {
        (Dtype::U32, Some(bits)) => format!("{bits}-bit MLX"),
        (Dtype::U32, None) => PACKED.to_owned(),
        (Dtype::BF16, _) => "bfloat16".to_owned(),
        (Dtype::F16, _) => "float16".to_owned(),
        (Dtype::F32, _) => "float32".to_owned(),
        (other, _) => other.to_string(),
    }
}
