//! From an error to an exit code, by type.
//!
//! The libraries say what is wrong; which of six codes that is, is decided here and nowhere else.

use std::{fmt, io, process::ExitCode};

use samara_converter::Error as ConvertError;
use samara_format::Error as FormatError;
use samara_runtime::{Error as RuntimeError, SampleError, TextError};

use crate::output::{self, Json};

/// Something failed while working.
pub(crate) const FAILED: u8 = 1;
/// The command line is wrong.
pub(crate) const USAGE: u8 = 2;
/// An input is wrong.
pub(crate) const INPUT: u8 = 3;
/// Not enough memory or disk space.
pub(crate) const SPACE: u8 = 4;
/// Ctrl-C.
pub(crate) const INTERRUPTED: u8 = 130;

/// What this program itself finds wrong.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An option that does not fit the others or the model.
    Usage(String),
    /// A file that does not hold what it should.
    Input(String),
    /// Too little memory.
    Space(String),
    /// The work itself went wrong.
    Failed(String),
    /// The user stopped it, and knows that.
    Interrupted,
    /// A refusal of the converter, with the command that goes on from there.
    Hinted(Box<ConvertError>, String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Usage(text) | Failure::Input(text) | Failure::Space(text) | Failure::Failed(text) => {
                f.write_str(text)
            }
            Failure::Interrupted => f.write_str("interrupted"),
            Failure::Hinted(error, hint) => write!(f, "{error}\n{hint}"),
        }
    }
}

impl std::error::Error for Failure {}

/// Prints an error, for machines too where they were promised JSON, and returns its exit code. A reader that went
/// away is no error.
pub(crate) fn report(error: &anyhow::Error, json: Json) -> ExitCode {
    if error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
    {
        return ExitCode::SUCCESS;
    }
    match error.downcast_ref::<Failure>() {
        Some(Failure::Interrupted) => {}
        _ => output::error(&format!("{error:#}")),
    }
    let code = code(error);
    output::json_error(json, &format!("{error:#}"), code);
    ExitCode::from(code)
}

/// The exit code of an error: that of the first cause whose type decides it.
pub(crate) fn code(error: &anyhow::Error) -> u8 {
    error.chain().find_map(code_of).unwrap_or(FAILED)
}

