//! Everything that can be wrong with a checkpoint, a conversion or a synthetic checkpoint, one variant per defect.
//!
//! Messages say what was found, where, and what to do. Lists (missing files, tensor problems) are complete:
//! a person should have to download and fix things once, not once per message.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why a checkpoint was refused or a conversion stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused an operation on a file.
    #[error("cannot {action} {}: {cause}", path.display())]
    Io {
        /// What was being done: "read", "create", ...
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason; it is part of the message, so it is not a source of its own.
        cause: io::Error,
    },
    /// The checkpoint path is not a folder.
    #[error("{} is not a folder: {hint}", path.display())]
    NotAFolder {
        /// The path given.
        path: PathBuf,
        /// What it seems to be, and what to pass instead.
        hint: String,
    },
    /// Files that a checkpoint needs are not there; all of them are listed.
    #[error("{} lacks {} file(s): {}; download them into the folder and try again", dir.display(), files.len(), files.join(", "))]
    MissingFiles {
        /// The checkpoint folder.
        dir: PathBuf,
        /// Every missing file, with an alternative in brackets where there is one.
        files: Vec<String>,
    },
    /// A Git LFS pointer stands where the file itself should be.
    #[error(
        "{file} is a Git LFS pointer of {len} bytes, not the file itself: run `git lfs pull` in the checkpoint folder"
    )]
    LfsPointer {
        /// File name.
        file: String,
        /// Bytes found.
        len: u64,
    },
    /// A shard is shorter than its own header says.
    #[error("{file} is {found} bytes, its header says {expected}: incomplete download, fetch it again")]
    Truncated {
        /// File name.
        file: String,
        /// Bytes found.
        found: u64,
        /// Bytes the header announces (a lower bound when the header itself is cut).
        expected: u64,
    },
    /// A shard is longer than its own header says.
    #[error(
        "{file} is {found} bytes, its header says {expected}: bytes after the last tensor belong to nothing"
    )]
    TrailingBytes {
        /// File name.
        file: String,
        /// Bytes found.
        found: u64,
        /// Bytes the header announces.
        expected: u64,
    },
    /// The header length field is larger than any real header.
    #[error(
        "{file}: the header length field says {found} bytes, more than the limit of {limit}: not a safetensors file, or a damaged one"
    )]
    HeaderTooLong {
        /// File name.
        file: String,
        /// The length field.
        found: u64,
        /// The largest length accepted.
        limit: u64,
    },
    /// A file that should be JSON is not, or holds a key twice.
    #[error("{file}: {reason}")]
    Json {
        /// File name.
        file: String,
        /// The parser's reason with line and column.
        reason: String,
    },
    /// A tensor's byte range is impossible.
    #[error("{file}: tensor {tensor}: {reason}")]
    BadTensorRange {
        /// File name.
        file: String,
        /// Tensor name.
        tensor: String,
        /// What is wrong with the range.
        reason: String,
    },
    /// Two shards hold a tensor of the same name.
    #[error("tensor {tensor} is in both {first} and {second}")]
    DuplicateTensor {
        /// Tensor name.
        tensor: String,
        /// First file that holds it.
        first: String,
        /// Second file that holds it.
        second: String,
    },
    /// A shard name leads out of the checkpoint folder.
    #[error(
        "the index names the shard {name:?}: only plain file names inside the checkpoint folder are allowed"
    )]
    UnsafeFileName {
        /// The name as the index spells it.
        name: String,
    },
    /// config.json lacks a key that decides what the model computes.
    #[error("config.json has no {key:?}: it decides what the model computes, so nothing is assumed")]
    ConfigMissing {
        /// The key.
        key: String,
    },
    /// A config holds a value that is malformed or not supported.
    #[error("{file}: {key} = {found} is not supported: {wanted}")]
    ConfigValue {
        /// config.json or generation_config.json.
        file: &'static str,
        /// The key.
        key: String,
        /// The value found, as JSON.
        found: String,
        /// What would be accepted.
        wanted: String,
    },
    /// The checkpoint is of another model.
    #[error(
        "config.json has {found}, and the weights are {kind}: this model cannot be converted; supported: {supported}"
    )]
    UnsupportedArchitecture {
        /// What config.json says of architecture and model type.
        found: String,
        /// Kind of weights: "bfloat16", "8-bit MLX", ...
        kind: String,
        /// Architectures and kinds that can be converted.
        supported: String,
    },
    /// The right model in a form that cannot be converted.
    #[error("this checkpoint holds {kind} weights; supported: {supported}")]
    UnsupportedKind {
        /// Kind of weights found.
        kind: String,
        /// Kinds that can be converted.
        supported: String,
    },
    /// Tensors are missing, unexpected, or of the wrong shape or dtype; all of them are listed.
    #[error("{} tensor(s) do not fit config.json:{}", problems.len(), list(problems))]
    Tensors {
        /// Every tensor that does not fit.
        problems: Vec<TensorProblem>,
    },
    /// A 2-bit code of 3, which means nothing.
    #[error(
        "{tensor}, row {row}, column {column}: code 3 is not a ternary weight; the file is damaged or not ternary"
    )]
    CodeThree {
        /// Source tensor.
        tensor: String,
        /// Row in that tensor.
        row: usize,
        /// Column in that row.
        column: usize,
    },
    /// A NaN or an infinity.
    #[error("{tensor}, row {row}, column {column}: {value} is not a finite number")]
    NotFinite {
        /// Source tensor.
        tensor: String,
        /// Row in that tensor.
        row: usize,
        /// Column in that row.
        column: usize,
        /// The value.
        value: f32,
    },
    /// A weight that is neither zero nor plus or minus the row's scale.
    #[error(
        "{tensor}, row {row}, column {column}: {value:e} is not one of -{scale:e}, 0, +{scale:e}: the row is not ternary, \
         so conversion would lose something (the ternarize option rounds such rows by the 0.7-mean rule)"
    )]
    NotTernary {
        /// Source tensor.
        tensor: String,
        /// Row in that tensor.
        row: usize,
        /// Column in that row.
        column: usize,
        /// The value.
        value: f32,
        /// The magnitude that most of the row has.
        scale: f32,
    },
    /// A row scale that no ternary row can have.
    #[error("{tensor}, row {row}: a row scale of {value:e} is negative or not finite")]
    RowScale {
        /// Source tensor.
        tensor: String,
        /// Row in that tensor.
        row: usize,
        /// The scale.
        value: f32,
    },
    /// Group scales of one ternary row differ.
    #[error(
        "{tensor}, row {row}, group {group}: scale {found:e} differs from the row's first, {first:e}; one scale a row is supported"
    )]
    UnequalGroups {
        /// Source tensor.
        tensor: String,
        /// Row in that tensor.
        row: usize,
        /// Group in that row.
        group: usize,
        /// This group's scale.
        found: f32,
        /// The first group's scale.
        first: f32,
    },
    /// A ternary group whose bias is not minus its scale, so that code 1 is not zero.
    #[error(
        "{tensor}, row {row}, group {group}: bias {bias:e} is not minus the scale {scale:e}; the group is not ternary"
    )]
    BiasNotMinusScale {
        /// Source tensor.
        tensor: String,
        /// Row in that tensor.
        row: usize,
        /// Group in that row.
        group: usize,
        /// The group's bias.
        bias: f32,
        /// The group's scale.
        scale: f32,
    },
    /// The FlashHead token map is not a permutation of all token ids.
    #[error("lm_head_flash.token_map, entry {entry}: {reason}; it must hold every token id exactly once")]
    TokenMap {
        /// Position in the flattened map.
        entry: usize,
        /// What is wrong there.
        reason: String,
    },
    /// Tokens that end an answer are not among those whose logits are always computed.
    #[error(
        "config.json: flash_head.force_tokens = {found:?} lacks the stop token(s) {missing:?}: an answer might never end; \
         FlashHead data can be built anew or left out (the flash_head option)"
    )]
    ForceTokens {
        /// The tokens in config.json.
        found: Vec<u64>,
        /// The stop tokens that are not among them.
        missing: Vec<u64>,
    },
    /// FlashHead centroids whose lengths have nothing to do with their clusters' rows.
    #[error(
        "lm_head_flash.centroids: {off} of {looked_at} looked at differ in length by more than 25 % from the longest row of \
         their cluster, so they are not scaled, and the best clusters would be missed; FlashHead data can be built anew \
         or left out (the flash_head option)"
    )]
    CentroidsNotScaled {
        /// Centroids of another length.
        off: usize,
        /// Centroids looked at.
        looked_at: usize,
    },
    /// A size asked for FlashHead clusters that the vocabulary or the file's layout does not allow.
    #[error(
        "a cluster size of {cluster_size} is not possible: it must divide the vocabulary of {vocab_size} and be a multiple of \
         4, since rows are stored in panels of 4; {advice}"
    )]
    ClusterSize {
        /// The size asked for.
        cluster_size: u64,
        /// Rows of the head.
        vocab_size: u64,
        /// The nearest size that is possible, or that none is.
        advice: String,
    },
    /// tokenizer.json is of an unknown kind or disagrees with config.json.
    #[error("tokenizer.json: {reason}")]
    Tokenizer {
        /// What is wrong, with the field.
        reason: String,
    },
    /// The chat template has no text.
    #[error("the chat template in {file} is empty: fetch the file again")]
    EmptyTemplate {
        /// chat_template.jinja or tokenizer_config.json.
        file: &'static str,
    },
    /// Sizes from the checkpoint multiply to more than a file can hold.
    #[error("{what} is too large to convert")]
    TooLarge {
        /// The tensor or size.
        what: String,
    },
    /// The output file is there already.
    #[error("{} exists already: choose another name, or use force to replace it", path.display())]
    OutputExists {
        /// The output path.
        path: PathBuf,
    },
    /// The output, or a file that is needed to write it, is one of the source's.
    #[error("{} is the checkpoint's own {file}: choose another name for the output", path.display())]
    OutputIsSource {
        /// The output, its unfinished file or its journal.
        path: PathBuf,
        /// Name of the source file.
        file: String,
    },
    /// The folder of the output is not there.
    #[error("there is no folder {}: create it, or choose another for the output", path.display())]
    NoOutputFolder {
        /// The folder.
        path: PathBuf,
    },
    /// Another conversion is writing the same output.
    #[error("another samara is writing {}: wait for it, or choose another output", path.display())]
    Busy {
        /// The unfinished file.
        path: PathBuf,
    },
    /// What has the name of the journal is something else.
    #[error("{} is not the journal of a conversion, and is left as it is: move it, or choose another output", path.display())]
    ForeignJournal {
        /// The file.
        path: PathBuf,
    },
    /// An unfinished conversion lies beside the output.
    #[error("{} is left from an interrupted conversion: resume continues it, force starts over", path.display())]
    UnfinishedExists {
        /// The unfinished file.
        path: PathBuf,
    },
    /// Not enough free space, found before anything was written.
    #[error("{} needs {needed} bytes, {available} are free on that disk: free some space or choose another disk", path.display())]
    DiskSpace {
        /// The output path.
        path: PathBuf,
        /// Bytes still to write.
        needed: u64,
        /// Bytes free.
        available: u64,
    },
    /// The disk became full while writing.
    #[error("the disk became full while writing {}; the finished part is kept: free some space, then continue with resume", part.display())]
    DiskFull {
        /// The unfinished file, kept.
        part: PathBuf,
    },
    /// A journal that belongs to other sources, other options or another version.
    #[error("cannot resume {}: {reason}; use force to start over", part.display())]
    StaleJournal {
        /// The unfinished file.
        part: PathBuf,
        /// What has changed.
        reason: String,
    },
    /// A journal that cannot be read.
    #[error("{}, line {line}: {reason}; use force to start over", path.display())]
    JournalDamaged {
        /// The journal.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A source file changed between hashing and the end of the conversion.
    #[error(
        "{file} changed while it was being converted; the unfinished file is kept, convert again with force"
    )]
    SourceChanged {
        /// File name.
        file: String,
    },
    /// The caller asked to stop.
    #[error("cancelled{}", kept.as_ref().map_or_else(String::new, |part| format!("; {} is kept and resume continues it", part.display())))]
    Cancelled {
        /// The unfinished file, if there is one to resume.
        kept: Option<PathBuf>,
    },
    /// What was read back from the disk is not what was written.
    #[error("{} is not what was written to it: {reason}; it is kept under that name: check the disk, then use force to start over", part.display())]
    VerifyFailed {
        /// The file, which did not get its final name.
        part: PathBuf,
        /// Which tensor differs.
        reason: String,
    },
    /// Tensors whose bytes or place are not what was written.
    #[error("read back wrong: {}", if tensors.is_empty() { "the tensor directory".to_owned() } else { tensors.join(", ") })]
    ReadBack {
        /// The tensors that differ.
        tensors: Vec<String>,
    },
    /// The threads asked for could not be started.
    #[error("cannot start {n} threads: {reason}")]
    Threads {
        /// Threads asked for.
        n: usize,
        /// The system's reason.
        reason: String,
    },
    /// The container crate refused something.
    #[error(transparent)]
    Format(samara_format::Error),
    /// A synthetic checkpoint that cannot exist.
    #[error("cannot make this synthetic checkpoint: {reason}")]
    Synth {
        /// Which size is impossible and why.
        reason: String,
    },
    /// The folder for a synthetic checkpoint is a file.
    #[error("{} is there and is not a folder: a synthetic checkpoint is only written into a new or empty folder", path.display())]
    OutputNotAFolder {
        /// What is there.
        path: PathBuf,
    },
    /// The folder for a synthetic checkpoint holds files already.
    #[error("{} is not empty: a synthetic checkpoint is only written into a new or empty folder", path.display())]
    FolderNotEmpty {
        /// The folder.
        path: PathBuf,
    },
}

