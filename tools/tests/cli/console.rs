//! The Windows program on a console, which wine draws on a terminal: `SAMARA_RUNNER` is wine and `SAMARA_EXE` the
//! program. What a console draws has its own escape sequences between the letters, so that only words are looked for.

use std::{thread::sleep, time::Duration};

use crate::{
    interruption::checkpoint,
    program::{convert, folder, part_of, tiny},
    terminal::Chat,
};

/// Starts on a console; fails where the program is not one of Windows.
fn console(arguments: &str) -> Chat {
    let program = crate::program::program();
    assert!(
        program.len() > 1 && program.last().is_some_and(|exe| exe.ends_with(".exe")),
        "SAMARA_RUNNER and SAMARA_EXE name no wine and Windows program: {program:?}"
    );
    let state = folder();
    Chat::start(arguments, state.path()).expect("a terminal")
}

/// Types once the console reads keys.
fn type_in(chat: &mut Chat, text: &str) {
    sleep(Duration::from_millis(500));
    chat.type_in(text);
}

#[test]
#[ignore = "optional: needs a Windows build of the program and wine"]
fn ctrl_c_on_a_console_stops_an_answer_and_then_leaves_the_chat() {
    let endless = "--device reference --logit-bias 3992=-inf --logit-bias 3990=-inf";
    let mut chat = console(&format!("run '{}' --temp 0 {endless}", tiny().display()));
    chat.wait_for(">");
    // What is typed comes back as it was typed, letter by letter and whatever their width.
    type_in(&mut chat, "é漢🦙 Explain a samara.\r");
    chat.wait_for("é");
    chat.wait_for("漢");
    chat.wait_for("The");
    type_in(&mut chat, "\x03");
    chat.wait_for("stopped");
    chat.wait_for(">");
    type_in(&mut chat, "Capital of Greece?\r");
    chat.wait_for("The");
    type_in(&mut chat, "\x03");
    chat.wait_for("stopped");
    chat.wait_for(">");
    // At the prompt it takes two. Wine reports them as signals there, while Windows hands them over as keys.
    type_in(&mut chat, "\x03");
    type_in(&mut chat, "/help\r");
    chat.wait_for("/clear");
    type_in(&mut chat, "\x03");
    assert_eq!(chat.code(), Some(130));
}

#[test]
#[ignore = "optional: needs a Windows build of the program and wine"]
fn ctrl_c_on_a_console_stops_a_conversion_that_can_go_on() {
    let dir = folder();
    let out = dir.path().join("m.samara");
    let mut stopped = console(&format!("convert '{}' -o '{}' -t 1", checkpoint().display(), out.display()));
    crate::interruption::wait_for(&part_of(&out));
    stopped.type_in("\x03");
    stopped.wait_for("--resume");
    assert_eq!(stopped.code(), Some(130));
    assert!(!out.exists() && part_of(&out).exists());
    convert(checkpoint(), &out, &["--resume", "--quiet"]).expect(0);
    assert!(out.is_file() && !part_of(&out).exists());
}

#[test]
#[ignore = "optional: needs a Windows build of the program and wine"]
fn ctrl_c_on_a_console_ends_every_other_command_with_its_code() {
    let interrupted = || {
        // It waits for a prompt to be typed.
        let mut waiting = console(&format!("run '{}' -f -", tiny().display()));
        type_in(&mut waiting, "half a question");
        waiting.wait_for("question");
        type_in(&mut waiting, "\x03");
        waiting.code()
    };
    // On a busy machine wine's server may kill a program that is about to end, as SIGKILL does.
    let code = match interrupted() {
        Some(137) => {
            println!("killed by wine; again");
            interrupted()
        }
        code => code,
    };
    assert_eq!(code, Some(130));
}
