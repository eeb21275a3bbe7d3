//! A pool made for decode: threads that wait awake, and one operation, [`Pool::run`], which hands out pieces of some
//! slices and returns when all are done.
//!
//! # Why not rayon
//!
//! A token of decode is about 150 forks and joins with some microseconds of work between them. rayon wakes its
//! workers through a lock and a condition variable, lets them sleep soon, and splits by halves: right for work of
//! milliseconds and unknown shape. Here the shape is known (rows, all alike, streamed from memory) and the fork is
//! what costs. So: one job at a time, a store to publish it, workers that spin for a while before they park, and no
//! allocation. It is not for nested work, for work that blocks, or for tasks that differ.
//!
//! A worker takes a run of consecutive pieces from one cursor, about half of its fair share of what is left: long
//! streams first, short ones at the end, so a slow or busy core only takes fewer. A worker that has not come when the
//! pieces are gone is not waited for: the run is taken back from it.
//!
//! # Why this is sound
//!
//! The threads live longer than a job's borrows, so a job is published as a pointer without its lifetime. With `g`
//! the number (generation) of a run, which only grows:
//!
//! 1. A worker reads the job only after it has put "inside `g`" in its slot, by a compare-exchange from an older
//!    value. It stores "done `g`" when it has left the job for good.
//! 2. The caller of run `g` returns, or unwinds, only when every slot it published to says "done `g`". In a slot that
//!    is still older it puts that itself, by a compare-exchange, so for each worker exactly one of the two wins; a
//!    worker with an old number finds a newer one in its slot and stays out. Thus nobody is inside a job after its
//!    run.
//! 3. The job is written only between runs. A worker's read of it comes after the store of the number that it read
//!    (release, acquire), and before "done" (release, acquire), thus before the next write. "Done" also
//!    makes all that the worker wrote visible to the caller.
//! 4. The cursor of a run only grows, by compare-exchange from what it was (a panic puts it at the end), so a piece is
//!    handed out once. Worker `i` alone uses scratch `i`.
//! 5. A worker says that it parks, then looks at the number; the caller stores the number, then looks who is parked.
//!    All four are sequentially consistent, so at least one sees the other and no wake-up is lost.
//! 6. Panics in the work are caught on the thread they are on, so 1 and 2 hold for them too.

mod disjoint;

use std::{
    any::Any,
    cell::UnsafeCell,
    hint::spin_loop,
    io, iter, mem,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{
            AtomicBool, AtomicU64, AtomicUsize,
            Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst},
        },
    },
    thread::{self, Builder, JoinHandle},
    time::{Duration, Instant},
};

pub use disjoint::{At, Chunks, Disjoint, Tasks};

/// A worker without a job waits awake this long. Longer than what is serial in a token.
const AWAKE: Duration = Duration::from_micros(200);
/// After this long it offers its core to other threads between looks.
const GREEDY: Duration = Duration::from_micros(30);
/// Looks between two looks at the clock.
const LOOKS: u32 = 128;
/// Looks of a waiting caller (10 to 40 µs) before it offers its core to other threads.
const CALLER_LOOKS: u32 = 1000;

/// In place of a number of threads: all workers end.
const STOP: u16 = u16::MAX;

/// Threads that run one job at a time, the thread of the caller among them. See the [crate](self) for what it is for.
pub struct Pool {
    shared: Arc<Shared>,
    /// Thread `i` is worker `i + 1`.
    threads: Vec<JoinHandle<()>>,
    active: usize,
    generation: u64,
}

impl Pool {
    /// A pool of `n_threads` threads, the caller's included: it starts `n_threads - 1`, named `samara-1` and so on.
    /// All are active.
    ///
    /// # Errors
    ///
    /// If a thread cannot be started; those that were are stopped. Or if it is more than 65534 threads.
    ///
    /// # Panics
    ///
    /// If `n_threads` is 0.
    pub fn new(n_threads: usize) -> io::Result<Self> {
        Self::start(n_threads, |worker| Builder::new().name(format!("samara-{worker}")))
    }

