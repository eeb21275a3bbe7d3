//! On a terminal: styles, the chat, and a device that is full. A terminal comes from `script` (util-linux).

use std::{
    fs,
    io::{Read, Write},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use crate::program::{clean, convert, fixture, folder, quoted, run, samara, skip, tiny};

/// Starts the program on a terminal of its own; `None` where there is no `script`.
fn on_terminal(arguments: &str, environment: &[(&str, &str)]) -> Option<Child> {
    let line = format!("{} {arguments}", quoted());
    let mut command = Command::new("script");
    command.args(["--quiet", "--return", "--echo", "never", "--command", &line, "/dev/null"]);
    clean(&mut command).env("TERM", "xterm").envs(environment.iter().copied());
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    if child.is_err() {
        skip("there is no `script` to make a terminal");
    }
    child.ok()
}

/// What the program prints until it ends.
fn output_of(mut child: Child) -> (String, Option<i32>) {
    let mut output = Vec::new();
    child.stdout.take().expect("a pipe").read_to_end(&mut output).expect("output");
    let code = child.wait().expect("it ends").code();
    (String::from_utf8_lossy(&output).into_owned(), code)
}

#[test]
fn reasoning_is_dimmed_where_that_can_be_shown() {
    let arguments = format!("run '{}' -p 'Capital of Greece?' --temp 0 --quiet", tiny().display());
    for (environment, dimmed) in [
        ([("TERM", "xterm")].as_slice(), true),
        (&[("TERM", "dumb")], false),
        (&[("TERM", "xterm"), ("NO_COLOR", "1")], false),
    ] {
        let Some(child) = on_terminal(&arguments, environment) else { return };
        let (output, code) = output_of(child);
        assert_eq!(code, Some(0), "{output:?}");
        assert_eq!(output.contains("\x1b[2m"), dimmed, "{environment:?}: {output:?}");
        assert!(output.contains("The capital of Greece is Athens."), "{output:?}");
        // The answer itself is never dimmed, and nothing else is styled.
        assert!(dimmed || !output.contains('\x1b'), "{output:?}");
    }
}

/// A chat on a terminal, typed at and read from.
pub(crate) struct Chat {
    child: Child,
    seen: String,
    output: std::sync::mpsc::Receiver<Vec<u8>>,
}

impl Chat {
    pub(crate) fn start(arguments: &str, state: &std::path::Path) -> Option<Self> {
        let state = state.to_str().expect("a plain path");
        let mut child = on_terminal(arguments, &[("XDG_STATE_HOME", state)])?;
        let mut stdout = child.stdout.take().expect("a pipe");
        let (sender, output) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = stdout.read(&mut buffer) {
                if sender.send(buffer[..n].to_vec()).is_err() {
                    break;
                }
            }
        });
        Some(Chat { child, seen: String::new(), output })
    }

    pub(crate) fn type_in(&mut self, text: &str) {
        let stdin = self.child.stdin.as_mut().expect("a pipe");
        stdin.write_all(text.as_bytes()).and_then(|()| stdin.flush()).expect("typed");
    }

    /// Waits for a text after what was waited for before.
    pub(crate) fn wait_for(&mut self, text: &str) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(at) = self.seen.find(text) {
                self.seen.drain(..at + text.len());
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let more = self
                .output
                .recv_timeout(left)
                .unwrap_or_else(|_| panic!("{text:?} never came: {:?}", self.seen));
            self.seen.push_str(&String::from_utf8_lossy(&more));
        }
    }

    pub(crate) fn code(mut self) -> Option<i32> {
        self.child.wait().expect("it ends").code()
    }
}

impl Drop for Chat {
    /// A test that failed leaves no chat behind: its terminal goes away, and it with that.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_chat_answers_remembers_and_leaves() {
    let state = folder();
    let arguments = format!("run '{}' --temp 0", tiny().display());
    let Some(mut chat) = Chat::start(&arguments, state.path()) else { return };
    chat.wait_for("> ");
    chat.type_in("Capital of Greece?\r");
    chat.wait_for("The capital of Greece is Athens.");
    chat.wait_for("> ");
    chat.type_in("/help\r");
    chat.wait_for("/clear");
    chat.wait_for("> ");
    // End of file.
    chat.type_in("\x04");
    assert_eq!(chat.code(), Some(0));
    let history = fs::read_to_string(state.path().join("samara/history")).expect("a history");
    assert!(history.contains("Capital of Greece?"), "{history}");
}

#[test]
fn ctrl_c_stops_an_answer_and_then_leaves_the_chat() {
    let state = folder();
    // It may not end its turn, and the reference takes its time.
    let arguments = format!(
        "run '{}' --temp 0 --device reference --logit-bias 3992=-inf --logit-bias 3990=-inf",
        tiny().display()
    );
    let Some(mut chat) = Chat::start(&arguments, state.path()) else { return };
    chat.wait_for("> ");
    chat.type_in("Explain a samara.\r");
    chat.wait_for("\x1b[2mThe");
    chat.type_in("\x03");
    chat.wait_for("stopped");
    chat.wait_for("> ");
    // It goes on from there, and a stopped answer is stopped again.
    chat.type_in("Capital of Greece?\r");
    chat.wait_for("\x1b[2m");
    chat.type_in("\x03");
    chat.wait_for("stopped");
    // The one that stopped the answer does not count: at the prompt it takes two.
    chat.wait_for("> ");
    chat.type_in("\x03");
    chat.wait_for("Ctrl-C again leaves");
    chat.wait_for("> ");
    chat.type_in("\x03");
    assert_eq!(chat.code(), Some(130));
}

#[test]
fn a_chat_needs_a_terminal_on_both_sides() {
    let dir = folder();
    let out = dir.path().join("out.txt");
    let Some(mut child) = on_terminal(&format!("run '{}' > '{}'", tiny().display(), out.display()), &[])
    else {
        return;
    };
    // A chat that began all the same would wait for ever.
    let started = Instant::now();
    while child.try_wait().expect("a child").is_none() {
        if started.elapsed() > Duration::from_secs(60) {
            child.kill().and_then(|()| child.wait()).expect("ended");
            panic!("it did not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let (said, code) = output_of(child);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("standard output is not a terminal") && said.contains("-p"), "{said}");
    assert_eq!(fs::read(&out).expect("made by the shell"), b"");
}

#[test]
fn metadata_does_not_command_a_terminal() {
    let dir = folder();
    let model = dir.path().join("m.samara");
    convert(&fixture("stress-maple-2bit"), &model, &["--name", "a\x1b[2Jb"]).expect(0);
    let model = model.to_str().expect("a plain path");
    // A pipe gets what is stored.
    assert_eq!(run(["inspect", model, "--metadata", "general.name"]).expect(0).out, "a\x1b[2Jb\n");
    for more in ["--metadata general.name", ""] {
        let Some(child) = on_terminal(&format!("inspect '{model}' {more}"), &[]) else { return };
        let (said, code) = output_of(child);
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains("a\u{fffd}[2Jb") && !said.contains('\x1b'), "{said:?}");
    }
}

#[test]
fn a_full_device_is_lack_of_space() {
    let full = fs::File::options().write(true).open("/dev/full").expect("opens");
    let mut command = samara();
    command.arg("run").arg(tiny()).args(["-p", "Capital of Greece?", "--temp", "0", "--quiet"]).stdout(full);
    let output = command.stderr(Stdio::piped()).output().expect("the program starts");
    assert_eq!(output.status.code(), Some(4), "{}", String::from_utf8_lossy(&output.stderr));
}
