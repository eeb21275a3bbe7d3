//! `samara inspect`: what is in a file, down to the last byte of padding.

use std::io::IsTerminal;

use anyhow::Result;
use samara_format::{Access, Index, Metadata, SamaraFile, TENSOR_ALIGN, Tensor, Value};
use samara_runtime::format_bytes;
use serde_json::{Map, json};

use crate::{
    cli::Inspect,
    failure::Failure,
    output::{json as print_json, line, visible},
};

/// Characters of a text that are shown before it is cut.
const SHOWN: usize = 72;
/// Items of a list that are shown before it is cut.
const SHOWN_ITEMS: usize = 8;

pub(crate) fn run(args: &Inspect) -> Result<()> {
    // The same checks that `run` makes, in the same order: the container, then the model in it.
    let model = samara_runtime::Model::open(&args.model, Access::Mmap);
    let file = match &model {
        Ok(model) => model.file(),
        Err(_) => &SamaraFile::open(&args.model, Access::Mmap)?,
    };
    let index = file.index();
    match &args.metadata {
        Some(key) => print_value(index.metadata(), key, args.json)?,
        None if args.json => print_json(&to_json(index))?,
        None => to_text(args, index).iter().try_for_each(|text| line(text))?,
    }
    // A sound container with a model this version cannot run is listed, and then refused like `run` does.
    model.map(|_| ()).map_err(Into::into)
}

/// Where the bytes of a file are. They add up to its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sizes {
    /// Header, metadata, directory and the zeros up to the data.
    index: u64,
    /// Tensors.
    tensors: u64,
    /// Zeros between and after tensors.
    padding: u64,
}

impl Sizes {
    /// Measured from the tensors' places, not from the file's length.
    fn of(index: &Index) -> Self {
        let start = index.header().data_offset;
        let mut sizes = Sizes { index: start, tensors: 0, padding: 0 };
        let mut end = start;
        for tensor in index.tensors() {
            sizes.padding += tensor.offset - end;
            sizes.tensors += tensor.len;
            end = tensor.offset + tensor.len;
        }
        sizes.padding += index.file_len() - end;
        sizes
    }
}

fn print_value(metadata: &Metadata, key: &str, as_json: bool) -> Result<()> {
    let value = metadata.get(key).ok_or_else(|| {
        let known: Vec<&str> = metadata.iter().map(|(key, _)| key).collect();
        Failure::Usage(format!("the file has no metadata key {key:?}; it has: {}", known.join(", ")))
    })?;
    // A pipe gets the bytes; a terminal would obey them.
    let terminal = std::io::stdout().is_terminal();
    let show = |text: &String| if terminal { line(&visible(text)) } else { line(text) };
    match value {
        _ if as_json => print_json(&value_json(value))?,
        Value::Str(text) => show(text)?,
        Value::Strs(texts) => texts.iter().try_for_each(show)?,
        other => line(&value_json(other).to_string())?,
    }
    Ok(())
}

fn value_json(value: &Value) -> serde_json::Value {
    match value {
        Value::U64(v) => json!(v),
        Value::F64(v) => json!(v),
        Value::Bool(v) => json!(v),
        Value::Str(v) => json!(v),
        Value::U64s(v) => json!(v),
        Value::F64s(v) => json!(v),
        Value::Strs(v) => json!(v),
    }
}

fn to_json(index: &Index) -> serde_json::Value {
    let (header, sizes) = (index.header(), Sizes::of(index));
    let metadata: Map<String, serde_json::Value> =
        index.metadata().iter().map(|(key, value)| (key.to_owned(), value_json(value))).collect();
    json!({
        "format_version": header.version().to_string(),
        "features": header.features,
        "digest": format!("{:032x}", header.digest()),
        "file_len": index.file_len(),
        "sizes": { "index": sizes.index, "tensors": sizes.tensors, "padding": sizes.padding },
        "metadata": metadata,
        "tensors": index.tensors().iter().map(tensor_json).collect::<Vec<_>>(),
    })
}

fn tensor_json(tensor: &Tensor) -> serde_json::Value {
    let parts = tensor.parts.iter().map(|part| {
        json!({
            "name": part.spec.name, "dtype": part.spec.dtype.to_string(), "scale": part.spec.scale.to_string(),
            "rows": part.spec.rows, "cols": part.spec.cols, "offset": part.offset, "len": part.len,
            "bytes_per_row": part.len as f64 / part.spec.rows as f64,
        })
    });
    json!({
        "name": tensor.name, "offset": tensor.offset, "len": tensor.len, "padding": padding(tensor),
        "n_blocks": tensor.n_blocks, "block_stride": tensor.block_stride, "hash": format!("{:032x}", tensor.hash),
        "parts": parts.collect::<Vec<_>>(),
    })
}

