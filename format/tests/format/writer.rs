//! The writer: what is on the disk at each moment, what it refuses, and that a stop at any moment can be resumed.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use samara_format::{
    Access, Dtype, Error, FileLayout, Foreign, Metadata, PartSpec, SamaraFile, TensorSpec, Writer,
    check_output, check_part, part_path,
};

use crate::sample::{content, write};

fn specs() -> Vec<TensorSpec> {
    let part = |name, rows, cols| PartSpec::new(name, Dtype::Ternary2, rows, cols);
    vec![
        TensorSpec::single("embed", Dtype::Affine4, 9, 64),
        TensorSpec {
            name: "experts".to_owned(),
            n_blocks: 3,
            parts: vec![part("gate", 5, 7), part("down", 7, 5)],
        },
        TensorSpec::single("norm", Dtype::Bf16, 1, 5),
    ]
}

fn metadata() -> Metadata {
    let mut metadata = Metadata::new();
    metadata.insert("general.architecture", "test");
    metadata
}

fn layout() -> FileLayout {
    FileLayout::new(metadata(), specs(), 0).unwrap()
}

struct Folder {
    folder: tempfile::TempDir,
    path: PathBuf,
}

impl Folder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("модель é.samara");
        Self { folder, path }
    }

    /// Names in the folder.
    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

/// The bytes that an undisturbed writer makes.
fn undisturbed() -> Vec<u8> {
    let folder = Folder::new();
    write(&folder.path, &metadata(), &specs(), 1 << 20);
    std::fs::read(&folder.path).unwrap()
}

fn write_next(writer: &mut Writer) -> u128 {
    let mut tensor = writer.tensor().unwrap();
    let (name, len) = (tensor.spec().name.clone(), tensor.spec().len);
    tensor.append(&content(&name, len)).unwrap();
    tensor.finish().unwrap()
}

#[test]
fn final_name_appears_at_the_end() {
    let folder = Folder::new();
    let part_name = vec!["модель é.samara.part".to_owned()];
    let mut writer = Writer::create(&folder.path, layout(), false).unwrap();
    assert_eq!(writer.part_path(), part_path(&folder.path));
    for i in 0..specs().len() {
        assert_eq!(folder.names(), part_name);
        assert_eq!(writer.done().len(), i);
        assert_unfinished(&folder.path);
        write_next(&mut writer);
        writer.sync().unwrap();
        assert_unfinished(&folder.path);
        let len = std::fs::metadata(part_path(&folder.path)).unwrap().len();
        assert_eq!(len, layout().file_len());
    }
    writer.finish().unwrap();
    assert_eq!(folder.names(), ["модель é.samara"]);
    let file = SamaraFile::open(&folder.path, Access::Mmap).unwrap();
    assert_eq!(file.index().file_len(), layout().file_len());
}

/// A `.part` file is refused, by its own name and by the final one (R25).
fn assert_unfinished(path: &Path) {
    let error = SamaraFile::open(part_path(path), Access::Mmap).unwrap_err();
    assert!(matches!(error.defect(), Error::Unfinished), "{error}");
    assert!(error.to_string().contains("samara convert --resume"), "{error}");
}

#[test]
fn resumed_after_each_tensor() {
    let expected = undisturbed();
    for stop in 0..=specs().len() {
        let folder = Folder::new();
        let mut writer = Writer::create(&folder.path, layout(), false).unwrap();
        let done: Vec<u128> = (0..stop).map(|_| write_next(&mut writer)).collect();
        if stop < specs().len() {
            // Killed in the middle of a tensor.
            let mut tensor = writer.tensor().unwrap();
            tensor.append(&[0xee; 100]).unwrap();
        }
        if stop % 2 == 0 {
            writer.sync().unwrap();
        }
        drop(writer);
        let mut writer = Writer::resume(&folder.path, layout(), &done).unwrap();
        for _ in stop..specs().len() {
            write_next(&mut writer);
        }
        writer.finish().unwrap();
        assert!(std::fs::read(&folder.path).unwrap() == expected, "stopped after {stop}");
    }
}

/// Killed while finishing: the index has hashes, perhaps the header is there, but the name is not.
#[test]
fn resumed_while_finishing() {
    let expected = undisturbed();
    let done: Vec<u128> = {
        let folder = Folder::new();
        let mut writer = Writer::create(&folder.path, layout(), false).unwrap();
        (0..specs().len()).map(|_| write_next(&mut writer)).collect()
    };
    for header in [false, true] {
        let folder = Folder::new();
        let mut part = expected.clone();
        if !header {
            part[..64].fill(0);
        }
        std::fs::write(part_path(&folder.path), part).unwrap();
        Writer::resume(&folder.path, layout(), &done).unwrap().finish().unwrap();
        assert!(std::fs::read(&folder.path).unwrap() == expected, "header there: {header}");
    }
}

