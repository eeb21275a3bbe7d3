//! Carrying out a plan: hash the sources, make and write every tensor, read the result back.
//!
//! Two batches of units are in memory: while rayon's threads convert one, another thread's turn writes the one
//! before. Tensors are written in order, so the file depends on nothing but the sources and the options. The
//! unfinished file and its journal stay behind after any failure; the final name appears last, after the file has
//! been read back. The journal is locked from before the hashing until then, so one output has one writer.

use std::borrow::Cow;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rayon::prelude::*;
use samara_format::{FileLayout, Tensor, TensorWriter, Writer, check_part, part_path};
use serde::{Serialize, Serializer};

use crate::error::Error;
use crate::journal::{Binding, Entry, Journal};
use crate::options::Options;
use crate::plan::{Plan, thread_count};
use crate::produce::{Job, Slot};
use crate::progress::Progress;
use crate::recipe::Output;
use crate::source::SourceFile;
use crate::target::{check_leftovers, check_room, check_target};
use crate::ternary::Counts;
use crate::verify::{self, Written};

/// Bytes written before they are synced and journalled even if a layer has not ended.
const SYNC_LEN: u64 = 32 << 20;

/// What a conversion did.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The finished file.
    pub output: PathBuf,
    /// Its length, bytes.
    pub output_bytes: u64,
    /// The hash in its header, hexadecimal; it covers every tensor's hash.
    pub digest: String,
    /// Bytes of the source files.
    pub source_bytes: u64,
    /// Tensors in the output.
    pub tensors: usize,
    /// Tensors of these that an earlier, interrupted run had finished.
    pub resumed_tensors: usize,
    /// The proof: rows, zero rows, -0.0 weights, rounded rows.
    pub counts: Counts,
    /// Seconds spent hashing the sources.
    #[serde(serialize_with = "seconds")]
    pub hash_seconds: Duration,
    /// Seconds spent converting and writing.
    #[serde(serialize_with = "seconds")]
    pub convert_seconds: Duration,
    /// Seconds spent reading the result back.
    #[serde(serialize_with = "seconds")]
    pub verify_seconds: Duration,
}

fn seconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64())
}

/// Converts as planned and writes `out`.
///
/// Of `options`, `force`, `resume` and `threads` count here; the others were fixed by [`crate::plan()`]. When `cancel`
/// becomes true the conversion ends with [`Error::Cancelled`]. After every failure the unfinished file and its
/// journal are kept for `resume`, and what was under the name `out` before is still there.
///
/// # Errors
/// Those of [`check_target`] before any work; a full disk, a row that is not ternary, a source that changed, and so
/// on.
pub fn convert(
    plan: &Plan,
    out: &Path,
    options: &Options,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<Report, Error> {
    check_target(plan, out, options)?;
    let part = part_path(out);
    let journal = Journal::lock(&part)?;
    // Until the lock was held another conversion could begin or end.
    check_leftovers(out, options)?;
    let threads = thread_count(options);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|error| Error::Threads { n: threads, reason: error.to_string() })?;
    let conversion = Conversion { plan, out, part, threads, progress, cancel };
    pool.install(|| conversion.run(journal, options))
}

struct Conversion<'a> {
    plan: &'a Plan,
    out: &'a Path,
    part: PathBuf,
    threads: usize,
    progress: &'a dyn Progress,
    cancel: &'a AtomicBool,
}

/// The file being written, its journal, and what is not in the journal yet.
struct Target {
    writer: Writer,
    journal: Journal,
    pending: Vec<Entry>,
    pending_len: u64,
}

