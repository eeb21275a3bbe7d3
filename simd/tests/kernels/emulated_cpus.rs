//! CPUs older than this machine's, emulated: the emulator reports what each is said to report, the kernels chosen are
//! those it can run, and an instruction that CPUID alone would promise ends a process there.
//!
//! The tests start themselves again in the emulator, with a word that says what to do in it.

use std::arch::x86_64::__cpuid_count;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use samara_simd::Kernels;

const EMULATOR: &str = "qemu-x86_64-static";
/// Names what the process in the emulator does.
const WORD: &str = "SAMARA_TEST_CHILD";
const SIGILL: i32 = 4;

/// A CPU with AVX2 and AVX-512 whose operating system saves the registers of neither.
const NO_OS_SUPPORT: &str = "Skylake-Server,x-force-features=on,-xsave";
/// The same with VNNI.
const NO_OS_SUPPORT_VNNI: &str = "Icelake-Server,x-force-features=on,-xsave";
/// Parts of AVX-512 on a CPU that lacks its foundation, and no system that saves its registers.
const WITHOUT_F: &str = "max,x-force-features=on,+avx512bw,+avx512dq,+avx512vl,+avx512vnni";

/// Starts `test` of this program again, on `cpu`; `None` where there is no emulator.
fn emulate(cpu: &str, test: &str, word: &str) -> Option<Output> {
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(EMULATOR);
    command.args(["-cpu", cpu]).arg(program).args(["--exact", test, "--nocapture", "--test-threads", "1"]);
    match command.env(WORD, word).output() {
        Ok(output) => Some(output),
        Err(error) => {
            assert!(std::env::var_os("SAMARA_NO_SKIPS").is_none(), "cannot run {EMULATOR}: {error}");
            println!("skipped: there is no {EMULATOR}");
            None
        }
    }
}

/// CPUID as it is, without a look at what the operating system saves: AVX2, AVX-VNNI, AVX-512F, BW, VNNI and OSXSAVE.
fn cpuid() -> String {
    let (leaf1, leaf7, leaf7_1) = (__cpuid_count(1, 0), __cpuid_count(7, 0), __cpuid_count(7, 1));
    let bits = [
        (leaf7.ebx, 5, "avx2"),
        (leaf7_1.eax, 4, "avxvnni"),
        (leaf7.ebx, 16, "avx512f"),
        (leaf7.ebx, 30, "avx512bw"),
        (leaf7.ecx, 11, "avx512vnni"),
        (leaf1.ecx, 27, "osxsave"),
    ];
    bits.into_iter()
        .filter(|(register, bit, _)| register >> bit & 1 == 1)
        .map(|(_, _, name)| format!("{name} "))
        .collect()
}

#[test]
fn the_kernels_chosen_are_those_that_cpu_and_system_offer() {
    if std::env::var_os(WORD).is_some() {
        println!("found {}: {}", cpuid(), Kernels::detect().isa());
        return;
    }
    for (cpu, features, isa) in [
        ("Nehalem", "", "scalar"),
        ("Haswell", "avx2 osxsave ", "avx2"),
        ("Skylake-Server", "avx2 osxsave ", "avx2"),
        (NO_OS_SUPPORT, "avx2 avx512f avx512bw ", "scalar"),
        (NO_OS_SUPPORT_VNNI, "avx2 avx512f avx512bw avx512vnni ", "scalar"),
        (WITHOUT_F, "avx2 avx512bw avx512vnni osxsave ", "avx2"),
        // The emulator has no AVX-VNNI, but can say so, and nothing here runs it.
        ("max,x-force-features=on,+avx-vnni", "avx2 avxvnni osxsave ", "avx-vnni"),
        ("max,x-force-features=on,+avx-vnni,-xsave", "avx2 avxvnni ", "scalar"),
    ] {
        let test = "emulated_cpus::the_kernels_chosen_are_those_that_cpu_and_system_offer";
        let Some(output) = emulate(cpu, test, "look") else { return };
        let said = String::from_utf8_lossy(&output.stdout);
        let want = format!("found {features}: {isa}\n");
        assert!(output.status.success() && said.contains(&want), "{cpu}: not {want:?} in {said}");
    }
}

/// Runs an instruction without asking whether it is there.
fn believe(instruction: &str) {
    match instruction {
        "avx2" => {
            // SAFETY: clears registers that are declared; on a CPU without it the process ends, which is the point.
            unsafe { std::arch::asm!("vpxor ymm0, ymm0, ymm0", out("xmm0") _) }
        }
        _ => {
            // SAFETY: as above.
            unsafe { std::arch::asm!("vpxord zmm0, zmm0, zmm0", out("xmm0") _) }
        }
    }
    println!("ran {instruction}");
}

#[test]
fn an_instruction_that_is_not_there_ends_the_process() {
    if let Ok(word) = std::env::var(WORD) {
        return believe(&word);
    }
    for (cpu, instruction, there) in [
        ("Nehalem", "avx2", false),
        ("Haswell", "avx2", true),
        ("Skylake-Server", "avx2", true),
        (NO_OS_SUPPORT, "avx2", false),
        (NO_OS_SUPPORT, "avx512f", false),
    ] {
        let test = "emulated_cpus::an_instruction_that_is_not_there_ends_the_process";
        let Some(output) = emulate(cpu, test, instruction) else { return };
        let ran = String::from_utf8_lossy(&output.stdout).contains(&format!("ran {instruction}"));
        let killed = output.status.signal() == Some(SIGILL);
        assert_eq!((ran, killed), (there, !there), "{instruction} on {cpu}: {output:?}");
    }
}
