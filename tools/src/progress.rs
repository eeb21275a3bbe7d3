//! Progress of a long operation: a bar on a terminal, plain lines elsewhere, JSON lines for machines.

use std::{
    io::{IsTerminal, Write},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use samara_converter::Progress;
use samara_runtime::format_bytes;
use serde_json::json;

use crate::output::note;

/// Between two plain lines.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// Between two JSON lines.
const JSON_EVERY: Duration = Duration::from_millis(500);

/// Where the current phase is.
#[derive(Clone, Debug)]
struct Phase {
    name: &'static str,
    /// Bytes.
    total: u64,
    /// Bytes.
    done: u64,
    started: Instant,
    shown: Instant,
}

impl Phase {
    /// `converting: 1.20 GiB of 4.94 GiB (24 %), 310.00 MiB/s, 12 s left`.
    fn line(&self, now: Instant) -> String {
        let Phase { name, total, done, started, shown: _ } = self;
        let percent = done.saturating_mul(100).checked_div(*total).unwrap_or(100);
        let seconds = now.duration_since(*started).as_secs_f64();
        let mut line =
            format!("{}: {} of {} ({percent} %)", doing(name), format_bytes(*done), format_bytes(*total));
        if *done > 0 && seconds > 0.0 {
            let rate = *done as f64 / seconds;
            let left = total.saturating_sub(*done) as f64 / rate;
            line += &format!(", {}/s, {left:.0} s left", format_bytes(rate as u64));
        }
        line
    }
}

fn doing(phase: &str) -> &str {
    match phase {
        "hash" => "hashing the sources",
        "cluster" => "building FlashHead clusters",
        "convert" => "converting",
        "verify" => "reading back",
        "check" => "checking hashes",
        "generate" => "generating",
        "upload" => "copying weights to the GPU",
        other => other,
    }
}

#[derive(Debug)]
enum Style {
    Bar(ProgressBar),
    Lines,
    Json,
    Nothing,
}

/// Shows progress in one of the ways above.
#[derive(Debug)]
pub(crate) struct Reporter {
    style: Style,
    phase: Mutex<Option<Phase>>,
}

impl Reporter {
    /// `json` goes to standard output, the others to standard error.
    pub(crate) fn new(json: bool, quiet: bool) -> Self {
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let style = if json {
            Style::Json
        } else if quiet {
            Style::Nothing
        } else if std::io::stderr().is_terminal() && !dumb {
            Style::Bar(
                ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()).with_style(bar_style()),
            )
        } else {
            Style::Lines
        };
        Reporter { style, phase: Mutex::new(None) }
    }

    /// Ends the last phase.
    pub(crate) fn finish(&self) {
        self.close(&mut self.lock());
    }

    fn lock(&self) -> MutexGuard<'_, Option<Phase>> {
        // Numbers to show stay good whoever panicked.
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self, phase: &mut Option<Phase>) {
        if let Some(phase) = phase.take() {
            match &self.style {
                Style::Bar(bar) => bar.finish_and_clear(),
                _ => self.show(&phase, Instant::now()),
            }
        }
    }

    fn show(&self, phase: &Phase, now: Instant) {
        match &self.style {
            Style::Bar(bar) => bar.set_position(phase.done),
            Style::Lines => note(&phase.line(now)),
            Style::Json => json_line(&json!({
                "event": "progress", "phase": phase.name, "done": phase.done, "total": phase.total,
                "seconds": now.duration_since(phase.started).as_secs_f64(),
            })),
            Style::Nothing => {}
        }
    }
}

/// One object on a line of its own. A closed output is noticed at the report, which cannot be lost silently.
fn json_line(value: &serde_json::Value) {
    let _ = writeln!(std::io::stdout(), "{value}");
}

fn bar_style() -> ProgressStyle {
    ProgressStyle::with_template("{prefix} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left")
        .expect("a template known to parse")
}

impl Progress for Reporter {
    fn phase(&self, name: &'static str, total: u64) {
        let mut phase = self.lock();
        self.close(&mut phase);
        let now = Instant::now();
        *phase = Some(Phase { name, total, done: 0, started: now, shown: now });
        if let Style::Bar(bar) = &self.style {
            bar.reset();
            bar.set_prefix(doing(name).to_owned());
            bar.set_length(total);
        }
    }

    fn advance(&self, bytes: u64) {
        let mut guard = self.lock();
        let Some(phase) = guard.as_mut() else { return };
        phase.done = phase.done.saturating_add(bytes);
        let now = Instant::now();
        let every = match self.style {
            Style::Bar(_) => Duration::ZERO,
            Style::Json => JSON_EVERY,
            _ => LINE_EVERY,
        };
        if now.duration_since(phase.shown) >= every {
            phase.shown = now;
            self.show(phase, now);
        }
    }

    fn message(&self, text: &str) {
        match &self.style {
            Style::Bar(bar) => bar.suspend(|| note(text)),
            Style::Lines => note(text),
            Style::Json => json_line(&json!({ "event": "message", "text": text })),
            Style::Nothing => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_rate_and_time_left() {
        let started = Instant::now();
        let check = |done: u64, total: u64, seconds: u64, want: &str| {
            let phase = Phase { name: "convert", total, done, started, shown: started };
            assert_eq!(phase.line(started + Duration::from_secs(seconds)), want);
        };
        check(0, 4 << 20, 0, "converting: 0 B of 4.00 MiB (0 %)");
        check(1 << 20, 4 << 20, 2, "converting: 1.00 MiB of 4.00 MiB (25 %), 512.00 KiB/s, 6 s left");
        check(4 << 20, 4 << 20, 4, "converting: 4.00 MiB of 4.00 MiB (100 %), 1.00 MiB/s, 0 s left");
        check(0, 0, 1, "converting: 0 B of 0 B (100 %)");
    }

    #[test]
    fn progress_counts_within_a_phase() {
        let reporter = Reporter::new(false, true);
        reporter.advance(5);
        reporter.phase("hash", 10);
        reporter.advance(4);
        reporter.advance(3);
        assert_eq!(reporter.lock().as_ref().map(|phase| (phase.name, phase.done)), Some(("hash", 7)));
        reporter.phase("convert", 1);
        assert_eq!(reporter.lock().as_ref().map(|phase| (phase.name, phase.done)), Some(("convert", 0)));
        reporter.finish();
        assert!(reporter.lock().is_none());
    }
}
