//! Every piece once, whatever the threads do: pieces, panics, parking, and the life of a pool.

use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

use samara_pool::{At, Chunks, Pool, Tasks};

const THREADS: [usize; 5] = [1, 2, 3, 7, 16];
const PIECES: [usize; 5] = [0, 1, 2, 5, 1000];
const MIN_RUNS: [usize; 5] = [0, 1, 3, 64, 5000];

fn pool(n_threads: usize) -> Pool {
    Pool::new(n_threads).expect("threads start")
}

/// Whether `runs`, in any order, are `0..pieces` once, in runs of whole `min_run`s but for the last.
fn check(mut runs: Vec<Range<usize>>, pieces: usize, min_run: usize) -> Result<(), String> {
    runs.sort_by_key(|run| run.start);
    let mut next = 0;
    for run in runs {
        match run.start {
            start if start < next => return Err(format!("{start} twice")),
            start if start > next => return Err(format!("{next} left out")),
            _ => next = run.end,
        }
        if run.is_empty() {
            return Err("an empty run".into());
        }
        if run.len() % min_run.max(1) != 0 && run.end != pieces {
            return Err(format!("a run of {}", run.len()));
        }
    }
    if next == pieces { Ok(()) } else { Err(format!("{next} pieces")) }
}

fn check_tasks(pool: &mut Pool, pieces: usize, min_run: usize) {
    let mut runs = vec![vec![]; pool.n_threads()];
    pool.run(Tasks(pieces), min_run, &mut runs, |runs: &mut Vec<_>, first, run| {
        assert_eq!(first, run.start);
        runs.push(run);
    });
    let (active, idle) = runs.split_at(pool.active());
    assert!(idle.iter().all(Vec::is_empty), "a worker that is not active");
    if let Err(why) = check(active.concat(), pieces, min_run) {
        panic!("{} threads, {pieces} pieces, min_run {min_run}: {why}", pool.active());
    }
}

fn message(run: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(run)).expect_err("no panic");
    match payload.downcast::<String>() {
        Ok(text) => *text,
        Err(payload) => payload.downcast_ref::<&str>().expect("text").to_string(),
    }
}

#[test]
fn the_check_sees_planted_faults() {
    let runs = |runs: &[(usize, usize)]| check(runs.iter().map(|&(a, b)| a..b).collect(), 10, 2);
    assert_eq!(runs(&[(4, 10), (0, 4)]), Ok(()));
    assert_eq!(runs(&[(0, 4), (2, 10)]), Err("2 twice".into()));
    assert_eq!(runs(&[(0, 4), (0, 4), (4, 10)]), Err("0 twice".into()));
    assert_eq!(runs(&[(0, 4), (6, 10)]), Err("4 left out".into()));
    assert_eq!(runs(&[(2, 10)]), Err("0 left out".into()));
    assert_eq!(runs(&[(0, 8)]), Err("8 pieces".into()));
    assert_eq!(runs(&[(0, 3), (3, 10)]), Err("a run of 3".into()));
    assert_eq!(runs(&[(0, 0), (0, 10)]), Err("an empty run".into()));
}

#[test]
fn every_piece_once() {
    for n_threads in THREADS {
        let mut pool = pool(n_threads);
        for pieces in PIECES {
            for min_run in MIN_RUNS {
                check_tasks(&mut pool, pieces, min_run);
            }
        }
    }
}

