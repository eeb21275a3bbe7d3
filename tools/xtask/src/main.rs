//! Developer tasks, run as `cargo xtask TASK`. `ci` is everything a change must pass, with its own set-up; `dist` makes releases.

#![forbid(unsafe_code)]

mod ci;
mod debian;
mod dist;
mod process;
mod readme;
mod runs;
mod sysroot;
mod tally;
mod target;
mod tools;
mod wine;

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.split_first() {
        Some((task, steps)) if task == "ci" => ci::run(steps),
        Some((task, targets)) if task == "dist" => dist::run(targets),
        _ => {
            eprintln!(
                "usage: cargo xtask ci [STEP]...\n       {}\n\nSteps, all of them in this order unless some are named:\n{}",
                dist::help(),
                ci::help()
            );
            ExitCode::from(2)
        }
    }
}
