//! Valid containers with something wrong inside, for tests of what the runtime refuses.

use std::path::Path;

use samara_format::{FileLayout, Metadata, SamaraFile, TensorSpec, Writer};

/// Writes a copy of `file` to `path`: `edit` may change metadata and directory, `patch` the bytes of
/// each tensor by name. Hashes are those of the patched bytes, so only the content is wrong.
pub fn rewrite(
    file: &SamaraFile,
    path: &Path,
    edit: impl FnOnce(&mut Metadata, &mut Vec<TensorSpec>),
    patch: impl Fn(&str, &mut Vec<u8>),
) {
    let mut metadata = file.index().metadata().clone();
    let mut specs: Vec<TensorSpec> = file.index().tensors().iter().map(|tensor| tensor.spec()).collect();
    edit(&mut metadata, &mut specs);
    let names: Vec<String> = specs.iter().map(|spec| spec.name.clone()).collect();
    let layout = FileLayout::new(metadata, specs, 0).expect("a valid layout");
    let lengths: Vec<usize> = layout.tensors().iter().map(|tensor| tensor.len as usize).collect();
    let mut writer = Writer::create(path, layout, true).expect("creates");
    for (name, len) in names.iter().zip(lengths) {
        let source = file.index().tensor(name).expect("a tensor of the source");
        let mut bytes = file.bytes(source).to_vec();
        bytes.resize(len, 0);
        patch(name, &mut bytes);
        let mut tensor = writer.tensor().expect("begins");
        tensor.append(&bytes).expect("writes");
        tensor.finish().expect("ends");
    }
    writer.finish().expect("renames");
}
