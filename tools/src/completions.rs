//! `samara completions`: the script that teaches a shell this command line.

use std::io::Write;

use anyhow::Result;
use clap::CommandFactory;

use crate::cli::{Cli, Completions};

pub(crate) fn run(args: &Completions) -> Result<()> {
    // Made in memory first: the generator panics when it cannot write.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "samara", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(())
}