/// Elements get the number of their piece and are counted up, so one that is written twice or not at all shows.
#[test]
fn slices_are_cut_as_a_loop_would() {
    let bounds_of = |pieces: usize| -> Vec<u32> {
        let sizes = (0..pieces).map(|i| if i % 3 == 1 { 0 } else { i as u32 % 5 });
        let ends = sizes.scan(2, |end, size| {
            *end += size;
            Some(*end)
        });
        std::iter::once(2).chain(ends).collect()
    };
    for n_threads in THREADS {
        let mut pool = pool(n_threads);
        for pieces in PIECES {
            for min_run in MIN_RUNS {
                let bounds = bounds_of(pieces);
                let len = *bounds.last().unwrap() as usize * 3 + 4;
                // The last piece of 4 has one element.
                let (mut a, mut b, mut c) =
                    (vec![1; (pieces * 4).saturating_sub(3)], vec![1; len], vec![1; pieces]);
                let items = (
                    Chunks::new(&mut a, 4),
                    At::new(&mut b, &bounds, 3),
                    Chunks::new(&mut c, 1),
                    Tasks(pieces),
                    Tasks(pieces),
                );
                let mut scratch = vec![(); n_threads];
                pool.run(items, min_run, &mut scratch, |(), first, (a, b, c, tasks, same)| {
                    assert_eq!((first, c.len()), (tasks.start, tasks.len()));
                    assert_eq!(tasks, same);
                    a.iter_mut().enumerate().for_each(|(i, a)| *a += first + i / 4);
                    let b_at = bounds[first] as usize * 3;
                    b.iter_mut().enumerate().for_each(|(i, b)| *b += b_at + i);
                    assert_eq!(b.len(), (bounds[tasks.end] - bounds[first]) as usize * 3);
                    c.iter_mut().zip(tasks).for_each(|(c, i)| *c += i * i);
                });
                assert!(a.iter().enumerate().all(|(i, &a)| a == 1 + i / 4));
                let inside = |i: &usize| (6..len - 4).contains(i);
                assert!((0..len).all(|i| b[i] == 1 + if inside(&i) { i } else { 0 }));
                assert!(c.iter().enumerate().all(|(i, &c)| c == 1 + i * i));
            }
        }
    }
}

#[test]
fn tuples_of_two_to_four() {
    let mut pool = pool(2);
    let (mut a, mut b, mut c) = ([0; 9], [0; 6], [0; 3]);
    let mut none = [(); 2];
    pool.run((Chunks::new(&mut a, 3), Chunks::new(&mut b, 2)), 1, &mut none, |(), first, (a, b)| {
        a.fill(first + 1);
        b.fill(a.len());
    });
    assert!(a.iter().all(|&a| a > 0) && b.iter().all(|&b| b % 3 == 0 && b > 0));
    let items = (Chunks::new(&mut a, 3), Chunks::new(&mut b, 2), Chunks::new(&mut c, 1));
    pool.run(items, 1, &mut none, |(), _, (a, b, c)| c.fill(a.len() * 10 / c.len() + b.len() / c.len()));
    assert_eq!(c, [32; 3]);
    let items = (Chunks::new(&mut a, 3), Chunks::new(&mut b, 2), Chunks::new(&mut c, 1), Tasks(3));
    pool.run(items, 1, &mut none, |(), _, (_, _, c, tasks)| c.copy_from_slice(&tasks.collect::<Vec<_>>()));
    assert_eq!(c, [0, 1, 2]);
}

#[test]
fn what_does_not_fit_is_refused() {
    type Row = (&'static str, &'static str, fn(&mut Pool));
    fn at(bounds: &[u32], unit: usize) {
        At::new(&mut [0; 8], bounds, unit);
    }
    let mut pool = pool(3);
    let rows: [Row; 9] = [
        ("scratch", "scratch for 2 workers, 3 are active", |pool| {
            pool.run(Tasks(1), 1, &mut [(); 2], |(), _, _| {});
        }),
        ("pair", "member 1 has other", |pool| {
            pool.run((Tasks(1), Tasks(2)), 1, &mut [(); 3], |(), _, _| {});
        }),
        ("last of five", "member 4 has other", |pool| {
            pool.run((Tasks(1), Tasks(1), Tasks(1), Tasks(1), Tasks(0)), 1, &mut [(); 3], |(), _, _| {});
        }),
        ("piece", "at least one element", |_| {
            Chunks::new(&mut [0; 8], 0);
        }),
        ("no bounds", "n + 1 numbers", |_| at(&[], 1)),
        ("descending", "ascend", |_| at(&[0, 2, 1], 1)),
        ("beyond", "bounds end at 5 units of 2, the slice at 8", |_| at(&[0, 5], 2)),
        ("overflow", "bounds end", |_| at(&[0, 2], usize::MAX / 2 + 1)),
        ("no thread", "caller's thread", |_| drop(Pool::new(0))),
    ];
    for (what, part, run) in rows {
        let text = message(|| run(&mut pool));
        assert!(text.contains(part), "{what}: {text}");
    }
    check_tasks(&mut pool, 100, 1);
}