impl Conversion<'_> {
    fn run(&self, journal: Journal, options: &Options) -> Result<Report, Error> {
        let start = Instant::now();
        let hashes = self.hash_sources()?;
        let hashed = Instant::now();
        let layout = self.plan.layout(&hashes)?;
        let sources = self.plan.source_names().zip(hashes.iter().copied());
        let binding = Binding::new(layout.digest(), &self.plan.bound, sources);
        let mut written = Written { tensors: layout.tensors().to_vec(), data_offset: layout.data_offset() };
        let output_bytes = layout.file_len();
        let (mut target, done) =
            self.open_target(layout, journal, &binding, options).map_err(|e| self.disk_full(e))?;
        let outputs = self.ordered_outputs()?;
        let mut counts = self.write_rest(&outputs, &mut written, &mut target, done.len())?;
        done.iter().for_each(|entry| counts += entry.counts);
        let sealed = target.writer.seal().map_err(|e| self.disk_full(e.into()))?;
        let converted = Instant::now();
        let digest = self.read_back(&written)?;
        let verify_seconds = converted.elapsed();
        sealed.commit()?;
        target.journal.remove()?;
        Ok(Report {
            output: self.out.to_owned(),
            output_bytes,
            digest: format!("{digest:032x}"),
            source_bytes: self.plan.summary().source_bytes,
            tensors: written.tensors.len(),
            resumed_tensors: done.len(),
            counts,
            hash_seconds: hashed - start,
            convert_seconds: converted - hashed,
            verify_seconds,
        })
    }

    /// The plan's outputs, with head rows sorted into clusters if that is part of the plan.
    fn ordered_outputs(&self) -> Result<Cow<'_, [Output]>, Error> {
        let plan = self.plan;
        let Some(clusters) = plan.clusters_to_build() else { return Ok(Cow::Borrowed(&plan.outputs)) };
        self.progress.phase("cluster", clusters.build_work());
        let order = clusters.build(&plan.checkpoint.files, &|bytes| {
            self.progress.advance(bytes);
            self.check_cancelled()
        })?;
        let order = order.into();
        let mut outputs = plan.outputs.clone();
        outputs.iter_mut().for_each(|output| output.recipe.reorder(&order));
        Ok(Cow::Owned(outputs))
    }

    /// Writes the tensors that are not done, and notes the hashes of all.
    fn write_rest(
        &self,
        outputs: &[Output],
        written: &mut Written,
        target: &mut Target,
        n_done: usize,
    ) -> Result<Counts, Error> {
        let made = self.write_tensors(outputs, &written.tensors, target, n_done);
        // What was made before a stop is worth keeping.
        let flushed = target.flush();
        let counts = made.map_err(|e| self.disk_full(e))?;
        flushed.map_err(|e| self.disk_full(e))?;
        self.plan.checkpoint.files.iter().try_for_each(SourceFile::check_unchanged)?;
        for (tensor, &hash) in written.tensors.iter_mut().zip(target.writer.done()) {
            tensor.hash = hash;
        }
        Ok(counts)
    }

    /// Reads the complete file, which has no final name yet. Returns the hash in its header.
    fn read_back(&self, written: &Written) -> Result<u128, Error> {
        self.progress.phase("verify", written.tensors.iter().map(|tensor| tensor.len).sum());
        verify::verify(&self.part, written, &|bytes| {
            self.progress.advance(bytes);
            self.check_cancelled()
        })
    }

    fn check_cancelled(&self) -> Result<(), Error> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(Error::Cancelled { kept: self.part.is_file().then(|| self.part.clone()) });
        }
        Ok(())
    }

    /// xxh3-128 of every source file, in the order of the plan's names.
    fn hash_sources(&self) -> Result<Vec<u128>, Error> {
        let files = &self.plan.checkpoint.files;
        self.progress.phase("hash", self.plan.summary().source_bytes);
        let step = |bytes: u64| {
            self.progress.advance(bytes);
            self.check_cancelled()
        };
        let hashes: Vec<Result<u128, Error>> = files.par_iter().map(|file| file.hash(&step)).collect();
        let texts = self.plan.text_files.iter().map(|(_, bytes)| Ok(xxhash_rust::xxh3::xxh3_128(bytes)));
        hashes.into_iter().chain(texts).collect()
    }

    /// Opens the unfinished file, new or resumed. Returns the tensors that are done.
    fn open_target(
        &self,
        layout: FileLayout,
        mut journal: Journal,
        binding: &Binding,
        options: &Options,
    ) -> Result<(Target, Vec<Entry>), Error> {
        let resumed = match check_part(self.out)? {
            Some(_) if options.resume => journal.resume(binding)?,
            _ => None,
        };
        check_room(self.out, layout.file_len())?;
        let target = |writer, journal| Target { writer, journal, pending: Vec::new(), pending_len: 0 };
        if let Some(done) = resumed {
            let hashes: Vec<u128> = done.iter().filter_map(Entry::hash).collect();
            let message = format!("resuming after {} of {} tensors", done.len(), layout.tensors().len());
            let writer = Writer::resume(self.out, layout, &hashes)?;
            self.progress.message(&message);
            return Ok((target(writer, journal), done));
        }
        // An old journal must not stand beside a new file, nor a new journal beside an old file.
        journal.clear()?;
        let writer = Writer::create(self.out, layout, options.force)?;
        journal.start(binding)?;
        Ok((target(writer, journal), Vec::new()))
    }

    fn write_tensors(
        &self,
        outputs: &[Output],
        tensors: &[Tensor],
        target: &mut Target,
        n_done: usize,
    ) -> Result<Counts, Error> {
        // What an earlier run has done is not counted: the rate and the time left are of this one.
        self.progress
            .phase("convert", outputs[n_done..].iter().map(|output| output.recipe.source_len()).sum());
        let mut batches = [Vec::new(), Vec::new()];
        let mut total = Counts::default();
        for (output, tensor) in outputs.iter().zip(tensors).skip(n_done) {
            let (files, ternarize) = (self.plan.checkpoint.files.as_slice(), self.plan.bound.ternarize());
            let job = Job { files, recipe: &output.recipe, tensor, ternarize };
            let mut tensor_writer = target.writer.tensor()?;
            let counts = self.write_tensor(&job, &mut tensor_writer, &mut batches)?;
            let hash = tensor_writer.finish()?;
            total += counts;
            target.pending.push(Entry::new(&tensor.name, hash, counts));
            target.pending_len += tensor.len;
            if tensor.n_blocks > 1 || target.pending_len >= SYNC_LEN {
                target.flush()?;
            }
        }
        Ok(total)
    }

    /// Makes and writes all units of one tensor.
    fn write_tensor(
        &self,
        job: &Job<'_>,
        writer: &mut TensorWriter<'_>,
        batches: &mut [Vec<Slot>; 2],
    ) -> Result<Counts, Error> {
        let batch_len = Plan::batch_len(job, self.threads);
        let [making, ready] = batches;
        let (mut making, mut ready) = (making, ready);
        for batch in [&mut *making, &mut *ready] {
            batch.resize_with(batch_len.max(batch.len()), Slot::default);
        }
        let mut counts = Counts::default();
        let mut n_ready = 0;
        for first in (0..job.n_units()).step_by(batch_len) {
            self.check_cancelled()?;
            let n = batch_len.min(job.n_units() - first);
            let (written, made) =
                rayon::join(|| append(writer, &ready[..n_ready]), || self.make(job, first, &mut making[..n]));
            written?;
            counts += made?;
            std::mem::swap(&mut making, &mut ready);
            n_ready = n;
        }
        append(writer, &ready[..n_ready])?;
        Ok(counts)
    }

    /// Makes consecutive units, one a slot. The first failing unit's error is returned.
    fn make(&self, job: &Job<'_>, first: usize, slots: &mut [Slot]) -> Result<Counts, Error> {
        let make = |(i, slot): (usize, &mut Slot)| {
            let (counts, source_len) = job.unit(first + i, slot)?;
            self.progress.advance(source_len);
            Ok(counts)
        };
        let made: Vec<Result<Counts, Error>> = slots.par_iter_mut().enumerate().map(make).collect();
        let mut total = Counts::default();
        for counts in made {
            total += counts?;
        }
        Ok(total)
    }

    fn disk_full(&self, error: Error) -> Error {
        name_full_disk(error, &self.part)
    }
}

