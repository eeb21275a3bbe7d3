//! One row for each defect that a reader reports: the bytes, and the error with its message.

use samara_format::{Access, Error, Index, Metadata, SamaraFile, Value};

use crate::raw::{Entry, PAGE, Raw, RawPart, counted, seal, small};

/// A tensor that fills one page or less, first in its file.
fn one<'a>(parts: &'a [RawPart<'a>], n_blocks: u64, offset: u64, len: u64) -> Raw {
    Raw::new().tensor(Entry { name: b"layers.0.qkv", n_blocks, offset, len, parts }, &[0; 128])
}

fn part_codes(dtype: u8, scale: u8, rows: u64, cols: u64) -> Raw {
    one(&[(b"weight", dtype, scale, rows, cols)], 1, 4096, 128)
}

/// `small` with its bytes changed and its hash made right again.
fn resealed(change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut file = small().build();
    change(&mut file);
    seal(&mut file);
    file
}

fn put(file: &mut [u8], at: usize, bytes: &[u8]) {
    file[at..at + bytes.len()].copy_from_slice(bytes);
}

/// The rows: what is wrong, the file, the variant, and what the message must contain.
fn check(rows: &[(&str, Vec<u8>, &str, &[&str])]) {
    for (what, file, variant, says) in rows {
        let error = Index::parse(file, file.len() as u64).err().unwrap_or_else(|| panic!("{what}: accepted"));
        let debug = format!("{error:?}");
        let found = debug.split(|c: char| !c.is_alphanumeric()).next().unwrap();
        assert_eq!(found, *variant, "{what}: {error}");
        for words in *says {
            assert!(error.to_string().contains(words), "{what}: {error}");
        }
        // The same defect through a real file, with its path.
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.samara");
        std::fs::write(&path, file).unwrap();
        for access in [Access::Mmap, Access::Read] {
            let opened = SamaraFile::open(&path, access).unwrap_err();
            assert_eq!(format!("{:?}", opened.defect()), debug, "{what}");
            assert!(opened.to_string().contains("m.samara: "), "{what}: {opened}");
        }
    }
}

#[test]
#[should_panic(expected = "nothing wrong: accepted")]
fn check_notices_a_valid_file() {
    check(&[("nothing wrong", small().build(), "Empty", &[])]);
}

#[test]
#[should_panic(expected = "another defect")]
fn check_notices_another_defect() {
    check(&[("another defect", vec![], "IndexHash", &[])]);
}

#[test]
fn small_is_valid() {
    let file = small().build();
    let index = Index::parse(&file, file.len() as u64).unwrap();
    assert_eq!(index.tensors().len(), 2);
    assert_eq!(index.metadata().len(), 8);
    assert_eq!(index.metadata().str("str").unwrap(), "é");
    assert_eq!(index.metadata().strs("strs").unwrap(), ["x", ""]);
    assert!(index.metadata().str("long").unwrap().ends_with("398 399 "));
    let experts = index.tensor("experts").unwrap();
    assert_eq!((experts.block_stride, experts.parts[1].offset, experts.parts[1].len), (4096, 640, 256));
}

