//! `--profile`: where the time of one more repetition went.

use samara_runtime::Phase;
use serde_json::{Value, json};

/// What the timers of the backends told. A part that was not measured is `None`.
#[derive(Debug)]
pub(super) struct Profile {
    pub(super) prefill: Option<Timed>,
    pub(super) decode: Option<Timed>,
}

/// A stretch of work, on the clock and by phase.
#[derive(Debug)]
pub(super) struct Timed {
    pub(super) tokens: usize,
    /// From beginning to end, as the repetitions are timed.
    pub(super) seconds: f64,
    /// In the order in which they first came; none without timers.
    pub(super) phases: Vec<Phase>,
}

/// A line of a table.
#[derive(Debug, PartialEq)]
struct Row {
    name: &'static str,
    us_per_token: f64,
    /// Of the whole time.
    share: f64,
    gb_per_s: Option<f64>,
}

impl Timed {
    /// Bytes that all phases read, if they were counted.
    pub(super) fn bytes(&self) -> Option<u64> {
        (!self.phases.is_empty()).then(|| self.phases.iter().map(|phase| phase.bytes).sum())
    }

    /// Time that no phase took: what is between steps, and segments without timers.
    fn unaccounted_seconds(&self) -> f64 {
        let timed: f64 = self.phases.iter().map(|phase| phase.time.as_secs_f64()).sum();
        (self.seconds - timed).max(0.0)
    }

    fn row(&self, name: &'static str, seconds: f64, bytes: u64) -> Row {
        Row {
            name,
            us_per_token: 1e6 * seconds / self.tokens as f64,
            share: seconds / self.seconds,
            gb_per_s: (bytes > 0 && seconds > 0.0).then(|| bytes as f64 / seconds / 1e9),
        }
    }

    /// The phases, what they leave, and the whole: a repetition may be slower than those that were timed for speed.
    fn rows(&self) -> Vec<Row> {
        let phases = self.phases.iter();
        let mut rows: Vec<Row> =
            phases.map(|phase| self.row(phase.name, phase.time.as_secs_f64(), phase.bytes)).collect();
        rows.push(self.row("unaccounted", self.unaccounted_seconds(), 0));
        rows.push(self.row("all", self.seconds, self.bytes().unwrap_or(0)));
        rows
    }

    /// `bound` is the bandwidth of expert blocks, GB/s.
    fn to_json(&self, bound: Option<f64>) -> Value {
        let phase = |phase: &Phase| {
            let row = self.row(phase.name, phase.time.as_secs_f64(), phase.bytes);
            json!({
                "name": row.name, "us_per_token": row.us_per_token, "share": row.share,
                "bytes": phase.bytes, "gb_per_s": row.gb_per_s,
                "share_of_expert_blocks": share_of(row.gb_per_s, bound),
            })
        };
        let rest = self.row("", self.unaccounted_seconds(), 0);
        json!({
            "tokens": self.tokens, "us_per_token": 1e6 * self.seconds / self.tokens as f64,
            "phases": self.phases.iter().map(phase).collect::<Vec<_>>(),
            "unaccounted": { "us_per_token": rest.us_per_token, "share": rest.share },
        })
    }
}

impl Profile {
    pub(super) fn to_json(&self, bound: Option<f64>) -> Value {
        json!({
            "timers": self.has_timers(),
            "prefill": self.prefill.as_ref().map(|timed| timed.to_json(bound)),
            "decode": self.decode.as_ref().map(|timed| timed.to_json(bound)),
        })
    }

    pub(super) fn to_text(&self, bound: Option<f64>) -> Vec<String> {
        let head = |title: &str| {
            vec![
                String::new(),
                format!("{title:<20}{:>12}{:>9}{:>9}{:>12}", "us/token", "share", "GB/s", "of blocks"),
            ]
        };
        let line = |row: [String; 5]| {
            let [name, time, share, rate, of_bound] = row;
            format!("  {name:<18}{time:>12}{share:>9}{rate:>9}{of_bound:>12}").trim_end().to_owned()
        };
        self.tables(bound, head, line)
    }

    pub(super) fn to_markdown(&self, bound: Option<f64>) -> Vec<String> {
        let head = |title: &str| {
            let names = format!("| {title} | us/token | share | GB/s | of expert blocks |");
            vec![String::new(), names, "|---|---:|---:|---:|---:|".to_owned()]
        };
        self.tables(bound, head, |row| format!("| {} |", row.join(" | ")))
    }

