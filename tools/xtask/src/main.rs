//! Developer tasks, run as `cargo xtask TASK`. Only `ci` so far: everything a change must pass, with its own set-up.

#![forbid(unsafe_code)]

mod ci;
mod tally;

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.split_first() {
        Some((task, steps)) if task == "ci" => ci::run(steps),
        _ => {
            eprintln!(
                "usage: cargo xtask ci [STEP]...\n\nSteps, all of them in this order unless some are named:\n{}",
                ci::help()
            );
            ExitCode::from(2)
        }
    }
}
