//! Values of options that have a notation of their own.

/// `12=-1.5`.
pub(super) fn bias(text: &str) -> Result<(u32, f32), String> {
    let (id, value) = text.split_once('=').ok_or("give a token id and a number, such as 42=-1.5")?;
    let id = id.trim().parse().map_err(|_| format!("{id:?} is not a token id"))?;
    let value: f32 = value.trim().parse().map_err(|_| format!("{value:?} is not a number"))?;
    Ok((id, value))
}

/// `4G`, `900M`, `65536`: bytes, in powers of 1024.
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
    let number: u64 = digits.parse().map_err(|_| format!("{digits:?} is not a whole number"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is too large"))
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