    fn start(n_threads: usize, builder: impl Fn(usize) -> Builder) -> io::Result<Self> {
        assert!(n_threads > 0, "a pool has at least the caller's thread");
        if n_threads >= usize::from(STOP) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{n_threads} threads")));
        }
        let slots = iter::repeat_with(Slot::default).take(n_threads - 1).collect();
        let shared = Arc::new(Shared { board: Board::default(), slots });
        let mut pool = Self { shared, threads: Vec::with_capacity(n_threads - 1), active: 1, generation: 0 };
        for worker in 1..n_threads {
            let shared = Arc::clone(&pool.shared);
            pool.threads.push(builder(worker).spawn(move || shared.serve(worker))?);
        }
        pool.active = n_threads;
        Ok(pool)
    }

    /// Number of threads, the caller's included.
    pub fn n_threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Sets how many threads the following runs use, at least 1 and at most [`n_threads`](Self::n_threads). The
    /// others park soon and cost nothing.
    pub fn set_active(&mut self, n: usize) {
        self.active = n.clamp(1, self.n_threads());
    }

    /// Number of threads that runs use, the caller's included.
    pub fn active(&self) -> usize {
        self.active
    }

    /// Hands runs of consecutive pieces to the active threads and returns when all pieces are done.
    ///
    /// A call is `work(scratch, first, run)`: the scratch of this worker, the number of the run's first piece, and
    /// the pieces. `first` is a multiple of `min_run`, and so is the number of pieces, but for the last run; a
    /// `min_run` of 0 is 1. Which worker takes which run, and whether a worker takes one, is left to chance; the
    /// caller is worker 0. With one active thread, or no more than `min_run` pieces, it is one plain call on this
    /// thread, and none for no pieces.
    ///
    /// Neighbours in `scratch` are used at the same time: elements that are written much should be some cache lines.
    ///
    /// # Panics
    ///
    /// If `scratch` has fewer elements than there are active threads, or the members of a tuple have different
    /// numbers of pieces. And with the first panic of `work`, on whichever thread: no new runs are handed out then,
    /// those begun are finished, and the pool stays usable.
    pub fn run<D: Disjoint, S: Send>(
        &mut self,
        items: D,
        min_run: usize,
        scratch: &mut [S],
        work: impl Fn(&mut S, usize, D::Run) + Sync,
    ) {
        let (found, active) = (scratch.len(), self.active);
        assert!(found >= active, "scratch for {found} workers, {active} are active");
        let (pieces, min_run) = (items.pieces(), min_run.max(1));
        let workers = active.min(pieces.div_ceil(min_run));
        match workers {
            0 => {}
            // SAFETY: all pieces, once.
            1 => work(&mut scratch[0], 0, unsafe { items.take(0..pieces) }),
            _ => {
                let (cursor, panic) = (Line(AtomicUsize::new(0)), Mutex::new(None));
                let scratch = scratch.as_mut_ptr();
                let shift = Shift { cursor, items, pieces, min_run, workers, scratch, work, panic };
                // SAFETY: there is scratch for all these workers, and none else is told to take part.
                unsafe { self.fork_join(&shift, workers) };
                if let Some(payload) = shift.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
                    resume_unwind(payload);
                }
            }
        }
    }

    /// Has workers `0..workers` take part in `shift`; 0 is this thread. Does not unwind.
    ///
    /// # Safety
    ///
    /// Those of [`Work::take_part`] for these workers.
    unsafe fn fork_join<W: Work>(&mut self, shift: &W, workers: usize) {
        /// # Safety
        ///
        /// `shift` points to a living `W`; and those of [`Work::take_part`].
        unsafe fn call<W: Work>(shift: *const (), worker: usize) {
            // SAFETY: this function's own conditions.
            unsafe { (*shift.cast::<W>()).take_part(worker) }
        }
        // SAFETY: no run is going on (`&mut self`), so no worker is inside a job (2) and reads this one.
        unsafe { *self.shared.board.job.get() = Job { shift: (&raw const *shift).cast(), call: call::<W> } };
        let helpers = || self.shared.slots.iter().zip(&self.threads).take(workers - 1);
        self.generation += 1;
        self.shared.board.publish(self.generation, workers as u16);
        for (slot, thread) in helpers() {
            if slot.parked.load(SeqCst) {
                thread.thread().unpark();
            }
        }
        // SAFETY: worker 0 is this thread.
        unsafe { shift.take_part(0) };
        let mut looks = 0;
        for (slot, _) in helpers() {
            while !slot.is_done(self.generation) {
                looks += 1;
                if looks < CALLER_LOOKS { spin_loop() } else { thread::yield_now() }
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.board.publish(self.generation + 1, STOP);
        for thread in &self.threads {
            thread.thread().unpark();
        }
        for thread in self.threads.drain(..) {
            // A worker catches the panics of jobs and has none of its own; there is nobody to tell of one.
            let _ = thread.join();
        }
    }
}

/// What the threads share. `slots[i]` is worker `i + 1`'s.
struct Shared {
    board: Board,
    slots: Box<[Slot]>,
}

impl Shared {
    /// The life of a worker.
    fn serve(&self, worker: usize) {
        let slot = &self.slots[worker - 1];
        let mut generation = 0;
        loop {
            let workers;
            (generation, workers) = self.wait(worker, generation);
            if workers == STOP {
                return;
            }
            if slot.enter(generation) {
                // SAFETY: inside, so its caller waits: it writes no other job, and this one's shift lives and
                // has room for this worker, which the number of workers was said to include (1, 2, 3).
                unsafe {
                    let job = *self.board.job.get();
                    (job.call)(job.shift, worker);
                }
                slot.leave(generation);
            }
        }
    }

    /// Waits for a run after number `last` that this worker is part of; its number and workers.
    fn wait(&self, worker: usize, last: u64) -> (u64, u16) {
        let news = || {
            let (generation, workers) = self.board.read();
            (generation != last && worker < usize::from(workers)).then_some((generation, workers))
        };
        let mut since = None;
        loop {
            for _ in 0..LOOKS {
                if let Some(run) = news() {
                    return run;
                }
                spin_loop();
            }
            let idle = since.get_or_insert_with(Instant::now).elapsed();
            if idle > AWAKE {
                break;
            }
            if idle > GREEDY {
                thread::yield_now();
            }
        }
        let parked = &self.slots[worker - 1].parked;
        parked.store(true, SeqCst);
        let run = loop {
            match news() {
                Some(run) => break run,
                // May return for no reason, or for an older one.
                None => thread::park(),
            }
        };
        parked.store(false, Relaxed);
        run
    }
}

/// Two lines, since some CPUs fetch them in pairs.
#[repr(align(128))]
struct Line<T>(T);

/// Where a run is published: its number and workers in one word, and its job.
#[repr(align(128))]
struct Board {
    /// `generation << 16 | workers`. 48 bits last for centuries of decode.
    word: AtomicU64,
    job: UnsafeCell<Job>,
}

// SAFETY: a job is read and written as said in the crate's invariants 1 to 3, and its pointer is used only then.
unsafe impl Sync for Board {}
// SAFETY: as above; it belongs to no thread.
unsafe impl Send for Board {}

impl Default for Board {
    fn default() -> Self {
        unsafe fn nothing(_: *const (), _: usize) {}
        Self { word: AtomicU64::new(0), job: UnsafeCell::new(Job { shift: std::ptr::null(), call: nothing }) }
    }
}

impl Board {
    fn publish(&self, generation: u64, workers: u16) {
        self.word.store(generation << 16 | u64::from(workers), SeqCst);
    }

    fn read(&self) -> (u64, u16) {
        let word = self.word.load(SeqCst);
        (word >> 16, word as u16)
    }
}

/// A shift without its type and lifetime.
#[derive(Clone, Copy)]
struct Job {
    shift: *const (),
    call: unsafe fn(*const (), usize),
}

/// Where a worker is.
#[derive(Default)]
#[repr(align(128))]
struct Slot {
    /// `generation << 1 | inside`. Only grows, but for the end of "inside".
    state: AtomicU64,
    parked: AtomicBool,
}

impl Slot {
    /// The worker: goes inside, unless that run has been taken back.
    fn enter(&self, generation: u64) -> bool {
        let old = self.state.load(Relaxed);
        old >> 1 < generation
            && self.state.compare_exchange(old, generation << 1 | 1, AcqRel, Relaxed).is_ok()
    }

    /// The worker: is done. Nobody else writes while it is inside.
    fn leave(&self, generation: u64) {
        self.state.store(generation << 1, Release);
    }

    /// The caller: whether the worker is done, or had not begun and the run is now taken back from it.
    fn is_done(&self, generation: u64) -> bool {
        let old = self.state.load(Acquire);
        old == generation << 1
            || old >> 1 < generation
                && self.state.compare_exchange(old, generation << 1, AcqRel, Relaxed).is_ok()
    }
}

/// What the threads do in one run.
trait Work: Sync {
    /// Takes pieces until there are none. Does not unwind.
    ///
    /// # Safety
    ///
    /// `worker` has scratch in this shift, and no other thread takes part as this worker.
    unsafe fn take_part(&self, worker: usize);
}

/// One run of [`Pool::run`], on the stack of its caller.
struct Shift<D, S, W> {
    /// The first piece not yet taken.
    cursor: Line<AtomicUsize>,
    items: D,
    pieces: usize,
    min_run: usize,
    workers: usize,
    /// `workers` elements at least.
    scratch: *mut S,
    work: W,
    /// The first panic.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: the pointer is used for one element a worker, which is sending it; everything else is `Sync` by itself.
unsafe impl<D: Sync, S: Send, W: Sync> Sync for Shift<D, S, W> {}

impl<D, S, W> Shift<D, S, W> {
    fn next(&self) -> Option<Range<usize>> {
        let mut start = self.cursor.0.load(Relaxed);
        while start < self.pieces {
            let end = start + run_len(self.pieces - start, self.workers, self.min_run);
            match self.cursor.0.compare_exchange_weak(start, end, Relaxed, Relaxed) {
                Ok(_) => return Some(start..end),
                Err(now) => start = now,
            }
        }
        None
    }
}

impl<D: Disjoint, S: Send, W: Fn(&mut S, usize, D::Run) + Sync> Work for Shift<D, S, W> {
    unsafe fn take_part(&self, worker: usize) {
        // SAFETY: there is an element for this worker and nobody else uses it, says the caller.
        let scratch = unsafe { &mut *self.scratch.add(worker) };
        let end = catch_unwind(AssertUnwindSafe(|| {
            while let Some(pieces) = self.next() {
                let first = pieces.start;
                // SAFETY: from the cursor, which stays within the pieces and gives each once (4).
                (self.work)(scratch, first, unsafe { self.items.take(pieces) });
            }
        }));
        if let Err(payload) = end {
            self.cursor.0.store(self.pieces, Relaxed);
            match &mut *self.panic.lock().unwrap_or_else(PoisonError::into_inner) {
                first @ None => *first = Some(payload),
                // Not dropped: that could panic, here, where nothing catches it.
                Some(_) => mem::forget(payload),
            }
        }
    }
}

/// Pieces to take when `left` (1 at least) are left: half a fair share, in whole `min_run`s.
fn run_len(left: usize, workers: usize, min_run: usize) -> usize {
    left.div_ceil(2 * workers).div_ceil(min_run).saturating_mul(min_run).min(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_lengths() {
        let all = |mut left, workers, min_run| {
            let mut runs = vec![];
            while left > 0 {
                runs.push(run_len(left, workers, min_run));
                left -= runs[runs.len() - 1];
            }
            runs
        };
        assert_eq!(all(1, 2, 1), [1]);
        assert_eq!(all(16, 2, 1), [4, 3, 3, 2, 1, 1, 1, 1]);
        assert_eq!(all(30, 2, 4), [8, 8, 4, 4, 4, 2]);
        assert_eq!(all(9, 4, 8), [8, 1]);
        assert_eq!(run_len(usize::MAX, 2, usize::MAX - 1), usize::MAX - 1);
        assert_eq!(run_len(usize::MAX, 2, usize::MAX / 3), usize::MAX / 3);
    }

    /// A slot's whole story: whoever is first wins, and a worker that comes late stays out.
    #[test]
    fn a_run_is_entered_or_taken_back() {
        let slot = Slot::default();
        assert!(slot.enter(1) && !slot.is_done(1));
        slot.leave(1);
        assert!(slot.is_done(1) && !slot.enter(1));
        assert!(slot.is_done(2) && !slot.enter(2), "taken back");
        assert!(slot.is_done(9) && !slot.enter(3), "an old number");
        assert!(slot.enter(10) && !slot.is_done(10));
    }

    #[test]
    fn a_thread_that_cannot_start_stops_the_others() {
        let too_much = |worker| match worker {
            3 => Builder::new().stack_size(usize::MAX / 4),
            _ => Builder::new(),
        };
        assert!(Pool::start(5, too_much).is_err());
        assert!(Pool::new(usize::from(STOP)).is_err());
    }
}