#[test]
fn other_kinds_of_file() {
    let html = b"\n<!DOCTYPE html><html></html>".to_vec();
    let lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n".to_vec();
    let crlf = [b"\x89SAMARA\r\n".as_slice(), &[0; 90]].concat();
    let utf8 = ["\u{89}SAMARA\n".as_bytes(), &[0; 90]].concat();
    let seven_bits = [b"\x09SAMARA\n".as_slice(), &[0; 90]].concat();
    let replaced = ["\u{fffd}SAMARA\n".as_bytes(), &[0; 90]].concat();
    let safetensors = [b"\x40\0\0\0\0\0\0\0{\"a\":".as_slice(), &[b' '; 64]].concat();
    check(&[
        ("empty", vec![], "Empty", &["empty"]),
        ("gguf", b"GGUF\x03\0\0\0".to_vec(), "Foreign", &["a GGUF file, not a .samara file", "llama.cpp"]),
        ("big-endian gguf", b"FUGG\0\0\0\x03".to_vec(), "Foreign", &["a GGUF file"]),
        ("safetensors", safetensors, "Foreign", &["a safetensors file", "samara convert"]),
        ("zip", b"PK\x03\x04\x14\0".to_vec(), "Foreign", &["zip archive", "PyTorch", "unpack"]),
        ("lfs", lfs, "Foreign", &["git-LFS pointer", "git lfs pull"]),
        ("html", html, "Foreign", &["web page", "download"]),
        ("part", vec![0; 8192], "Unfinished", &["unfinished conversion", "samara convert --resume", "[R25]"]),
        ("crlf", crlf, "TextMode", &["text mode", "binary mode", "[R2]"]),
        ("utf-8", utf8, "TextMode", &["text mode"]),
        ("7 bits", seven_bits, "TextMode", &["text mode"]),
        ("replaced", replaced, "TextMode", &["text mode"]),
        ("random", b"hello world".to_vec(), "NotSamara", &["not a .samara file", "68, 65", "[R2]"]),
        ("few zeros", vec![0; 3], "NotSamara", &["[00, 00, 00]"]),
        ("a few bytes of magic", b"\x89SAM".to_vec(), "HeaderCut", &["4 bytes", "incomplete download"]),
        ("half a header", small().build()[..40].to_vec(), "HeaderCut", &["40 bytes"]),
    ]);
}

#[test]
fn header() {
    let cut = |n: usize| small().build()[..n].to_vec();
    let longer = [small().build(), vec![0]].concat();
    let unsealed = |at: usize| {
        let mut file = small().build();
        file[at] ^= 1;
        file
    };
    let len = small().build().len();
    check(&[
        // Refused before the hash is looked at: a newer version may have another.
        (
            "major",
            resealed(|f| f[8] = 1),
            "NewerVersion",
            &["format version 1.1", "up to 0.1", "update", "[R3]"],
        ),
        ("minor", resealed(|f| f[10] = 2), "NewerVersion", &["format version 0.2", "update"]),
        ("minor 65535, no hash", unsealed(11), "NewerVersion", &["0.257"]),
        ("version 0.0", resealed(|f| f[10] = 0), "OlderVersion", &["0.0", "convert the checkpoint again"]),
        ("feature", resealed(|f| f[15] = 0x80), "UnknownFeatures", &["0x80000000", "update", "[R4]"]),
        (
            "cut in the data",
            cut(len - 1),
            "Truncated",
            &[&format!("file is {} bytes, header says {len}", len - 1)],
        ),
        ("cut in the index", cut(4095), "Truncated", &["file is 4095 bytes", "incomplete download", "[R5]"]),
        ("only a header", cut(64), "Truncated", &["file is 64 bytes"]),
        ("a byte more", longer, "TrailingBytes", &["appended", "[R5]"]),
        ("index of 4 GB", resealed(|f| put(f, 24, &[0xff; 4])), "IndexTooLarge", &["100000000", "[R6]"]),
        ("directory of 4 GB", resealed(|f| put(f, 28, &[0xff; 4])), "IndexTooLarge", &["[R6]"]),
        ("index of 100 MB", resealed(|f| put(f, 24, &99_900_000u32.to_le_bytes())), "DataOffset", &["[R6]"]),
        ("data at 0", resealed(|f| put(f, 32, &0u64.to_le_bytes())), "DataOffset", &["byte 0", "4096"]),
        ("data at 3", resealed(|f| put(f, 32, &3u64.to_le_bytes())), "DataOffset", &["byte 3"]),
        (
            "data at 2^31",
            resealed(|f| put(f, 32, &(1u64 << 31).to_le_bytes())),
            "DataOffset",
            &["2147483648"],
        ),
        ("data at 2^63", resealed(|f| put(f, 32, &(1u64 << 63).to_le_bytes())), "DataOffset", &["[R6]"]),
        ("hash", unsealed(48), "IndexHash", &["damaged", "[R7]"]),
        ("file length", unsealed(40), "IndexHash", &["damaged"]),
        ("a bit of metadata", unsealed(64), "IndexHash", &["damaged"]),
        ("padding", resealed(|f| f[4095] = 1), "IndexPadding", &["byte 4095", "[R6]"]),
    ]);
}

