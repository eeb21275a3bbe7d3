//! Values of options that have a notation of their own.

use samara_runtime::Device;
use samara_simd::{Error, Isa};

/// What `--isa` says; `None` leaves it to the machine.
pub(crate) type ChosenIsa = Option<Isa>;

/// `auto` or the name of an instruction set.
pub(super) fn isa(text: &str) -> Result<ChosenIsa, Error> {
    if text == "auto" { Ok(None) } else { text.parse().map(Some) }
}

/// `auto`, `cpu`, `gpu`, `gpu:1` or `reference`.
pub(super) fn device(text: &str) -> Result<Device, String> {
    let number = |text: &str| text.strip_prefix("gpu:")?.parse().ok();
    match text {
        "auto" => Ok(Device::Auto),
        "cpu" => Ok(Device::Cpu),
        "gpu" => Ok(Device::Gpu(None)),
        "reference" => Ok(Device::Reference),
        text => number(text)
            .map(|number| Device::Gpu(Some(number)))
            .ok_or_else(|| "give auto, cpu, gpu, reference, or gpu: and a number, such as gpu:0".to_owned()),
    }
}

/// `12=-1.5`.
pub(super) fn bias(text: &str) -> Result<(u32, f32), String> {
    let (id, value) = text.split_once('=').ok_or("give a token id and a number, such as 42=-1.5")?;
    let id = id.trim().parse().map_err(|_| format!("{id:?} is not a token id"))?;
    let value: f32 = value.trim().parse().map_err(|_| format!("{value:?} is not a number"))?;
    Ok((id, value))
}

/// A whole number, `MIN` or more.
pub(super) fn whole<const MIN: u64>(text: &str) -> Result<u64, String> {
    text.parse()
        .ok()
        .filter(|number| *number >= MIN)
        .ok_or_else(|| format!("give a whole number from {MIN} to {}", u64::MAX))
}

/// `4G`, `1.5G`, `900M`, `65536`: bytes, in powers of 1024.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().trim_end_matches("IB").trim_end_matches('B') {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        unit => return Err(format!("the unit {unit:?} is not one of K, M, G, T")),
    };
    let too_large = || format!("{text} is too large");
    if let Ok(number) = digits.parse::<u64>() {
        return number.checked_mul(1 << shift).ok_or_else(too_large);
    }
    let plain = digits.chars().all(|c| c.is_ascii_digit() || c == '.');
    let number: f64 =
        digits.parse().ok().filter(|_| plain).ok_or_else(|| {
            format!("{digits:?} is not a number: give one from 0 on with a unit, such as 1.5G")
        })?;
    let bytes = number * (1u64 << shift) as f64;
    if bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err(too_large()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let check = |text: &str, want: Option<u64>| assert_eq!(size(text).ok(), want, "{text}");
        check("0", Some(0));
        check("512", Some(512));
        check("1k", Some(1024));
        check("4G", Some(4 << 30));
        check("4GiB", Some(4 << 30));
        check("900MB", Some(900 << 20));
        check("", None);
        check("G", None);
        check("4X", None);
        check("-1", None);
        check("18446744073709551615", Some(u64::MAX));
        check("18446744073709551615K", None);
        check("18446744073709551616", None);
        check("1.5G", Some(3 << 29));
        check(".5k", Some(512));
        check("0.0M", Some(0));
        check("16777216.0T", None);
        check("1e3", None);
        check("1.2.3G", None);
        check(".", None);
        check("-1.5G", None);
        check("+1.5G", None);
    }

    #[test]
    fn devices() {
        let check = |text: &str, want: Option<Device>| assert_eq!(device(text).ok(), want, "{text}");
        check("auto", Some(Device::Auto));
        check("cpu", Some(Device::Cpu));
        check("reference", Some(Device::Reference));
        check("gpu", Some(Device::Gpu(None)));
        check("gpu:0", Some(Device::Gpu(Some(0))));
        check("gpu:12", Some(Device::Gpu(Some(12))));
        for text in ["", "GPU", "gpu:", "gpu:-1", "gpu:x", "gpu0", "cpu:0", "tpu"] {
            check(text, None);
        }
    }

    #[test]
    fn whole_numbers() {
        let check = |text: &str, want: Option<u64>, from_one: Option<u64>| {
            assert_eq!((whole::<0>(text).ok(), whole::<1>(text).ok()), (want, from_one), "{text}");
        };
        check("0", Some(0), None);
        check("1", Some(1), Some(1));
        check("18446744073709551615", Some(u64::MAX), Some(u64::MAX));
        check("18446744073709551616", None, None);
        check("-1", None, None);
        check("x", None, None);
        assert_eq!(whole::<1>("-1"), Err("give a whole number from 1 to 18446744073709551615".to_owned()));
    }

    #[test]
    fn biases() {
        let check = |text: &str, want: Option<(u32, f32)>| assert_eq!(bias(text).ok(), want, "{text}");
        check("42=-1.5", Some((42, -1.5)));
        check("0=100", Some((0, 100.0)));
        check("42", None);
        check("-1=2", None);
        check("4=x", None);
    }
}
