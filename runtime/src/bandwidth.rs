//! How fast this machine reads the weights of a model: the bound of decode.
//!
//! A decoded token reads every dense weight once and some experts of each layer, all of it from memory, and computes
//! little. So what counts is how fast the model's own pages can be read by as many threads as run it: mapped as they
//! are, at the places where they lie, in blocks as long as an expert. Another buffer would have other pages.
//!
//! Two patterns are timed, both over experts, which are most of a file:
//!
//! * sequential: the experts in the order of the file, each thread a contiguous part of them;
//! * expert blocks: whole experts (gate, up, down) of all layers in a shuffled order, the same one each time; each
//!   thread takes the next when it has read one.
//!
//! A read loads every byte and adds up what it loads ([`read`]).

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use samara_pool::{Pool, Tasks};
use samara_simd::read;

use crate::{error::Error, model::Model, spec::BlockSpec};

/// Most bytes of one pass.
const PASS_BYTES: u64 = 1 << 30;
/// Passes of each pattern, unless time runs out.
const PASSES: usize = 5;
/// Fewest passes, however long they take.
const MIN_PASSES: usize = 2;
/// No further pass of a pattern begins after this.
const ENOUGH: Duration = Duration::from_millis(500);

/// How fast a model's weights are read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bandwidth {
    /// Reading experts in the order of the file.
    pub sequential: Rate,
    /// Reading whole experts in a shuffled order.
    pub expert_blocks: Rate,
    /// Bytes of one expert of one layer: gate, up and down. Where layers differ, of the first.
    pub block_bytes: u64,
    /// Bytes that a pass reads, the larger of the two patterns; about 1 GiB, or all experts if they are less. When
    /// the caches of the machine hold that much, it is they that are measured, and a token finds its weights there too.
    pub bytes_read: u64,
}

/// Speeds of several passes, GB/s (10⁹ bytes a second).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Of the fastest pass: what the machine can do when it is left alone.
    pub best: f64,
    /// Of the middle pass: what it did.
    pub median: f64,
}

impl Bandwidth {
    /// Reads weights of `model` with `threads` threads (at least one is used), again and again, and times it: half a
    /// second where memory reads at 25 GB/s.
    ///
    /// Every page is touched before the first pass, so neither the disk nor page faults are timed, unless the file is
    /// larger than the memory that may hold it.
    ///
    /// # Errors
    /// [`Error::Threads`] if threads cannot start.
    ///
    /// # Panics
    /// If the model has no layers, which no architecture makes.
    pub fn measure(model: &Model, threads: usize) -> Result<Bandwidth, Error> {
        let blocks = experts(model);
        let block_bytes = bytes_of(&blocks[0]);
        let in_order = first(&blocks, PASS_BYTES);
        let mut shuffled = blocks.clone();
        shuffle(&mut shuffled);
        let shuffled = first(&shuffled, PASS_BYTES);

        let threads = threads.clamp(1, blocks.len());
        let mut pool =
            Pool::new(threads).map_err(|error| Error::Threads { threads, reason: error.to_string() })?;
        let mut sums = vec![Sum(0); threads];
        let mut read_all = |blocks: &[Block<'_>], tasks: usize| {
            let started = Instant::now();
            pool.run(Tasks(tasks), 1, &mut sums, |sum, _, taken| {
                for task in taken {
                    let begin = |task: usize| task * blocks.len() / tasks;
                    for part in blocks[begin(task)..begin(task + 1)].iter().flatten() {
                        sum.0 = sum.0.wrapping_add(read(part));
                    }
                }
            });
            started.elapsed()
        };
        read_all(in_order, threads);
        read_all(shuffled, threads);
        let mut time = |blocks: &[Block<'_>], tasks: usize| {
            let bytes: u64 = blocks.iter().map(bytes_of).sum();
            let (began, mut speeds) = (Instant::now(), Vec::with_capacity(PASSES));
            while speeds.len() < MIN_PASSES || speeds.len() < PASSES && began.elapsed() < ENOUGH {
                // A clock that has not moved since would say infinity.
                let seconds = read_all(blocks, tasks).max(Duration::from_nanos(1)).as_secs_f64();
                speeds.push(bytes as f64 / seconds / 1e9);
            }
            speeds.sort_by(f64::total_cmp);
            (Rate { best: speeds[speeds.len() - 1], median: speeds[speeds.len() / 2] }, bytes)
        };
        let (sequential, a) = time(in_order, threads);
        let (expert_blocks, b) = time(shuffled, shuffled.len());
        // The loads are for their time, but a sum that nobody wants would be left out.
        black_box(sums);
        Ok(Bandwidth { sequential, expert_blocks, block_bytes, bytes_read: a.max(b) })
    }
}

/// Gate, up and down of one expert, as stored.
type Block<'a> = [&'a [u8]; 3];

/// A thread's sum, in cache lines of its own.
#[derive(Clone, Debug)]
#[repr(align(128))]
struct Sum(u64);

/// All experts of all layers, in the order of the file.
fn experts(model: &Model) -> Vec<Block<'_>> {
    let layers = model.architecture().blocks.iter().filter_map(|block| match block {
        BlockSpec::Layer(layer) => Some(&layer.moe),
        BlockSpec::Embed(_) | BlockSpec::Head(_) => None,
    });
    layers
        .flat_map(|moe| {
            (0..moe.n_experts).map(|expert| [0, 1, 2].map(|i| model.expert(moe.experts, expert, i)))
        })
        .collect()
}

fn bytes_of(block: &Block<'_>) -> u64 {
    block.iter().map(|part| part.len() as u64).sum()
}

/// The first blocks, one at least, that have at most `bytes`.
fn first<'b, 'a>(blocks: &'b [Block<'a>], bytes: u64) -> &'b [Block<'a>] {
    let mut left = bytes;
    let fits = |block: &&Block<'_>| {
        let rest = left.checked_sub(bytes_of(block));
        left = rest.unwrap_or(left);
        rest.is_some()
    };
    let n = blocks.iter().take_while(fits).count();
    &blocks[..n.max(1)]
}

/// Fisher and Yates, with numbers that are the same each time (Knuth's linear congruential generator).
fn shuffle<T>(items: &mut [T]) {
    let mut state = 0u64;
    for i in (1..items.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        items.swap(i, (state >> 33) as usize % (i + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_loses_nothing_and_leaves_little_in_place() {
        let mut items: Vec<usize> = (0..1000).collect();
        shuffle(&mut items);
        let again = {
            let mut items: Vec<usize> = (0..1000).collect();
            shuffle(&mut items);
            items
        };
        assert_eq!(items, again);
        let next = items.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count();
        assert!(next < 10, "{next} of 1000 are followed by their neighbour");
        items.sort_unstable();
        assert!(items.iter().copied().eq(0..1000));
    }

    #[test]
    fn the_first_blocks_are_those_that_fit_and_at_least_one() {
        let bytes = [0u8; 10];
        let blocks: Vec<Block<'_>> = vec![[&bytes, &bytes, &bytes[..4]]; 5];
        let check = |limit: u64, n: usize| assert_eq!(first(&blocks, limit).len(), n, "{limit}");
        check(0, 1);
        check(47, 1);
        check(48, 2);
        check(119, 4);
        check(1000, 5);
    }
}
