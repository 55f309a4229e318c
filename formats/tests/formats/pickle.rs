//! PyTorch's files of tensors: real ones (made by `fixtures/make_predictor.py`), hostile ones, damaged ones.

use std::path::Path;

use engine_core::DType;
use formats::pickle::{Checkpoint, statistics};
use formats::quantise::dequantise;
use proptest::prelude::*;

use crate::sample::says;

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)).unwrap()
}

fn values(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let tensor = checkpoint.tensor(name).unwrap();
    let mut out = vec![0.0; tensor.dims.iter().product::<u64>() as usize];
    dequantise(tensor.dtype, checkpoint.bytes_of(tensor), &mut out).unwrap();
    out
}

/// A zip archive of stored entries, by the format's description.
pub(crate) fn zip(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    let fields = |bytes: &[u8], name: &str| {
        let mut out = vec![0; 14]; // version, flags, method (stored), time, date, check sum
        out.extend((bytes.len() as u32).to_le_bytes());
        out.extend((bytes.len() as u32).to_le_bytes());
        out.extend((name.len() as u16).to_le_bytes());
        out.extend(0_u16.to_le_bytes());
        out
    };
    for (name, bytes) in entries {
        let offset = file.len() as u32;
        file.extend(b"PK\x03\x04");
        file.extend(fields(bytes, name));
        file.extend(name.as_bytes());
        file.extend(*bytes);
        directory.extend(b"PK\x01\x02\x00\x00");
        directory.extend(fields(bytes, name));
        directory.extend([0; 10]);
        directory.extend(offset.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let start = file.len() as u32;
    file.extend(&directory);
    file.extend(b"PK\x05\x06\0\0\0\0");
    file.extend([(entries.len() as u16).to_le_bytes(); 2].concat());
    file.extend((directory.len() as u32).to_le_bytes());
    file.extend(start.to_le_bytes());
    file.extend([0, 0]);
    file
}

/// A text, as a step of a pickle.
fn text(text: &str) -> Vec<u8> {
    [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
}

fn int(value: i32) -> Vec<u8> {
    [&b"J"[..], &value.to_le_bytes()].concat()
}

/// A tensor of F32 out of the storage with this key: its length, where it starts, sizes and strides.
pub(crate) fn tensor(key: &str, stored: i32, offset: i32, sizes: &[i32], strides: &[i32]) -> Vec<u8> {
    let tuple =
        |list: &[i32]| [b"(".to_vec(), list.iter().flat_map(|&n| int(n)).collect(), b"t".to_vec()].concat();
    let global = |name: &str| format!("c{}\n", name.replace(' ', "\n")).into_bytes();
    [
        global("torch._utils _rebuild_tensor_v2"),
        b"((".to_vec(),
        text("storage"),
        global("torch FloatStorage"),
        text(key),
        text("cpu"),
        int(stored),
        b"tQ".to_vec(),
        int(offset),
        tuple(sizes),
        tuple(strides),
        b"\x89".to_vec(),
        global("collections OrderedDict"),
        b")RtR".to_vec(),
    ]
    .concat()
}

/// The pickle of a dictionary with these values.
pub(crate) fn dictionary(entries: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let entries = entries.iter().flat_map(|(key, value)| [text(key), value.clone(), b"s".to_vec()].concat());
    [b"\x80\x02}".to_vec(), entries.collect(), b".".to_vec()].concat()
}

/// A file with this pickle, and 24 numbers of F32 in storage 0.
fn with_pickle(pickle: &[u8]) -> Vec<u8> {
    let data: Vec<u8> = (0..24_u8).flat_map(|at| f32::from(at).to_le_bytes()).collect();
    zip(&[("m/data.pkl", pickle), ("m/byteorder", b"little"), ("m/data/0", &data)])
}

fn refused(bytes: Vec<u8>, parts: &[&str]) {
    let error = Checkpoint::parse("x.pt", bytes).map(drop).unwrap_err();
    says(&error, &[&["x.pt"], parts].concat());
}

#[test]
fn files_of_torch() {
    let predictor = Checkpoint::parse("predictor.pt", fixture("predictor.pt")).unwrap();
    let found: Vec<_> =
        predictor.tensors().iter().map(|t| (t.name.as_str(), t.dtype, t.dims.as_slice())).collect();
    assert_eq!(found, [("fc1.weight", DType::F16, &[8, 3][..]), ("fc2.weight", DType::F16, &[3, 5])]);
    let counted = |count: usize, step: f32| (0..count).map(|at| at as f32 * step).collect::<Vec<_>>();
    assert_eq!(values(&predictor, "fc1.weight"), counted(24, 0.125));
    assert_eq!(values(&predictor, "fc2.weight"), counted(15, -0.25));
    let activation = Checkpoint::parse("activation.pt", fixture("activation.pt")).unwrap();
    assert_eq!(values(&activation, ""), [3.0, 0.0, 7.0, 1.0, 2.0]);
}

/// A file per layer, by its number and not by the order of names.
#[test]
fn statistics_by_layer() {
    let folder = tempfile::tempdir().unwrap();
    let write = |layer: usize, bytes: &[u8]| {
        std::fs::write(folder.path().join(format!("activation_{layer}.pt")), bytes).unwrap();
    };
    let ten: Vec<u8> = (0..10).flat_map(|layer| f32::from(layer as u8).to_le_bytes()).collect();
    for layer in 0..11_i32 {
        let pickle = [&b"\x80\x02"[..], &tensor("0", 10, layer.min(9), &[1], &[1]), b"."].concat();
        write(layer as usize, &zip(&[("m/data.pkl", &pickle), ("m/data/0", &ten)]));
    }
    let found = statistics(folder.path(), &[1; 11]).unwrap();
    assert_eq!((&found[2], &found[9], &found[10]), (&vec![2.0], &vec![9.0], &vec![9.0]));
    write(0, &fixture("activation.pt"));
    assert_eq!(statistics(folder.path(), &[5]).unwrap(), [[3.0, 0.0, 7.0, 1.0, 2.0]]);
    let refused =
        |neurons: &[usize], parts: &[&str]| says(&statistics(folder.path(), neurons).unwrap_err(), parts);
    refused(&[4], &["activation_0.pt", "[5]", "4 neurons"]);
    refused(&[5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], &["activation_11.pt", "No such file"]);
    write(0, &fixture("predictor.pt"));
    refused(&[5], &["activation_0.pt", "2 tensors"]);
    let negative = [&b"\x80\x02"[..], &tensor("0", 1, 0, &[1], &[1]), b"."].concat();
    write(0, &zip(&[("m/data.pkl", &negative), ("m/data/0", &(-1_f32).to_le_bytes())]));
    refused(&[1], &["activation_0.pt", "neuron 0", "-1"]);
}

#[test]
fn views_and_offsets() {
    let part =
        dictionary(&[("a", tensor("0", 24, 6, &[2, 3], &[3, 1])), ("b", tensor("0", 24, 23, &[], &[]))]);
    let file = Checkpoint::parse("x.pt", with_pickle(&part)).unwrap();
    assert_eq!(values(&file, "a"), [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]);
    assert_eq!((values(&file, "b"), file.tensor("b").unwrap().dims.as_slice()), (vec![23.0], &[1][..]));
    let cases: [(Vec<u8>, &[&str]); 8] = [
        (tensor("0", 24, 0, &[2, 3], &[1, 2]), &["`t`", "view", "contiguous"]),
        (tensor("0", 24, 20, &[5], &[1]), &["`t`", "5 elements from 20", "24"]),
        (tensor("0", 25, 0, &[25], &[1]), &["`t`", "`m/data/0` has 96 bytes", "25 elements"]),
        (tensor("7", 24, 0, &[24], &[1]), &["`t`", "no `m/data/7`"]),
        (tensor("0", 24, 0, &[0], &[1]), &["`t`", "[0]"]),
        (tensor("0", 24, -1, &[1], &[1]), &["negative offset"]),
        (tensor("0", i32::MAX, 0, &[i32::MAX, i32::MAX, i32::MAX, i32::MAX], &[1, 1, 1, 1]), &["`t`"]),
        (text("words"), &["`t` is no tensor"]),
    ];
    for (value, parts) in cases {
        refused(with_pickle(&dictionary(&[("t", value)])), parts);
    }
}

/// Nothing that a pickle names is looked up, and nothing it asks for is done.
#[test]
fn nothing_is_run() {
    for (module, name) in
        [("os", "system"), ("builtins", "eval"), ("torch.serialization", "load"), ("posix", "system")]
    {
        let call =
            [format!("c{module}\n{name}\n(").into_bytes(), text("touch /tmp/x"), b"tR.".to_vec()].concat();
        refused(with_pickle(&call), &[&format!("`{module}.{name}`"), "not run"]);
        let by_stack = [b"\x80\x04".to_vec(), text(module), text(name), b"\x93.".to_vec()].concat();
        refused(with_pickle(&by_stack), &[&format!("`{module}.{name}`")]);
    }
    // Steps that make objects: INST, OBJ, NEWOBJ, EXT1, BUILD on a list.
    for (steps, part) in [
        (&b"(ios\nsystem\n."[..], "step 0x69"),
        (b"(o.", "step 0x6f"),
        (b")\x81.", "step 0x81"),
        (b"\x82\x01.", "step 0x82"),
        (b"]}b.", "builds an object"),
        (b"]]R.", "no known name"),
        (b"ctorch\nFloatStorage\n)R.", "unknown way"),
    ] {
        refused(with_pickle(steps), &[part]);
    }
    for (steps, part) in [
        (&b""[..], "ends in the middle"),
        (b".", "more than there is"),
        (b"N.", "neither a tensor"),
        (b"h\x07.", "not remembered"),
        (b"u.", "wants a mark"),
        (b"((u.", "more than there is"),
        (b"X\xff\xff\xff\xff.", "ends in the middle"),
        (b"Nr\xff\xff\xff\x7f.", "impossible number"),
        (b"\x80\x09.", "version 9"),
        (b"}(NNu.", "key that is no text"),
        (b"}(Nu.", "no value"),
        (b"\x8a\x09123456789.", "9 bytes"),
    ] {
        refused(with_pickle(steps), &[part]);
    }
    // A list in itself ends nothing and hurts nothing.
    refused(with_pickle(b"]q\x00h\x00a."), &["neither a tensor"]);
}

#[test]
fn other_files() {
    refused(Vec::new(), &["0 bytes"]);
    refused(b"\x80\x02}.".to_vec(), &["plain pickle"]);
    refused(b"GGUF".to_vec(), &["no zip archive"]);
    refused(b"version https://git-lfs.github.com/spec/v1\n".to_vec(), &["git-LFS pointer"]);
    refused(zip(&[("m/other", b"x")]), &["no `data.pkl`"]);
    refused(zip(&[("m/data.pkl", b"}."), ("n/data.pkl", b"}.")]), &["several"]);
    refused(zip(&[("m/data.pkl", b"}."), ("m/byteorder", b"big")]), &["big"]);
    refused(zip(&[("m/data.pkl", b"}."), ("m/data.pkl", b"}.")]), &["twice"]);
    let mut packed = zip(&[("m/data.pkl", b"}.")]);
    let directory = packed.windows(4).position(|bytes| bytes == b"PK\x01\x02").unwrap();
    packed[directory + 10] = 8;
    refused(packed, &["m/data.pkl", "compressed"]);
}

#[test]
fn every_cut_is_refused() {
    let whole = fixture("predictor.pt");
    for length in 0..whole.len() {
        assert!(Checkpoint::parse("x.pt", whole[..length].to_vec()).is_err(), "{length}");
    }
}

proptest! {
    #[test]
    fn changed_bytes_are_read_or_refused(changes in prop::collection::vec((0_usize..1973, any::<u8>()), 1..8)) {
        let mut bytes = fixture("predictor.pt");
        for (at, byte) in changes {
            let last = bytes.len() - 1;
            bytes[at.min(last)] = byte;
        }
        if let Ok(file) = Checkpoint::parse("x.pt", bytes) {
            for tensor in file.tensors() {
                let wanted = tensor.dtype.row_bytes(tensor.dims.iter().product::<u64>()).unwrap();
                prop_assert_eq!(file.bytes_of(tensor).len() as u64, wanted);
            }
        }
    }

    #[test]
    fn any_steps_end(steps in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Checkpoint::parse("x.pt", with_pickle(&steps));
    }
}