impl From<samara_format::Error> for Error {
    fn from(error: samara_format::Error) -> Self {
        match error {
            samara_format::Error::Exists { path } => Self::OutputExists { path },
            error => Self::Format(error),
        }
    }
}

impl Error {
    /// Wraps an I/O error with what was being done to which file.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |cause| Self::Io { action, path, cause }
    }
}

/// One tensor that does not fit config.json.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TensorProblem {
    /// A tensor the model needs is not in any shard.
    Missing {
        /// Tensor name.
        tensor: String,
    },
    /// A tensor nothing in the model uses.
    Unexpected {
        /// Tensor name.
        tensor: String,
        /// The file that holds it.
        file: String,
    },
    /// A tensor whose shape differs from what config.json implies.
    Shape {
        /// Tensor name.
        tensor: String,
        /// Shape found.
        found: Vec<u64>,
        /// Shape config.json implies.
        expected: Vec<u64>,
    },
    /// A tensor of another dtype than its layout has.
    Dtype {
        /// Tensor name.
        tensor: String,
        /// Dtype found.
        found: String,
        /// Dtype of the layout.
        expected: String,
    },
    /// A tensor that the index places in a shard which does not hold it.
    NotInShard {
        /// Tensor name.
        tensor: String,
        /// The shard the index names.
        file: String,
    },
}

impl fmt::Display for TensorProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { tensor } => write!(f, "{tensor}: missing"),
            Self::Unexpected { tensor, file } => write!(f, "{tensor}: unexpected, in {file}"),
            Self::Shape { tensor, found, expected } => {
                write!(f, "{tensor}: shape {found:?}, config.json implies {expected:?}")
            }
            Self::Dtype { tensor, found, expected } => {
                write!(f, "{tensor}: dtype {found}, expected {expected}")
            }
            Self::NotInShard { tensor, file } => {
                write!(f, "{tensor}: the index places it in {file}, which lacks it")
            }
        }
    }
}

fn list(problems: &[TensorProblem]) -> String {
    problems.iter().map(|problem| format!("\n  {problem}")).collect()
}