#[test]
fn sections() {
    let rest = |file: &mut Vec<u8>, at: usize, n: u32| put(file, at, &n.to_le_bytes());
    let long_string = Raw::new().meta(b"k", 4, &counted(1 << 30, b"abc")).build();
    let long_list = Raw::new().meta(b"k", 5, &counted(u32::MAX, &[0; 8])).build();
    let long_strings = Raw::new().meta(b"k", 7, &counted(u32::MAX, &[0; 8])).build();
    let long_key = {
        let mut raw = small();
        put(&mut raw.metadata, 0, &[0xff; 2]);
        raw.build()
    };
    let many_parts = {
        let mut raw = part_codes(1, 0, 1, 1);
        put(&mut raw.directory, 2, &[0xff; 2]);
        raw.build()
    };
    let more = {
        let mut raw = small();
        raw.directory.push(0);
        raw.build()
    };
    check(&[
        // A key of 2 + 1 + 1 bytes and the length itself are before the text: byte 64 + 8.
        (
            "string",
            long_string,
            "SectionEnd",
            &["metadata", "byte 72 needs 1073741824 bytes, only 3", "[R13]"],
        ),
        ("list", long_list, "SectionEnd", &["needs 34359738360 bytes"]),
        ("list of strings", long_strings, "SectionEnd", &["needs 17179869180 bytes"]),
        ("key", long_key, "SectionEnd", &["metadata", "byte 67 needs 65535"]),
        ("parts", many_parts, "SectionEnd", &["tensor directory", "needs 1376235 bytes"]),
        (
            "2^32 keys",
            resealed(|f| rest(f, 16, u32::MAX)),
            "TooManyEntries",
            &["metadata: 4294967295", "[R13]"],
        ),
        ("2^32 tensors", resealed(|f| rest(f, 20, u32::MAX)), "TooManyEntries", &["directory: 4294967295"]),
        ("a key less", resealed(|f| rest(f, 16, 7)), "SectionRest", &["metadata", "left over", "[R13]"]),
        ("a tensor less", resealed(|f| rest(f, 20, 1)), "SectionRest", &["tensor directory"]),
        ("a byte more", more, "SectionRest", &["1 bytes are left over"]),
        ("a key more", resealed(|f| rest(f, 16, 9)), "SectionEnd", &["metadata"]),
    ]);
}