#[test]
fn resume_refuses() {
    let part = |change: fn(&mut Vec<u8>)| {
        let folder = Folder::new();
        drop(Writer::create(&folder.path, layout(), false).unwrap());
        let mut bytes = std::fs::read(part_path(&folder.path)).unwrap();
        change(&mut bytes);
        std::fs::write(part_path(&folder.path), bytes).unwrap();
        folder
    };
    let resume = |folder: &Folder, done: &[u128]| Writer::resume(&folder.path, layout(), done).unwrap_err();

    let error = resume(&part(|bytes| bytes.push(0)), &[]);
    assert!(matches!(error, Error::ResumeLength { found, expected, .. } if found == expected + 1), "{error}");
    assert!(error.to_string().contains("start again without --resume"), "{error}");
    let error = resume(&part(|bytes| bytes.truncate(100)), &[]);
    assert!(matches!(error, Error::ResumeLength { found: 100, .. }), "{error}");
    // A byte of the metadata, of the directory, and of the header.
    for change in [|b: &mut Vec<u8>| b[70] ^= 1, |b: &mut Vec<u8>| b[120] ^= 1, |b: &mut Vec<u8>| b[0] = 0x89]
    {
        let error = resume(&part(change), &[]);
        assert!(matches!(error, Error::ResumePlan { .. }), "{error}");
        assert!(error.to_string().contains("samara.part"), "{error}");
    }
    let error = resume(&part(|_| ()), &[0; 4]);
    assert!(matches!(error, Error::ResumeDone { done: 4, n_tensors: 3 }), "{error}");
    let error = Writer::resume(&Folder::new().path, layout(), &[]).unwrap_err();
    assert!(matches!(error, Error::Io { .. }) && error.to_string().contains("samara.part"), "{error}");
}

#[test]
fn existing_output() {
    let folder = Folder::new();
    std::fs::write(&folder.path, b"GGUF").unwrap();
    let error = Writer::create(&folder.path, layout(), false).unwrap_err();
    assert!(matches!(&error, Error::Exists { path } if *path == folder.path), "{error}");
    assert_eq!(folder.names().len(), 1, "no .part is made");
    // It stays as it is until the new file is complete.
    let mut writer = Writer::create(&folder.path, layout(), true).unwrap();
    for _ in specs() {
        write_next(&mut writer);
    }
    let error = SamaraFile::open(&folder.path, Access::Mmap).unwrap_err();
    assert!(matches!(error.defect(), Error::Foreign(Foreign::Gguf)), "{error}");
    writer.finish().unwrap();
    SamaraFile::open(&folder.path, Access::Mmap).unwrap();
    assert_eq!(folder.names().len(), 1);
}

#[test]
fn output_that_appears_in_the_meantime() {
    let folder = Folder::new();
    let mut writer = Writer::create(&folder.path, layout(), false).unwrap();
    for _ in specs() {
        write_next(&mut writer);
    }
    std::fs::write(&folder.path, b"someone else's").unwrap();
    let error = writer.finish().unwrap_err();
    assert!(matches!(error, Error::Exists { .. }), "{error}");
    assert_eq!(std::fs::read(&folder.path).unwrap(), b"someone else's");
}

#[test]
fn sealed_is_complete_without_the_name() {
    let folder = Folder::new();
    std::fs::write(&folder.path, b"the old file").unwrap();
    let mut writer = Writer::create(&folder.path, layout(), true).unwrap();
    let done: Vec<u128> = specs().iter().map(|_| write_next(&mut writer)).collect();
    let sealed = writer.seal().unwrap();
    assert_eq!(sealed.part_path(), part_path(&folder.path));
    let file = SamaraFile::open(sealed.part_path(), Access::Read).unwrap();
    file.index().tensors().iter().for_each(|tensor| file.verify(tensor).unwrap());
    assert_eq!(std::fs::read(&folder.path).unwrap(), b"the old file");
    // Not committed, it is continued with nothing left to write.
    drop(sealed);
    assert!(std::fs::read(part_path(&folder.path)).unwrap() == undisturbed());
    Writer::resume(&folder.path, layout(), &done).unwrap().seal().unwrap().commit().unwrap();
    assert!(std::fs::read(&folder.path).unwrap() == undisturbed());
    assert_eq!(folder.names().len(), 1);
}