fn code_of(cause: &(dyn std::error::Error + 'static)) -> Option<u8> {
    if let Some(failure) = cause.downcast_ref::<Failure>() {
        return Some(match failure {
            Failure::Usage(_) => USAGE,
            Failure::Input(_) => INPUT,
            Failure::Space(_) => SPACE,
            Failure::Failed(_) => FAILED,
            Failure::Interrupted => INTERRUPTED,
            Failure::Hinted(error, _) => converter(error),
        });
    }
    if let Some(error) = cause.downcast_ref() {
        return Some(runtime(error));
    }
    if let Some(error) = cause.downcast_ref() {
        return Some(text(error));
    }
    if let Some(error) = cause.downcast_ref() {
        return Some(converter(error));
    }
    if let Some(error) = cause.downcast_ref() {
        return Some(format(error));
    }
    cause.downcast_ref::<io::Error>().map(system)
}

fn runtime(error: &RuntimeError) -> u8 {
    match error {
        RuntimeError::Format(error) => format(error),
        RuntimeError::Text(error) => text(error),
        RuntimeError::Sample(SampleError::BadLogit { .. }) => FAILED,
        RuntimeError::Sample(_)
        | RuntimeError::ContextTooLarge { .. }
        | RuntimeError::Isa(_)
        | RuntimeError::NoDevice { .. }
        | RuntimeError::NoFlashHead { .. }
        | RuntimeError::NoCertificate
        | RuntimeError::Probes { .. } => USAGE,
        RuntimeError::Memory { .. } | RuntimeError::DeviceMemory { .. } => SPACE,
        RuntimeError::UnknownArchitecture { .. }
        | RuntimeError::InvalidMetadata { .. }
        | RuntimeError::MissingTensor { .. }
        | RuntimeError::TensorShape { .. }
        | RuntimeError::TokenMap { .. }
        | RuntimeError::HeadBounds { .. }
        | RuntimeError::PromptTooLong { .. }
        | RuntimeError::EmptyPrompt
        | RuntimeError::TokenOutOfRange { .. } => INPUT,
        _ => FAILED,
    }
}

fn text(error: &TextError) -> u8 {
    match error {
        TextError::EmptyStop { .. } => USAGE,
        _ => INPUT,
    }
}

fn converter(error: &ConvertError) -> u8 {
    match error {
        ConvertError::Format(error) => format(error),
        ConvertError::Io { cause, .. } => system(cause),
        ConvertError::OutputExists { .. }
        | ConvertError::UnfinishedExists { .. }
        | ConvertError::OutputIsSource { .. }
        | ConvertError::NoOutputFolder { .. }
        | ConvertError::OutputNotAFolder { .. }
        | ConvertError::Busy { .. }
        | ConvertError::ForeignJournal { .. }
        | ConvertError::FolderNotEmpty { .. }
        | ConvertError::ClusterSize { .. }
        | ConvertError::Synth { .. } => USAGE,
        ConvertError::DiskSpace { .. } | ConvertError::DiskFull { .. } => SPACE,
        ConvertError::Cancelled { .. } => INTERRUPTED,
        ConvertError::VerifyFailed { .. } | ConvertError::Threads { .. } => FAILED,
        _ => INPUT,
    }
}

fn format(error: &FormatError) -> u8 {
    match error {
        FormatError::Io { cause, .. } | FormatError::Unmappable { cause, .. } => system(cause),
        FormatError::InFile { defect, .. } => format(defect),
        FormatError::InUse { .. } => FAILED,
        FormatError::Exists { .. } | FormatError::NotReplaceable { .. } | FormatError::ForeignPart { .. } => {
            USAGE
        }
        _ => INPUT,
    }
}

/// A path that is not there or not readable is a wrong input; a full disk is lack of space.
fn system(error: &io::Error) -> u8 {
    match error.kind() {
        io::ErrorKind::NotFound
        | io::ErrorKind::PermissionDenied
        | io::ErrorKind::IsADirectory
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::InvalidFilename
        | io::ErrorKind::InvalidData => INPUT,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::OutOfMemory => SPACE,
        _ => FAILED,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use anyhow::{Context, anyhow};

    use super::*;

    #[test]
    fn each_kind_of_error_has_its_code() {
        let check = |error: anyhow::Error, want: u8| {
            assert_eq!(code(&error), want, "{error:#}");
            // Context added on the way changes nothing.
            let text = error.to_string();
            assert_eq!(
                code(&Err::<(), _>(error).context("while testing").expect_err("an error")),
                want,
                "{text}"
            );
        };
        let path = || PathBuf::from("x.samara");
        let kind = |kind: io::ErrorKind| io::Error::from(kind);
        check(anyhow!("anything"), FAILED);
        check(Failure::Usage("u".into()).into(), USAGE);
        check(Failure::Input("i".into()).into(), INPUT);
        check(Failure::Space("s".into()).into(), SPACE);
        check(Failure::Failed("f".into()).into(), FAILED);
        check(Failure::Interrupted.into(), INTERRUPTED);
        check(
            Failure::Hinted(Box::new(ConvertError::DiskFull { part: path() }), "hint".into()).into(),
            SPACE,
        );
        check(FormatError::Empty.into(), INPUT);
        check(FormatError::InFile { path: path(), defect: Box::new(FormatError::IndexHash) }.into(), INPUT);
        let io_error = |k| FormatError::Io { action: "open", path: path(), cause: kind(k) };
        check(io_error(io::ErrorKind::NotFound).into(), INPUT);
        check(io_error(io::ErrorKind::StorageFull).into(), SPACE);
        check(RuntimeError::Format(io_error(io::ErrorKind::OutOfMemory)).into(), SPACE);
        check(RuntimeError::Format(FormatError::Unfinished).into(), INPUT);
        check(RuntimeError::EmptyPrompt.into(), INPUT);
        let render = || TextError::TemplateRender { message: "m".into() };
        check(render().into(), INPUT);
        check(RuntimeError::Text(render()).into(), INPUT);
        check(RuntimeError::Text(TextError::EmptyStop { index: 0 }).into(), USAGE);
        check(RuntimeError::ContextTooLarge { context: 9, max: 8 }.into(), USAGE);
        check(RuntimeError::PromptTooLong { prompt: 9, context: 8, max: 8 }.into(), INPUT);
        check(RuntimeError::NoDevice { reason: "r".into() }.into(), USAGE);
        check(RuntimeError::NoFlashHead { head: "flash" }.into(), USAGE);
        check(RuntimeError::Probes { found: 9, n_clusters: 8 }.into(), USAGE);
        let text = || "t".to_owned();
        check(RuntimeError::DeviceLost { device: text(), reason: text() }.into(), FAILED);
        check(RuntimeError::DeviceFault { device: text(), reason: text() }.into(), FAILED);
        let (device, needed, available, advice) = (text(), text(), text(), text());
        check(RuntimeError::DeviceMemory { device, needed, available, advice }.into(), SPACE);
        check(RuntimeError::NonFinite { layer: 1, what: "the router's logits" }.into(), FAILED);
        let memory = |text: &str| text.to_owned();
        check(
            RuntimeError::Memory {
                context: 1,
                needed: memory("2"),
                available: memory("1"),
                advice: memory("a"),
            }
            .into(),
            SPACE,
        );
        check(ConvertError::OutputExists { path: path() }.into(), USAGE);
        check(ConvertError::Busy { path: path() }.into(), USAGE);
        check(ConvertError::OutputIsSource { path: path(), file: "config.json".into() }.into(), USAGE);
        check(ConvertError::NoOutputFolder { path: path() }.into(), USAGE);
        check(ConvertError::OutputNotAFolder { path: path() }.into(), USAGE);
        check(ConvertError::ForeignJournal { path: path() }.into(), USAGE);
        check(FormatError::Exists { path: path() }.into(), USAGE);
        check(FormatError::NotReplaceable { path: path(), found: "a folder" }.into(), USAGE);
        let in_use =
            FormatError::InUse { path: path(), part: path(), cause: kind(io::ErrorKind::PermissionDenied) };
        check(in_use.into(), FAILED);
        check(io_error(io::ErrorKind::InvalidFilename).into(), INPUT);
        check(FormatError::ForeignPart { path: path(), found: "a folder" }.into(), USAGE);
        check(ConvertError::MissingFiles { dir: path(), files: vec![] }.into(), INPUT);
        check(ConvertError::DiskSpace { path: path(), needed: 2, available: 1 }.into(), SPACE);
        check(ConvertError::DiskFull { part: path() }.into(), SPACE);
        check(ConvertError::Cancelled { kept: Some(path()) }.into(), INTERRUPTED);
        check(ConvertError::Format(FormatError::Empty).into(), INPUT);
        check(ConvertError::Threads { n: 8, reason: "r".into() }.into(), FAILED);
        check(
            ConvertError::Io { action: "write", path: path(), cause: kind(io::ErrorKind::StorageFull) }
                .into(),
            SPACE,
        );
        check(kind(io::ErrorKind::BrokenPipe).into(), FAILED);
    }
}