#[test]
fn metadata() {
    let u64s = |keys: &[&[u8]]| keys.iter().fold(Raw::new(), |raw, key| raw.meta(key, 1, &[0; 8])).build();
    let one = |type_code: u8, value: &[u8]| Raw::new().meta(b"k", type_code, value).build();
    let zstd = |raw: u32, stored: &[u8]| {
        one(8, &[&raw.to_le_bytes()[..], &(stored.len() as u32).to_le_bytes(), stored].concat())
    };
    let bomb = zstd::bulk::compress(&vec![b'a'; 50_000_000], 3).unwrap();
    let honest: String = (0..2000).map(|i| format!("{i},")).collect();
    let packed = zstd::bulk::compress(honest.as_bytes(), 3).unwrap();
    let binary = zstd::bulk::compress(&(0..=255).cycle().take(2048).collect::<Vec<u8>>(), 3).unwrap();
    let raw = honest.len() as u32;
    check(&[
        ("twice", u64s(&[b"a", b"a"]), "DuplicateKey", &["\"a\"", "twice", "[R10]"]),
        ("unsorted", u64s(&[b"b", b"a"]), "KeyOrder", &["\"a\" comes after \"b\"", "[R10]"]),
        ("prefix last", u64s(&[b"ab", b"a"]), "KeyOrder", &["[R10]"]),
        ("non-UTF-8 key", u64s(&[b"\xff\xfe"]), "NotUtf8", &["metadata", "byte 67", "[R8]"]),
        ("non-UTF-8 string", one(4, &counted(1, b"\xc3")), "NotUtf8", &["byte 72"]),
        ("non-UTF-8 in a list", one(7, &counted(1, &counted(1, b"\x80"))), "NotUtf8", &["byte 76"]),
        ("empty key", u64s(&[b""]), "BadName", &["empty", "[R8]"]),
        ("key of 256 bytes", u64s(&[&[b'k'; 256]]), "BadName", &["longer than 255"]),
        ("key with NUL", u64s(&[b"a\0"]), "BadName", &["control character", "a\\0"]),
        ("key with DEL", u64s(&[b"a\x7f"]), "BadName", &["control character"]),
        ("type 0", one(0, &[0; 8]), "UnknownValueType", &["\"k\"", "type 0", "format 0.1", "newer", "[R9]"]),
        ("type 9", one(9, &[0; 8]), "UnknownValueType", &["type 9"]),
        ("bool 2", one(3, &[2]), "BadBool", &["\"k\"", "byte 2", "[R11]"]),
        ("NaN", one(2, &f64::NAN.to_le_bytes()), "NotFinite", &["NaN", "[R11]"]),
        ("inf in a list", one(6, &counted(1, &f64::INFINITY.to_le_bytes())), "NotFinite", &["inf"]),
        ("bomb, honest", zstd(50_000_000, &bomb), "BadStringSize", &["\"k\" claims 50000000 bytes", "[R12]"]),
        ("bomb, small claim", zstd(2048, &bomb), "Decompress", &["\"k\"", "[R12]"]),
        ("claim of 4 GB", zstd(u32::MAX, &packed), "BadStringSize", &["claims 4294967295"]),
        ("short text", zstd(1023, &packed), "BadStringSize", &["claims 1023"]),
        ("claim too large", zstd(raw + 1, &packed), "Decompress", &["not the 8891"]),
        ("claim too small", zstd(raw - 1, &packed), "Decompress", &["[R12]"]),
        ("no zstd", zstd(1024, &[7; 1024]), "Decompress", &["\"k\""]),
        ("zstd cut", zstd(raw, &packed[..packed.len() - 1]), "Decompress", &["\"k\""]),
        ("zstd of binary", zstd(2048, &binary), "NotUtf8", &["byte 68"]),
    ]);
    assert_eq!(raw, 8890, "the row above names it");
    let file = zstd(raw, &packed);
    assert_eq!(Index::parse(&file, file.len() as u64).unwrap().metadata().str("k").unwrap(), honest);
}

