//! Which GPU a plan uses, if any.

use crate::backend::Adapter;

/// Where to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Device {
    /// Each block where it runs fastest and fits: the CPU, or a GPU that is not rendered in software.
    #[default]
    Auto,
    /// The CPU kernels.
    Cpu,
    /// A GPU, as much of the model as fits; the CPU has the rest. A number is an index in [`adapters`](crate::adapters);
    /// without one it is the one that `Auto` would take.
    Gpu(Option<usize>),
    /// The slow scalar definition, f32.
    Reference,
}

impl Device {
    /// The backend's name, or `auto`.
    pub fn name(self) -> &'static str {
        match self {
            Device::Auto => "auto",
            Device::Cpu => "cpu",
            Device::Gpu(_) => "gpu",
            Device::Reference => "reference",
        }
    }
}

/// Index of the adapter to use: that of this number, or a discrete card, or any that is not software.
///
/// # Errors
/// What was found instead.
pub(super) fn pick(adapters: &[Adapter], number: Option<usize>) -> Result<usize, String> {
    let list: Vec<String> =
        adapters.iter().enumerate().map(|(i, adapter)| format!("gpu:{i} {}", adapter.name)).collect();
    let list = list.join(", ");
    if adapters.is_empty() {
        return Err("no GPU was found: no driver for Vulkan, DX12 or Metal offers one".to_owned());
    }
    if let Some(number) = number {
        return if number < adapters.len() {
            Ok(number)
        } else {
            Err(format!("there is no gpu:{number}; what was found: {list}"))
        };
    }
    let hardware = || adapters.iter().enumerate().filter(|(_, adapter)| !adapter.software);
    let discrete = hardware().find(|(_, adapter)| adapter.kind == "DiscreteGpu");
    discrete.or_else(|| hardware().next()).map(|(index, _)| index).ok_or_else(|| {
        format!(
            "no GPU was found but software that renders on the CPU, which is used only by its number: {list}"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `d`: discrete, `i`: integrated, `s`: software adapters.
    fn adapters(kinds: &str) -> Vec<Adapter> {
        let adapter = |kind: char| Adapter {
            id: "vulkan:0000:0000".into(),
            name: format!("card {kind}"),
            api: "Vulkan".into(),
            kind: match kind {
                'd' => "DiscreteGpu".into(),
                'i' => "IntegratedGpu".into(),
                _ => "Cpu".into(),
            },
            driver: String::new(),
            max_binding: 0,
            max_buffer: 0,
            software: kind == 's',
        };
        kinds.chars().map(adapter).collect()
    }

    #[test]
    fn software_is_never_taken_unasked() {
        let check = |kinds: &str, number: Option<usize>, want: Result<usize, &str>| {
            let found = pick(&adapters(kinds), number);
            match want {
                Ok(index) => assert_eq!(found, Ok(index), "{kinds} {number:?}"),
                Err(part) => {
                    let text = found.expect_err("nothing to take");
                    assert!(text.contains(part), "{kinds} {number:?}: {text}");
                }
            }
        };
        check("", None, Err("no GPU was found: no driver"));
        check("", Some(0), Err("no GPU was found: no driver"));
        check("s", None, Err("only by its number: gpu:0 card s"));
        check("s", Some(0), Ok(0));
        check("si", None, Ok(1));
        check("sid", None, Ok(2));
        check("ddi", None, Ok(0));
        check("sid", Some(1), Ok(1));
        check(
            "sid",
            Some(3),
            Err("there is no gpu:3; what was found: gpu:0 card s, gpu:1 card i, gpu:2 card d"),
        );
    }
}