/// Says plainly that the disk is full where that is the reason.
fn name_full_disk(error: Error, part: &Path) -> Error {
    let kind = match &error {
        Error::Io { cause, .. } => cause.kind(),
        Error::Format(samara_format::Error::Io { cause, .. }) => cause.kind(),
        _ => return error,
    };
    match kind {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Error::DiskFull { part: part.to_owned() },
        _ => error,
    }
}

impl Target {
    /// Syncs the data, then records what they are.
    fn flush(&mut self) -> Result<(), Error> {
        if !self.pending.is_empty() {
            self.writer.sync()?;
            self.journal.append(&self.pending)?;
            self.pending.clear();
            self.pending_len = 0;
        }
        Ok(())
    }
}

fn append(writer: &mut TensorWriter<'_>, slots: &[Slot]) -> Result<(), Error> {
    slots.iter().try_for_each(|slot| Ok(writer.append(&slot.out)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_named_and_nothing_else_is() {
        let check = |kind: ErrorKind, full: bool| {
            let part = Path::new("m.samara.part");
            let own = Error::io("write", part)(kind.into());
            let format =
                samara_format::Error::Io { action: "write to", path: part.into(), cause: kind.into() };
            for error in [own, format.into()] {
                let named = name_full_disk(error, part);
                assert_eq!(matches!(named, Error::DiskFull { .. }), full, "{kind}: {named}");
            }
        };
        check(ErrorKind::StorageFull, true);
        check(ErrorKind::QuotaExceeded, true);
        check(ErrorKind::PermissionDenied, false);
        let other = Error::ConfigMissing { key: "x".to_owned() };
        assert!(matches!(name_full_disk(other, Path::new("x")), Error::ConfigMissing { .. }));
    }
}