/// Each worker that is to panic is waited for by the others, so that it has a piece.
#[test]
fn a_panic_comes_to_the_caller() {
    let mut pool = pool(3);
    let mut ids = [0, 1, 2];
    for round in 0..200 {
        for culprit in [0, 1, 2] {
            let there = AtomicBool::new(false);
            let text = message(|| {
                pool.run(Tasks(12), 1, &mut ids, |&mut id, _, _| {
                    if id == culprit {
                        there.store(true, SeqCst);
                        panic!("worker {id}, round {round}");
                    }
                    while !there.load(SeqCst) {
                        thread::yield_now();
                    }
                });
            });
            assert_eq!(text, format!("worker {culprit}, round {round}"));
            check_tasks(&mut pool, 100, 1);
        }
    }
    let calls = AtomicUsize::new(0);
    let text = message(|| {
        pool.run(Tasks(1000), 1, &mut ids, |_, _, _| {
            calls.fetch_add(1, SeqCst);
            panic!("all");
        });
    });
    assert_eq!(text, "all");
    assert!(calls.load(SeqCst) <= 3, "no new runs after a panic");
    pool.set_active(1);
    assert_eq!(message(|| pool.run(Tasks(2), 1, &mut ids, |_, _, _| panic!("alone"))), "alone");
    check_tasks(&mut pool, 100, 1);
}

#[test]
fn active_threads_change_between_runs() {
    let mut pool = pool(7);
    assert_eq!((pool.n_threads(), pool.active()), (7, 7));
    for (n, active) in [(0, 1), (1, 1), (7, 7), (8, 7), (usize::MAX, 7)] {
        pool.set_active(n);
        assert_eq!((pool.n_threads(), pool.active()), (7, active));
    }
    for i in 0..2000 {
        pool.set_active(i * 5 % 8);
        check_tasks(&mut pool, i % 40, 1);
    }
}

/// One worker has to do what the other waits for, so a lost wake-up is a test that does not end.
#[test]
fn parked_workers_wake() {
    let mut pool = pool(2);
    for i in 0..3000_u64 {
        // From well awake to well parked; most around the moment of parking.
        thread::sleep(Duration::from_micros([0, 100, 150, 200, 400][i as usize % 5]));
        let there = AtomicUsize::new(0);
        pool.run(Tasks(2), 1, &mut [(); 2], |(), _, _| {
            there.fetch_add(1, SeqCst);
            while there.load(SeqCst) < 2 {
                thread::yield_now();
            }
        });
    }
}

#[test]
fn more_threads_than_cores_finish() {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let mut pool = pool(4 * cores + 1);
    let mut sums = vec![0; pool.n_threads()];
    let start = Instant::now();
    for _ in 0..2000 {
        pool.run(Tasks(64), 1, &mut sums, |sum, _, run| *sum += run.sum::<usize>());
    }
    assert_eq!(sums.iter().sum::<usize>(), 2000 * (64 * 63 / 2));
    assert!(start.elapsed() < Duration::from_secs(60), "that is not waiting, that is hanging");
}

#[test]
fn pools_come_and_go() {
    for i in 0..200 {
        let (mut a, mut b) = (pool(1 + i % 4), pool(3));
        check_tasks(&mut a, i, 1);
        check_tasks(&mut b, i, 2);
        if i % 10 == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        if i % 3 == 0 {
            check_tasks(&mut a, i, 1);
        }
    }
}

/// A pool may be used from inside another, and moves between threads.
#[test]
fn pools_within_pools_and_elsewhere() {
    let mut outer = pool(2);
    let mut inner = [pool(2), pool(3)];
    outer.run(Tasks(20), 1, &mut inner, |inner, _, run| run.for_each(|n| check_tasks(inner, n, 1)));
    let mut moved = thread::spawn(move || {
        check_tasks(&mut outer, 100, 1);
        outer
    })
    .join()
    .unwrap();
    check_tasks(&mut moved, 100, 1);
}

#[test]
fn threads_have_names() {
    let mut pool = pool(2);
    let mut names = [String::new(), String::new()];
    let there = AtomicUsize::new(0);
    pool.run(Tasks(2), 1, &mut names, |name, _, _| {
        *name = thread::current().name().unwrap_or_default().to_owned();
        there.fetch_add(1, SeqCst);
        while there.load(SeqCst) < 2 {
            thread::yield_now();
        }
    });
    assert_eq!(names[1], "samara-1");
}
