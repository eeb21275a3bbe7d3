//! Everything that can go wrong between opening a model and its last token.

use crate::text::TextError;

/// Errors of this crate. Each message says what was found and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The container could not be opened, or a metadata key is missing or of another type.
    #[error(transparent)]
    Format(#[from] samara_format::Error),
    /// Tokenizer, chat template or stop strings.
    #[error(transparent)]
    Text(#[from] TextError),
    /// Kernels of an instruction set that this machine lacks.
    #[error(transparent)]
    Isa(#[from] samara_simd::Error),
    /// Sampling settings that make no sense, or logits nothing can be drawn from.
    #[error(transparent)]
    Sample(#[from] crate::sample::SampleError),
    /// `general.architecture` names a model this version cannot run.
    #[error("this file holds a `{found}` model; this version of samara runs: {known}")]
    UnknownArchitecture {
        /// The name in the file.
        found: String,
        /// Names in the registry.
        known: String,
    },
    /// A metadata value is out of range or contradicts another.
    #[error("metadata key `{key}`: {found}; the file was written wrongly, convert it again")]
    InvalidMetadata {
        /// The key.
        key: &'static str,
        /// What is wrong with it.
        found: String,
    },
    /// A tensor the architecture needs is not in the directory.
    #[error("tensor `{name}` is missing; the file was written wrongly, convert it again")]
    MissingTensor {
        /// Its name.
        name: String,
    },
    /// A tensor is there but is something else.
    #[error("tensor `{name}` is {found}, but the metadata asks for {wanted}")]
    TensorShape {
        /// Its name.
        name: String,
        /// Blocks, dtype and shape in the directory.
        found: String,
        /// Blocks, dtype and shape by the metadata.
        wanted: String,
    },
    /// A token map that is not a permutation would lose or repeat logits.
    #[error("`head.token_map` is not a permutation: row {row} says token {token}; convert the file again")]
    TokenMap {
        /// First row that repeats a token or exceeds the vocabulary.
        row: usize,
        /// What it says.
        token: u32,
    },
    /// A head that leaves rows out was asked for, and the file has not what it takes.
    #[error(
        "--head {head}: this file has no FlashHead data; use --head exact, or convert the checkpoint again with \
         --flash-head build"
    )]
    NoFlashHead {
        /// The kind of head.
        head: &'static str,
    },
    /// A certificate was asked for, and the file has no bounds, or such as this version does not know.
    #[error(
        "--head certified: this file has no bounds that this version of samara reads (`flash.bound` is not 1); use --head \
         flash or exact, or convert the checkpoint again"
    )]
    NoCertificate,
    /// Bounds that no head has.
    #[error(
        "`head.bounds`: cluster {cluster} has {found}, which bounds nothing; run `samara verify` on the model file, and \
         convert it again"
    )]
    HeadBounds {
        /// The first such cluster.
        cluster: usize,
        /// What it has.
        found: String,
    },
    /// More probes than clusters, or none.
    #[error("--probes {found}: the head has {n_clusters} clusters, and from 1 to {n_clusters} can be probed")]
    Probes {
        /// The number asked for.
        found: usize,
        /// Clusters.
        n_clusters: usize,
    },
    /// A device's driver refused something or reported a fault.
    #[error("{device}: {reason}; update its driver, or use --device cpu")]
    Gpu {
        /// The device.
        device: String,
        /// What its driver said.
        reason: String,
    },
    /// No backend can run a block.
    #[error("no backend of this build runs {block} on device `{device}`: {reason}")]
    Unsupported {
        /// Which block.
        block: String,
        /// The device asked for.
        device: String,
        /// Why not.
        reason: String,
    },
    /// The KV cache and scratch buffers do not fit.
    #[error(
        "a context of {context} tokens needs {needed} of memory beside the mapped weights, and {available} is \
         available; {advice}"
    )]
    Memory {
        /// Tokens asked for.
        context: usize,
        /// Human-readable size needed.
        needed: String,
        /// Human-readable size available.
        available: String,
        /// What to do: the largest context that fits, if any.
        advice: String,
    },
    /// A device has too little memory, by what was granted or by what its driver says.
    #[error("{device} needs {needed} for its part of the model, and {available}; {advice}")]
    DeviceMemory {
        /// The device.
        device: String,
        /// Human-readable size needed.
        needed: String,
        /// What there is, as half a sentence: `--gpu-memory grants 4.00 GiB`, `the driver has no more`.
        available: String,
        /// What to do.
        advice: String,
    },
    /// No device of the kind or number asked for.
    #[error("{reason}")]
    NoDevice {
        /// What was found, and what to do.
        reason: String,
    },
    /// A device is gone: unplugged, reset by its driver, or stuck.
    #[error("{device} was lost: {reason}")]
    DeviceLost {
        /// The device.
        device: String,
        /// What the driver said.
        reason: String,
    },
    /// A device is gone, and the engine has compiled everything for the CPU. Nothing is cached any more; a session goes on
    /// when the call is repeated.
    #[error("{device} was lost: {reason}; from here on the CPU runs the model")]
    MovedToCpu {
        /// The device.
        device: String,
        /// What the driver said.
        reason: String,
    },
    /// A device fails its check at start-up.
    #[error("{device} computes wrong: {reason}; update its driver, or use --device cpu")]
    DeviceFault {
        /// The device.
        device: String,
        /// Which kernel, and how far off.
        reason: String,
    },
    /// More context than the model was made for.
    #[error(
        "a context of {context} tokens was asked for, and the model was made for {max}; use --ctx {max} or less"
    )]
    ContextTooLarge {
        /// Tokens asked for.
        context: usize,
        /// `model.max_context`.
        max: usize,
    },
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt is {prompt} tokens and the context holds {context} (the model's maximum is {max}); shorten it, \
         or raise --ctx"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens of the context.
        context: usize,
        /// `model.max_context`.
        max: usize,
    },
    /// Nothing to run the model on.
    #[error("the prompt is empty: there is no token to continue from")]
    EmptyPrompt,
    /// A token id outside the vocabulary.
    #[error("token {id} at position {position} is outside the vocabulary of {vocab_size}")]
    TokenOutOfRange {
        /// The id.
        id: u32,
        /// Its position.
        position: usize,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// NaN or infinity in the middle of a model.
    #[error("layer {layer}: {what} holds NaN or infinity; run `samara verify` on the file")]
    NonFinite {
        /// The layer.
        layer: usize,
        /// Which values.
        what: &'static str,
    },
    /// NaN or infinity after the last router: in the last layer's experts or the final norm.
    #[error(
        "the head's input holds NaN or infinity, from the last layer or the final norm; run `samara verify` on the \
         file"
    )]
    NonFiniteHead,
    /// Logits that are NaN or +infinity.
    #[error("the logits at position {position} hold NaN or infinity; run `samara verify` on the file")]
    NonFiniteLogits {
        /// Position in the text.
        position: usize,
    },
    /// The thread pool could not be made.
    #[error("cannot start {threads} threads: {reason}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// What the system said.
        reason: String,
    },
}
