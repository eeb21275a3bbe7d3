//! Ctrl-C as a flag that the libraries look at between steps.

use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

use anyhow::{Context, Result};

use crate::failure::INTERRUPTED;

/// Set by Ctrl-C. A request to terminate ends the program as it does any other.
pub(crate) static CANCEL: AtomicBool = AtomicBool::new(false);

/// Whether anyone looks at [`CANCEL`].
static LOOKING: AtomicBool = AtomicBool::new(false);

/// From here on Ctrl-C sets [`CANCEL`]; pressed again before anyone has looked, it ends the program.
pub(crate) fn listen() -> Result<()> {
    handle()?;
    LOOKING.store(true, Ordering::SeqCst);
    Ok(())
}

/// Has Ctrl-C end the program with its exit code until [`listen`] is called. Elsewhere the signal itself does that, and
/// a shell should see it; the code that Windows gives to a program it ends is one of a crash.
pub(crate) fn end_by_code() {
    if cfg!(windows) {
        // Without a console there is no Ctrl-C.
        let _ = handle();
    }
}

fn handle() -> Result<()> {
    static HANDLED: OnceLock<Result<(), String>> = OnceLock::new();
    HANDLED
        .get_or_init(|| {
            ctrlc::set_handler(|| {
                if !LOOKING.load(Ordering::SeqCst) || CANCEL.swap(true, Ordering::SeqCst) {
                    std::process::exit(INTERRUPTED.into());
                }
            })
            .map_err(|error| error.to_string())
        })
        .clone()
        .map_err(anyhow::Error::msg)
        .context("cannot listen for Ctrl-C")
}

/// Forgets an earlier Ctrl-C.
pub(crate) fn reset() {
    CANCEL.store(false, Ordering::SeqCst);
}