fn to_text(args: &Inspect, index: &Index) -> Vec<String> {
    let (header, sizes) = (index.header(), Sizes::of(index));
    let mut lines = vec![
        args.model.display().to_string(),
        format!(
            "format {}, features {:#x}, digest {:032x}",
            header.version(),
            header.features,
            header.digest()
        ),
        String::new(),
        format!("metadata ({} keys)", index.metadata().len()),
    ];
    let width = index.metadata().iter().map(|(key, _)| key.len()).max().unwrap_or(0);
    lines.extend(index.metadata().iter().map(|(key, value)| format!("  {key:width$}  {}", shown(value))));
    lines.push(String::new());
    lines.push(format!("tensors ({})", index.tensors().len()));
    let width = index.tensors().iter().map(|tensor| tensor.name.len()).max().unwrap_or(0).max(4);
    lines.push(format!("  {:width$}  {:>14} {:>14} {:>8}  contents", "name", "offset", "length", "padding"));
    for tensor in index.tensors() {
        lines.push(format!(
            "  {:width$}  {:>14} {:>14} {:>8}  {}",
            tensor.name,
            tensor.offset,
            tensor.len,
            padding(tensor),
            contents(tensor)
        ));
    }
    lines.push(String::new());
    lines.push(format!(
        "{} index + {} tensors + {} padding = {} bytes ({})",
        sizes.index,
        sizes.tensors,
        sizes.padding,
        sizes.index + sizes.tensors + sizes.padding,
        format_bytes(index.file_len())
    ));
    lines
}

/// Zeros after a tensor, bytes.
fn padding(tensor: &Tensor) -> u64 {
    let end = tensor.offset + tensor.len;
    end.next_multiple_of(TENSOR_ALIGN) - end
}

/// `32 blocks of gate TERNARY2 [128, 256], ...`.
fn contents(tensor: &Tensor) -> String {
    let parts: Vec<String> = tensor
        .parts
        .iter()
        .map(|part| {
            let name = if tensor.parts.len() > 1 { format!("{} ", part.spec.name) } else { String::new() };
            format!("{name}{} [{}, {}]", part.spec.dtype, part.spec.rows, part.spec.cols)
        })
        .collect();
    let blocks = if tensor.n_blocks > 1 { format!("{} blocks of ", tensor.n_blocks) } else { String::new() };
    format!("{blocks}{}", parts.join(", "))
}

/// A value on one line, long ones cut.
fn shown(value: &Value) -> String {
    match value {
        Value::Str(text) => shown_text(text),
        Value::U64s(items) => shown_list(items, ToString::to_string),
        Value::F64s(items) => shown_list(items, ToString::to_string),
        Value::Strs(items) => shown_list(items, |text| shown_text(text)),
        other => value_json(other).to_string(),
    }
}

fn shown_text(text: &str) -> String {
    let n = text.chars().count();
    let quoted = |text: String| format!("\"{}\"", visible(&text.replace('\\', "\\\\").replace('\n', "\\n")));
    if n <= SHOWN {
        return quoted(text.to_owned());
    }
    format!("{}… ({n} characters)", quoted(text.chars().take(SHOWN).collect()))
}

fn shown_list<T>(items: &[T], show: impl Fn(&T) -> String) -> String {
    let mut shown: Vec<String> = items.iter().take(SHOWN_ITEMS).map(show).collect();
    if items.len() > SHOWN_ITEMS {
        shown.push(format!("… ({} items)", items.len()));
    }
    format!("[{}]", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_are_cut() {
        let check = |value: Value, want: &str| assert_eq!(shown(&value), want);
        check(Value::from(3u64), "3");
        check(Value::from(0.5), "0.5");
        check(Value::from(true), "true");
        check(Value::from("a\nb\x1b"), "\"a\\nb\u{fffd}\"");
        check(Value::from("é".repeat(SHOWN)), &format!("\"{}\"", "é".repeat(SHOWN)));
        check(Value::from("é".repeat(SHOWN + 1)), &format!("\"{}\"… (73 characters)", "é".repeat(SHOWN)));
        check(Value::from(vec![1u64; 8]), "[1, 1, 1, 1, 1, 1, 1, 1]");
        check(Value::from(vec![1u64; 9]), "[1, 1, 1, 1, 1, 1, 1, 1, … (9 items)]");
        check(Value::from(vec!["a".to_owned()]), "[\"a\"]");
    }
}