/// Puts something at a path.
type Make = fn(&Path);

/// Nothing but a regular file is replaced, nothing but a writer's `.part` file discarded, and both are looked at again
/// before the name changes hands.
#[test]
fn what_is_in_the_way() {
    let folder_there: Make = |path| std::fs::create_dir(path).unwrap();
    let text: Make = |path| std::fs::write(path, b"text").unwrap();
    let almost: Make = |path| std::fs::write(path, b"\x89SAMARAx").unwrap();
    let mut rows = vec![(false, folder_there, "a folder"), (true, folder_there, "a folder")];
    rows.extend([(true, text, "a file of something else"), (true, almost, "a file of something else")]);
    for (make, found) in odd_things() {
        rows.extend([(false, make, found), (true, make, found)]);
    }
    for (at_part, make, wanted) in rows {
        let folder = Folder::new();
        let mut writer = Writer::create(&folder.path, layout(), true).unwrap();
        if !at_part {
            for _ in specs() {
                write_next(&mut writer);
            }
            make(&folder.path);
            let error = writer.finish().unwrap_err();
            assert!(matches!(error, Error::NotReplaceable { found, .. } if found == wanted), "{error}");
            std::fs::remove_file(part_path(&folder.path)).unwrap();
        } else {
            // What is open keeps its name on Windows.
            drop(writer);
            std::fs::remove_file(part_path(&folder.path)).unwrap();
            make(&part_path(&folder.path));
        }
        let kind = |path: &Path| path.symlink_metadata().unwrap().file_type();
        let place = if at_part { part_path(&folder.path) } else { folder.path.clone() };
        let before = (kind(&place), std::fs::read(&place).ok(), folder.names());
        let error = Writer::create(&folder.path, layout(), true).unwrap_err();
        match &error {
            Error::ForeignPart { path, found } if at_part => assert_eq!((path, *found), (&place, wanted)),
            Error::NotReplaceable { path, found } if !at_part => assert_eq!((path, *found), (&place, wanted)),
            _ => panic!("{wanted}, .part: {at_part}: {error}"),
        }
        assert!(before == (kind(&place), std::fs::read(&place).ok(), folder.names()), "{wanted}");
    }
}

#[cfg(unix)]
fn odd_things() -> Vec<(Make, &'static str)> {
    let link: Make = |path| std::os::unix::fs::symlink("nothing", path).unwrap();
    let socket: Make = |path| drop(std::os::unix::net::UnixListener::bind(path).unwrap());
    vec![(link, "a symbolic link"), (socket, "a device, a pipe or a socket")]
}

#[cfg(not(unix))]
fn odd_things() -> Vec<(Make, &'static str)> {
    Vec::new()
}

#[test]
fn what_a_part_file_may_hold() {
    let folder = Folder::new();
    assert!(check_part(&folder.path).unwrap().is_none());
    for (bytes, own) in [
        (&b""[..], true),
        (&[0], true),
        (&[0; 64], true),
        (&[&[0; 64][..], b"data"].concat(), true),
        (&[&[0; 63][..], b"x"].concat(), false),
        (b"\x89SAM", true),
        (b"\x89SAMARA\n", true),
        (&undisturbed(), true),
        (b"\x89SAMX", false),
        (b"x", false),
        (&[&b"x"[..], &[0; 100]].concat(), false),
    ] {
        std::fs::write(part_path(&folder.path), bytes).unwrap();
        let start = &bytes[..bytes.len().min(70)];
        match check_part(&folder.path) {
            Ok(there) => assert!(own && there.is_some(), "{start:?}"),
            Err(error) => assert!(!own && matches!(error, Error::ForeignPart { .. }), "{start:?}: {error}"),
        }
    }
    for name in ["", "..", "/"] {
        let error = check_output(Path::new(name), true).unwrap_err();
        assert!(matches!(error, Error::NotReplaceable { .. }), "{name:?}: {error}");
    }
}

