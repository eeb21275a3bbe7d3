//! The `samara` program: reads the command line, runs one command, turns its end into an exit code.
//!
//! Everything that computes is in the libraries; here is what they refuse to do: print, read the environment,
//! listen to signals and exit.
#![forbid(unsafe_code)]

mod bench;
mod chat;
mod choices;
mod cli;
mod completions;
mod convert;
mod demo;
mod devices;
mod doctor;
mod failure;
mod folders;
mod head;
mod inspect;
mod interrupt;
mod load;
mod machine;
mod man;
mod output;
mod ppl;
mod progress;
mod prompt;
mod run;
mod shell;
mod synth;
mod verify;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refused(&error),
    };
    if cli.command.looks_for_gpus() {
        devices::silence_drivers();
    }
    interrupt::end_by_code();
    let json = cli.command.json();
    let result = match cli.command {
        Command::Convert(args) => convert::run(&args),
        Command::Run(args) => run::run(*args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Ppl(args) => ppl::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Devices(args) => devices::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Completions(args) => completions::run(&args),
        Command::Man(args) => man::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report(&error, json),
    }
}

/// Help, the version, or what is wrong with the command line.
fn refused(error: &clap::Error) -> ExitCode {
    // Help goes to standard output, which may be closed: nothing is left to say then.
    let _ = error.print();
    if !error.use_stderr() {
        return ExitCode::SUCCESS;
    }
    if std::env::args_os().any(|arg| arg == "--json") {
        let text = error.render().to_string();
        let text = text.trim().trim_start_matches("error: ");
        output::json_error(output::Json::Object, text, failure::USAGE);
    }
    ExitCode::from(failure::USAGE)
}
