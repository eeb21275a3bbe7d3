//! `samara man`: the manual pages, made of the same descriptions as `--help`. For packagers, so the help does not list it.

use std::path::Path;

use anyhow::{Context, Result};
use clap::{Command, CommandFactory};

use crate::cli::{Cli, Man};

pub(crate) fn run(args: &Man) -> Result<()> {
    std::fs::create_dir_all(&args.folder)
        .and_then(|()| write(&samara(), &args.folder))
        .with_context(|| format!("cannot write the manual pages into {}", args.folder.display()))
}

/// The program as clap sees it, its commands with their whole names.
fn samara() -> Command {
    let mut samara = Cli::command().disable_help_subcommand(true);
    samara.build();
    samara
}

/// The page of `command` and those of its commands.
fn write(command: &Command, folder: &Path) -> std::io::Result<()> {
    for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        write(command, folder)?;
    }
    let page = clap_mangen::Man::new(command.clone()).source(concat!("samara ", env!("CARGO_PKG_VERSION")));
    page.generate_to(folder).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_that_the_help_lists_has_a_page() {
        let folder = tempfile::tempdir().unwrap();
        let pages = folder.path().join("share/man");
        run(&Man { folder: pages.clone() }).unwrap();
        let help = samara().term_width(usize::MAX).max_term_width(usize::MAX).render_help().to_string();
        let listed =
            help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
        let mut expected: Vec<_> = listed
            .map(|line| format!("samara-{}", line.split_whitespace().next().unwrap()))
            .chain(["samara".to_owned()])
            .collect();
        expected.sort();
        assert!(expected.len() > 10, "{help}");
        let found = std::fs::read_dir(&pages).unwrap().map(|entry| entry.unwrap().path());
        let mut found: Vec<_> =
            found.map(|path| path.file_stem().unwrap().to_string_lossy().into_owned()).collect();
        found.sort();
        assert_eq!(found, expected);
        for name in found {
            let page = std::fs::read_to_string(pages.join(format!("{name}.1"))).unwrap();
            assert!(
                page.contains(&format!(".TH {name} 1")) && page.contains(env!("CARGO_PKG_VERSION")),
                "{page}"
            );
        }
    }
}