    fn has_timers(&self) -> bool {
        [&self.prefill, &self.decode].into_iter().flatten().any(|timed| !timed.phases.is_empty())
    }

    fn tables(
        &self,
        bound: Option<f64>,
        head: impl Fn(&str) -> Vec<String>,
        line: impl Fn([String; 5]) -> String,
    ) -> Vec<String> {
        if !self.has_timers() {
            return vec![
                String::new(),
                "no profile: the backend that runs this model has no timers".to_owned(),
            ];
        }
        let mut lines = Vec::new();
        for (title, timed) in [("prefill, phase", &self.prefill), ("decode, phase", &self.decode)] {
            let Some(timed) = timed else { continue };
            lines.extend(head(title));
            lines.extend(timed.rows().into_iter().map(|row| {
                let percent =
                    |share: Option<f64>| share.map_or(String::new(), |x| format!("{:.1} %", 100.0 * x));
                line([
                    row.name.to_owned(),
                    format!("{:.1}", row.us_per_token),
                    percent(Some(row.share)),
                    row.gb_per_s.map_or(String::new(), |rate| format!("{rate:.2}")),
                    percent(share_of(row.gb_per_s, bound)),
                ])
            }));
        }
        lines
    }
}

/// How much of a bound a speed reaches, if both are known.
pub(super) fn share_of(rate: Option<f64>, bound: Option<f64>) -> Option<f64> {
    Some(rate? / bound?)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn timed() -> Timed {
        let phase = |name, micros, bytes| Phase { name, time: Duration::from_micros(micros), bytes };
        Timed { tokens: 2, seconds: 1e-3, phases: vec![phase("norm", 100, 0), phase("down", 800, 8_000_000)] }
    }

    #[test]
    fn rows_add_up_to_the_whole() {
        let rows = timed().rows();
        assert_eq!(
            rows.iter().map(|row| row.name).collect::<Vec<_>>(),
            ["norm", "down", "unaccounted", "all"]
        );
        assert!((rows[..3].iter().map(|row| row.share).sum::<f64>() - 1.0).abs() < 1e-9);
        assert!((rows[..3].iter().map(|row| row.us_per_token).sum::<f64>() - 500.0).abs() < 1e-9);
        assert!((rows[3].share - 1.0).abs() < 1e-9 && (rows[3].us_per_token - 500.0).abs() < 1e-9);
        assert!((rows[1].gb_per_s.expect("it read") - 10.0).abs() < 1e-9);
        assert!((rows[3].gb_per_s.expect("it read") - 8.0).abs() < 1e-9);
        assert!(rows[0].gb_per_s.is_none() && rows[2].gb_per_s.is_none());
    }

    #[test]
    fn tables_have_the_parts_that_were_measured() {
        let decode_only = Profile { prefill: None, decode: Some(timed()) };
        assert_eq!(
            decode_only.to_text(Some(20.0)).join("\n"),
            "
decode, phase           us/token    share     GB/s   of blocks
  norm                      50.0   10.0 %
  down                     400.0   80.0 %    10.00      50.0 %
  unaccounted               50.0   10.0 %
  all                      500.0  100.0 %     8.00      40.0 %"
        );
        assert_eq!(
            decode_only.to_markdown(None).join("\n"),
            "
| decode, phase | us/token | share | GB/s | of expert blocks |
|---|---:|---:|---:|---:|
| norm | 50.0 | 10.0 % |  |  |
| down | 400.0 | 80.0 % | 10.00 |  |
| unaccounted | 50.0 | 10.0 % |  |  |
| all | 500.0 | 100.0 % | 8.00 |  |"
        );
        let json = decode_only.to_json(None);
        assert!(json["prefill"].is_null() && json["timers"] == true, "{json}");
    }

    #[test]
    fn a_backend_without_timers_is_said_to_have_none() {
        let silent = Profile { prefill: Some(Timed { phases: Vec::new(), ..timed() }), decode: None };
        assert!(silent.to_text(None).concat().contains("no timers"));
        let json = silent.to_json(None);
        assert!(json["timers"] == false && json["prefill"]["unaccounted"]["share"] == 1.0, "{json}");
    }
}
