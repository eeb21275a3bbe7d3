//! `samara verify`: every tensor's bytes against the hash that was written with them.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use anyhow::Result;
use samara_converter::Progress;
use samara_format::{Access, Error, SamaraFile};
use samara_runtime::format_bytes;
use serde_json::json;

use crate::{
    cli::Verify,
    failure::Failure,
    output::{json as print_json, line},
    progress::Reporter,
};

pub(crate) fn run(args: &Verify) -> Result<()> {
    let file = SamaraFile::open(&args.model, Access::Mmap)?;
    let index = file.index();
    let n_tensors = index.tensors().len();
    let reporter = Reporter::new(false, args.quiet || args.json);
    reporter.phase("check", index.tensors().iter().map(|tensor| tensor.len).sum());
    let damaged = damaged(&file, args.threads.count(), &|bytes| reporter.advance(bytes));
    reporter.finish();
    if args.json {
        print_json(&json!({
            "file": args.model.to_string_lossy(),
            "digest": format!("{:032x}", index.header().digest()),
            "tensors": n_tensors,
            "bytes": index.file_len(),
            "ok": damaged.is_empty(),
            "damaged": damaged.iter().map(damaged_json).collect::<Vec<_>>(),
        }))?;
    } else if damaged.is_empty() && !args.quiet {
        line(&format!(
            "{}: {n_tensors} tensors, {}: all hashes match",
            args.model.display(),
            format_bytes(index.file_len())
        ))?;
    }
    if damaged.is_empty() {
        return Ok(());
    }
    let mut text: Vec<String> = damaged.iter().map(|(_, error)| error.to_string()).collect();
    text.push(format!(
        "{} of {n_tensors} tensors are damaged: copy or convert the file again",
        damaged.len()
    ));
    Err(Failure::Input(text.join("\n")).into())
}

fn damaged_json((name, error): &(String, Error)) -> serde_json::Value {
    json!({ "tensor": name, "error": error.to_string() })
}

/// Tensors that are not what was written, in file order, with what is wrong. Uses `threads` threads, 0 for one a
/// core; `on_bytes` is told how much more is done.
pub(crate) fn damaged(
    file: &SamaraFile,
    threads: usize,
    on_bytes: &(dyn Fn(u64) + Sync),
) -> Vec<(String, Error)> {
    let tensors = file.index().tensors();
    let threads = match threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some((i, tensor)) = take(&next, tensors) {
            if let Err(error) = file.verify(tensor) {
                found.lock().unwrap_or_else(PoisonError::into_inner).push((i, error));
            }
            on_bytes(tensor.len);
        }
    };
    std::thread::scope(|scope| {
        // This thread works too, so that it ends however many others the system allows.
        for _ in 1..threads.min(tensors.len()) {
            if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.sort_by_key(|(i, _)| *i);
    found.into_iter().map(|(i, error)| (tensors[i].name.clone(), error)).collect()
}

/// The next item that no thread has taken.
fn take<'a, T>(next: &AtomicUsize, items: &'a [T]) -> Option<(usize, &'a T)> {
    let i = next.fetch_add(1, Ordering::Relaxed);
    items.get(i).map(|item| (i, item))
}