#[test]
fn tensors() {
    let two = |second: &[u8], offset: u64| {
        let parts: &[RawPart<'_>] = &[(b"weight", 1, 0, 1, 1)];
        let entry = Entry { name: b"a", n_blocks: 1, offset: 4096, len: 128, parts };
        let raw = Raw::new().tensor(entry, &[0; 128]);
        raw.tensor(Entry { name: second, offset, ..entry }, &[0; 128]).build()
    };
    let part: RawPart<'_> = (b"weight", 1, 0, 1, 1);
    let longer = {
        let mut raw = part_codes(1, 0, 1, 1);
        raw.data.resize(2 * PAGE, 0);
        raw.build()
    };
    let shorter = {
        let mut raw = part_codes(1, 0, 1, 1);
        raw.data.clear();
        raw.build()
    };
    let name = "\"layers.0.qkv\"";
    check(&[
        ("twice", two(b"a", 8192), "DuplicateTensor", &["\"a\"", "twice", "[R15]"]),
        ("overlap", two(b"b", 4096), "TensorOffset", &["\"b\"", "byte 4096", "8192", "[R19]"]),
        ("overlap by a little", two(b"b", 4224), "TensorOffset", &["\"b\"", "4224"]),
        ("in the header", one(&[part], 1, 0, 128).build(), "TensorOffset", &[name, "byte 0"]),
        ("far away", one(&[part], 1, 1 << 63, 128).build(), "TensorOffset", &[name]),
        ("hole", two(b"b", 12288), "TensorOffset", &["\"b\"", "12288"]),
        // Begin after end: a length that wraps around.
        ("negative length", one(&[part], 1, 4096, -128i64 as u64).build(), "TensorLength", &[name, "[R19]"]),
        ("length 0", one(&[part], 1, 4096, 0).build(), "TensorLength", &["0 bytes, its shape gives 128"]),
        ("length not padded", one(&[part], 1, 4096, 4).build(), "TensorLength", &[name]),
        ("after the end", shorter, "TensorPastEnd", &[name, "ends at byte 8192, the file at 4096", "[R19]"]),
        ("file too long", longer, "FileLength", &["12288 bytes", "end at 8192", "[R19]"]),
        ("no parts", one(&[], 1, 4096, 128).build(), "TooManyEntries", &["tensor directory"]),
        ("no parts, long name", no_parts(), "NoParts", &["has no parts", "[R15]"]),
        ("no blocks", one(&[part], 0, 4096, 0).build(), "NoBlocks", &[name, "[R15]"]),
        ("2^40 blocks", one(&[part], 1 << 40, 4096, 1 << 52).build(), "TensorPastEnd", &[name]),
        ("2^51 blocks", one(&[part], 1 << 51, 4096, 0).build(), "TooLarge", &[name, "2^63", "[R17]"]),
        ("2^63 blocks", one(&[part], 1 << 63, 4096, 0).build(), "TooLarge", &[name]),
        (
            "parts twice",
            one(&[part, part], 1, 4096, 256).build(),
            "DuplicatePart",
            &[name, "weight", "[R15]"],
        ),
        ("empty part name", one(&[(b"", 1, 0, 1, 1), part], 1, 4096, 256).build(), "BadName", &["empty"]),
        ("part name", one(&[(b"\xff", 1, 0, 1, 1)], 1, 4096, 128).build(), "NotUtf8", &["directory"]),
        ("tensor name", two(b"\n", 8192), "BadName", &["control", "[R8]"]),
        ("dtype 0", part_codes(0, 0, 1, 1).build(), "UnknownDtype", &[name, "code 0"]),
        (
            "dtype 7",
            part_codes(7, 0, 1, 1).build(),
            "UnknownDtype",
            &[name, "code 7", "format 0.1", "newer", "[R16]"],
        ),
        ("scale 3", part_codes(6, 3, 1, 1).build(), "UnknownScale", &[name, "kind 3", "format 0.1", "[R16]"]),
        (
            "F32 with scales",
            part_codes(1, 1, 1, 1).build(),
            "ScaleMismatch",
            &[name, "F32", "row bf16", "[R16]"],
        ),
        ("AFFINE4 without", part_codes(5, 0, 1, 64).build(), "ScaleMismatch", &["AFFINE4", "none"]),
        (
            "TERNARY2 affine",
            part_codes(6, 2, 1, 1).build(),
            "ScaleMismatch",
            &["TERNARY2", "affine group 64"],
        ),
        ("no rows", part_codes(1, 0, 0, 1).build(), "BadShape", &[name, "[0, 1]", "zero", "[R17]"]),
        ("no columns", part_codes(6, 1, 1, 0).build(), "BadShape", &["[1, 0]"]),
        (
            "AFFINE4 of 65",
            part_codes(5, 2, 1, 65).build(),
            "BadShape",
            &["[1, 65]", "AFFINE4", "multiple of 64"],
        ),
        ("two large parts", two_large(), "TooLarge", &[name]),
    ]);
}

/// The size check of the directory needs at least one part's bytes, so the name must make up for them.
fn no_parts() -> Vec<u8> {
    Raw::new()
        .tensor(Entry { name: &[b'n'; 100], n_blocks: 1, offset: 4096, len: 0, parts: &[] }, &[])
        .build()
}

fn two_large() -> Vec<u8> {
    one(&[(b"a", 1, 0, 1 << 30, 1 << 30), (b"b", 1, 0, 1 << 30, 1 << 30)], 1, 4096, 0).build()
}

/// Dimensions whose product overflows, for every dtype (R17).
#[test]
fn dimensions_that_overflow() {
    for (dtype, scale) in [(1, 0), (2, 0), (3, 0), (4, 0), (5, 2), (6, 1)] {
        for (rows, cols) in [
            (1 << 32, 1 << 32),
            (u64::MAX, u64::MAX - 63),
            (u64::MAX, 64),
            (1, 1 << 63),
            (1 << 63, 64),
            (1 << 61, 128),
            (1 << 40, 1 << 40),
            (3, u64::MAX / 2 - 63),
        ] {
            let file = part_codes(dtype, scale, rows, cols).build();
            let error = Index::parse(&file, file.len() as u64).unwrap_err();
            assert!(matches!(error, Error::BadShape { .. }), "dtype {dtype} [{rows}, {cols}]: {error}");
        }
    }
}

#[test]
fn index_handed_over_in_part() {
    let file = small().build();
    let error = Index::parse(&file[..4000], file.len() as u64).unwrap_err();
    assert!(matches!(error, Error::IndexCut { have: 4000, need: 4096 }), "{error}");
    Index::parse(&file[..4096], file.len() as u64).unwrap();
}

#[test]
fn getters() {
    let mut meta = Metadata::new();
    meta.insert("n", 7u64);
    meta.insert("t", "text");
    assert_eq!(meta.u64("n").unwrap(), 7);
    assert_eq!(meta.str("t").unwrap(), "text");
    assert_eq!(meta.opt_u64("absent").unwrap(), None);
    assert_eq!(meta.get("n"), Some(&Value::U64(7)));
    let missing = meta.u64("absent").unwrap_err();
    assert!(matches!(&missing, Error::MissingKey { key } if key == "absent"), "{missing}");
    let wrong = [
        meta.u64("t").err(),
        meta.f64("n").err(),
        meta.bool("n").err(),
        meta.str("n").err(),
        meta.u64s("n").err(),
        meta.f64s("n").err(),
        meta.strs("n").err(),
        meta.opt_bool("n").err(),
    ];
    for error in wrong {
        let error = error.expect("the type is another");
        assert!(matches!(error, Error::WrongType { .. }), "{error}");
        assert!(error.to_string().contains(" is a "), "{error}");
    }
}

#[test]
fn paths() {
    let folder = tempfile::tempdir().unwrap();
    let absent = SamaraFile::open(folder.path().join("absent.samara"), Access::Mmap).unwrap_err();
    assert!(matches!(absent, Error::Io { .. }) && absent.to_string().contains("absent.samara"), "{absent}");
    let not_a_file = SamaraFile::open(folder.path(), Access::Read).unwrap_err();
    assert!(matches!(not_a_file, Error::NotAFile { found: "a folder", .. }), "{not_a_file}");
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    let checkpoint = SamaraFile::open(folder.path(), Access::Read).unwrap_err();
    assert!(matches!(checkpoint, Error::CheckpointFolder { .. }), "{checkpoint}");
    assert!(checkpoint.to_string().contains("`samara convert`"), "{checkpoint}");
    // The system's reason is in the message, so it is not a source to be printed once more.
    assert!(
        std::error::Error::source(&absent).is_none() && absent.to_string().matches("os error").count() == 1
    );
}

/// One bit flipped in each section: the index says so by itself, `verify` names the tensor (R7, R20).
#[test]
fn verify_names_the_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.samara");
    // Where the bit is, the tensor, and what is wrong.
    let rows: &[(usize, Option<&str>, &str)] = &[
        (4096, Some("norm"), "TensorHash"),
        (4096 + 127, Some("norm"), "TensorHash"),
        (4096 + 128, Some("norm"), "TensorPadding"),
        (8191, Some("norm"), "TensorPadding"),
        (8192, Some("experts"), "TensorHash"),
        (8192 + 4096 + 600, Some("experts"), "TensorHash"),
        (16383, Some("experts"), "TensorHash"),
        (0, None, ""),
    ];
    for &(at, bad, variant) in rows {
        let mut file = small().build();
        if bad.is_some() {
            file[at] ^= 0x10;
        }
        std::fs::write(&path, &file).unwrap();
        for access in [Access::Mmap, Access::Read] {
            let file = SamaraFile::open(&path, access).unwrap();
            for tensor in file.index().tensors() {
                match file.verify(tensor) {
                    Ok(()) => assert_ne!(bad, Some(tensor.name.as_str()), "byte {at}"),
                    Err(error) => {
                        assert_eq!(bad, Some(tensor.name.as_str()), "byte {at}: {error}");
                        assert!(format!("{:?}", error.defect()).starts_with(variant), "byte {at}: {error}");
                        assert!(error.to_string().contains(&tensor.name), "{error}");
                    }
                }
            }
        }
    }
}