#[test]
fn exact_lengths() {
    let folder = Folder::new();
    let mut writer = Writer::create(&folder.path, layout(), false).unwrap();
    let mut tensor = writer.tensor().unwrap();
    let len = tensor.spec().len as usize;
    tensor.append(&vec![1; len - 1]).unwrap();
    assert_eq!(tensor.written(), len as u64 - 1);
    let error = tensor.append(&[1, 1]).unwrap_err();
    assert!(matches!(&error, Error::TensorLong { tensor, .. } if tensor == "embed"), "{error}");
    let error = tensor.finish().unwrap_err();
    assert!(matches!(&error, Error::TensorShort { tensor, .. } if tensor == "embed"), "{error}");
    // One that was not finished starts again, also through `Write`, whose error names the tensor too.
    let mut tensor = writer.tensor().unwrap();
    assert_eq!(tensor.spec().name, "embed");
    tensor.write_all(&content("embed", len as u64)).unwrap();
    tensor.flush().unwrap();
    let error = tensor.write(&[1]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    assert!(error.to_string().contains("embed"), "{error}");
    tensor.finish().unwrap();
    let error = writer.finish().unwrap_err();
    assert!(matches!(&error, Error::TensorsMissing { tensor } if tensor == "experts"), "{error}");
    assert_eq!(folder.names(), ["модель é.samara.part"]);
}

#[test]
fn no_tensor_after_the_last() {
    let folder = Folder::new();
    let mut writer = Writer::create(&folder.path, layout(), false).unwrap();
    for _ in specs() {
        write_next(&mut writer);
    }
    let error = writer.tensor().unwrap_err();
    assert!(matches!(error, Error::NoMoreTensors { n_tensors: 3 }), "{error}");
}

#[test]
fn padding() {
    let folder = Folder::new();
    let mut writer = Writer::create(&folder.path, layout(), false).unwrap();
    write_next(&mut writer);
    let mut tensor = writer.tensor().unwrap();
    tensor.pad().unwrap();
    assert_eq!(tensor.written(), 0, "already at the start of a part");
    // Parts of 5 x 7 and 7 x 5: 384 and 384 bytes, so the block's padding starts at 768.
    for block in 0..3 {
        tensor.append(&[1; 300]).unwrap();
        let error = tensor.pad().unwrap_err();
        assert!(
            matches!(&error, Error::PartShort { part, at: 300, end: 384, .. } if part == "gate"),
            "{error}"
        );
        tensor.append(&[1; 84]).unwrap();
        tensor.pad().unwrap();
        tensor.append(&[1; 384]).unwrap();
        if block < 2 {
            tensor.pad().unwrap();
            assert_eq!(tensor.written(), (block + 1) * 4096);
        }
    }
    // The padding at the end of the tensor is added by `finish`.
    tensor.finish().unwrap();
    let mut tensor = writer.tensor().unwrap();
    tensor.append(&[1; 9]).unwrap();
    let error = tensor.finish().unwrap_err();
    assert!(matches!(error, Error::TensorShort { written: 9, expected: 128, .. }), "{error}");
    let mut tensor = writer.tensor().unwrap();
    tensor.append(&[1; 10]).unwrap();
    tensor.finish().unwrap();
    writer.finish().unwrap();
    let file = SamaraFile::open(&folder.path, Access::Mmap).unwrap();
    let experts = file.index().tensor("experts").unwrap();
    for block in 0..3 {
        assert_eq!(file.part(experts, block, 1), [1; 384]);
        assert_eq!(file.bytes(experts)[block * 4096..][768..4096], [0; 4096 - 768]);
    }
    assert_eq!(file.part(file.index().tensor("norm").unwrap(), 0, 0), [1; 10]);
}

/// The plan's digest changes with anything in the plan and with nothing else.
#[test]
fn digest_of_the_plan() {
    assert_eq!(layout().digest(), layout().digest());
    let mut other = metadata();
    other.insert("model.window", 513u64);
    assert_ne!(FileLayout::new(other, specs(), 0).unwrap().digest(), layout().digest());
    let mut fewer = specs();
    fewer.pop();
    assert_ne!(FileLayout::new(metadata(), fewer, 0).unwrap().digest(), layout().digest());
    assert_eq!(layout().tensor("norm").unwrap().len, 128);
}

#[test]
fn plans_refused() {
    let plan = |spec: TensorSpec| FileLayout::new(Metadata::new(), vec![spec], 0).unwrap_err().to_string();
    let with_key = |key: &str, value: samara_format::Value| {
        let mut metadata = Metadata::new();
        metadata.insert(key, value);
        FileLayout::new(metadata, vec![], 0).unwrap_err().to_string()
    };
    let norm = || TensorSpec::single("norm", Dtype::Bf16, 1, 5);
    let many = (0..65536).map(|i| PartSpec::new(format!("{i}"), Dtype::U32, 1, 1)).collect();
    let twice = FileLayout::new(Metadata::new(), vec![norm(), norm()], 0).unwrap_err().to_string();
    let feature = FileLayout::new(Metadata::new(), vec![], 2).unwrap_err().to_string();
    let huge = vec![0u64; 12_600_000];
    for (error, says) in [
        (plan(TensorSpec::single("", Dtype::F32, 1, 1)), "[R8]"),
        (plan(TensorSpec::single("a".repeat(256), Dtype::F32, 1, 1)), "[R8]"),
        (
            plan(TensorSpec::single("head", Dtype::Affine4, 4, 65)),
            "\"head\", part \"weight\" has shape [4, 65]",
        ),
        (plan(TensorSpec { n_blocks: 0, ..norm() }), "[R15]"),
        (plan(TensorSpec { parts: vec![], ..norm() }), "[R15]"),
        (plan(TensorSpec { parts: many, ..norm() }), "65536 parts"),
        (plan(TensorSpec { n_blocks: u64::MAX, ..norm() }), "[R17]"),
        (twice, "[R15]"),
        (feature, "[R4]"),
        (with_key("", true.into()), "[R8]"),
        (with_key("a\tb", true.into()), "[R8]"),
        (with_key("eps", f64::NAN.into()), "[R11]"),
        (with_key("list", huge.into()), "[R6]"),
    ] {
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn folder_that_is_not_there() {
    let folder = Folder::new();
    let path = folder.folder.path().join("no/such/folder/m.samara");
    let error = Writer::create(&path, layout(), false).unwrap_err();
    assert!(matches!(error, Error::Io { action: "create", .. }), "{error}");
    assert!(error.to_string().contains("folder"), "{error}");
}

/// A tensor that starts beyond 4 GiB: all of the file before it is a hole where the file system has holes.
#[test]
fn a_tensor_beyond_4_gib() {
    const HOLE: u64 = 4 << 30;
    let specs = vec![
        TensorSpec::single("hole", Dtype::F32, 1 << 20, 1 << 10),
        TensorSpec::single("beyond", Dtype::U32, 3, 5),
    ];
    let folder = Folder::new();
    let layout = || FileLayout::new(metadata(), specs.clone(), 0).unwrap();
    drop(Writer::create(&folder.path, layout(), false).unwrap());
    // Any hash does for bytes that nobody compares.
    let mut writer = Writer::resume(&folder.path, layout(), &[0]).unwrap();
    write_next(&mut writer);
    writer.finish().unwrap();
    let file = SamaraFile::open(&folder.path, Access::Mmap).unwrap();
    assert!(file.index().file_len() > HOLE);
    let beyond = file.index().tensor("beyond").unwrap();
    assert!(beyond.offset > HOLE);
    assert_eq!(file.bytes(beyond), content("beyond", beyond.len));
    file.verify(beyond).unwrap();
    // What lies where the offset would be without its upper half is something else.
    let hole = file.index().tensor("hole").unwrap();
    assert!(file.bytes(hole)[..1 << 20].iter().all(|&byte| byte == 0));
    assert!(file.bytes(hole)[hole.len as usize - (1 << 20)..].iter().all(|&byte| byte == 0));
}

/// A file that someone has mapped is replaced whole or kept whole.
#[test]
fn output_that_is_mapped() {
    let folder = Folder::new();
    write(&folder.path, &metadata(), &specs()[..1], 1 << 20);
    let before = std::fs::read(&folder.path).unwrap();
    let mapped = SamaraFile::open(&folder.path, Access::Mmap).unwrap();
    let mut writer = Writer::create(&folder.path, layout(), true).unwrap();
    let done: Vec<u128> = specs().iter().map(|_| write_next(&mut writer)).collect();
    // What Windows does depends on its version and the file system.
    if let Err(error) = writer.finish() {
        let Error::InUse { path, part, .. } = &error else { panic!("{error}") };
        assert_eq!((cfg!(windows), path, part), (true, &folder.path, &part_path(&folder.path)));
        assert!(error.to_string().contains("another program"), "{error}");
        assert!(std::fs::read(&folder.path).unwrap() == before);
        mapped.verify(&mapped.index().tensors()[0]).unwrap();
        drop(mapped);
        Writer::resume(&folder.path, layout(), &done).unwrap().finish().unwrap();
    }
    assert!(std::fs::read(&folder.path).unwrap() == undisturbed());
    assert_eq!(folder.names().len(), 1);
}
