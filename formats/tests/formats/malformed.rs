//! Every field of a header wrong in turn: one clear error each, no panic, no large allocation.

use std::fs;

use formats::gguf::GgufFile;

use crate::allocations;
use crate::sample::says;

/// A file put together field by field, so that any of them can be wrong.
#[derive(Clone)]
struct Raw {
    magic: [u8; 4],
    version: u32,
    n_tensors: u64,
    n_keys: u64,
    keys: Vec<u8>,
    tensors: Vec<u8>,
    data: usize,
}

fn string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

fn key(name: &[u8], value_type: u32, value: &[u8]) -> Vec<u8> {
    [&string(name), &value_type.to_le_bytes()[..], value].concat()
}

fn tensor(name: &[u8], n_dims: u32, dims: &[u64], dtype: u32, offset: u64) -> Vec<u8> {
    let dims: Vec<u8> = dims.iter().flat_map(|size| size.to_le_bytes()).collect();
    [&string(name), &n_dims.to_le_bytes()[..], &dims, &dtype.to_le_bytes(), &offset.to_le_bytes()].concat()
}

/// One key, two tensors: F32 {4, 2} and Q8_0 {32}.
fn valid() -> Raw {
    Raw {
        magic: *b"GGUF",
        version: 3,
        n_tensors: 2,
        n_keys: 1,
        keys: key(b"k", 4, &7_u32.to_le_bytes()),
        tensors: [tensor(b"a", 2, &[4, 2], 0, 0), tensor(b"b", 1, &[32], 8, 32)].concat(),
        data: 66,
    }
}

impl Raw {
    fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.n_tensors.to_le_bytes());
        out.extend(self.n_keys.to_le_bytes());
        out.extend(&self.keys);
        out.extend(&self.tensors);
        out.resize(out.len().next_multiple_of(32) + self.data, 0);
        out
    }
}

fn with_key(value_type: u32, value: &[u8]) -> Vec<u8> {
    Raw { keys: key(b"k", value_type, value), ..valid() }.bytes()
}

fn with_alignment(value_type: u32, value: &[u8]) -> Vec<u8> {
    Raw { keys: key(b"general.alignment", value_type, value), ..valid() }.bytes()
}

fn with_first_tensor(first: Vec<u8>) -> Vec<u8> {
    Raw { tensors: [first, tensor(b"b", 1, &[32], 8, 32)].concat(), ..valid() }.bytes()
}

fn array(element: u32, count: u64, rest: &[u8]) -> Vec<u8> {
    [&element.to_le_bytes()[..], &count.to_le_bytes(), rest].concat()
}

fn nested(depth: usize) -> Vec<u8> {
    [array(9, 1, &[]).repeat(depth - 1), array(4, 0, &[])].concat()
}

/// What is wrong, the file, and words that the error must have.
fn cases() -> Vec<(&'static str, Vec<u8>, &'static [&'static str])> {
    let v = valid;
    let huge = 1_u64 << 60;
    vec![
        ("empty", Vec::new(), &["empty (0 bytes)"]),
        ("HTML", b"<!DOCTYPE html><html></html>".to_vec(), &["HTML"]),
        ("HTML in capitals", b"\n <HTML><body>404</body>".to_vec(), &["HTML"]),
        (
            "LFS pointer",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n".to_vec(),
            &["git-LFS pointer"],
        ),
        ("zip", b"PK\x03\x04rest".to_vec(), &["zip archive"]),
        ("gzip", vec![0x1f, 0x8b, 8, 0], &["compressed"]),
        ("before GGUF", b"lmggrest".to_vec(), &["before GGUF"]),
        ("safetensors", b"\x40\0\0\0\0\0\0\0{\"a\"".to_vec(), &["safetensors"]),
        ("JSON", b"{\"a\": 1}".to_vec(), &["JSON"]),
        ("half a magic", b"GG".to_vec(), &["ends after 2 bytes"]),
        ("magic", Raw { magic: *b"GGUX", ..v() }.bytes(), &["47 47 55 58", "`GGUF` or `PWRI`"]),
        ("version 0", Raw { version: 0, ..v() }.bytes(), &["version 0"]),
        ("version 1", Raw { version: 1, ..v() }.bytes(), &["version 1", "newer file"]),
        ("version 4", Raw { version: 4, ..v() }.bytes(), &["version 4"]),
        ("big-endian", Raw { version: 3_u32.swap_bytes(), ..v() }.bytes(), &["big-endian"]),
        ("tensor count", Raw { n_tensors: huge, ..v() }.bytes(), &["tensor count", "1152921504606846976"]),
        ("tensor count, all bits", Raw { n_tensors: u64::MAX, ..v() }.bytes(), &["tensor count"]),
        ("one tensor too many", Raw { n_tensors: 3, ..v() }.bytes(), &["tensor 2 of 3"]),
        ("key count", Raw { n_keys: huge, ..v() }.bytes(), &["metadata count", "room for"]),
        ("key count, all bits", Raw { n_keys: u64::MAX, ..v() }.bytes(), &["metadata count"]),
        ("one key too many", Raw { n_keys: 2, ..v() }.bytes(), &["damaged"]),
        ("empty key", Raw { keys: key(b"", 4, &[0; 4]), ..v() }.bytes(), &["metadata key 0", "is empty"]),
        (
            "key not UTF-8",
            Raw { keys: key(b"\xff\xfe", 4, &[0; 4]), ..v() }.bytes(),
            &["metadata key 0", "not UTF-8"],
        ),
        (
            "long key",
            Raw { keys: key(&[b'k'; 70_000], 4, &[0; 4]), ..v() }.bytes(),
            &["metadata key 0", "70000 bytes"],
        ),
        (
            "key length 2^40",
            Raw { keys: [(1_u64 << 40).to_le_bytes().to_vec(), vec![b'k'; 40]].concat(), ..v() }.bytes(),
            &["name of metadata key 0", "1099511627776 bytes needed"],
        ),
        (
            "key twice",
            Raw { n_keys: 2, keys: [key(b"k", 0, &[1]), key(b"k", 0, &[2])].concat(), ..v() }.bytes(),
            &["`k`", "twice"],
        ),
        ("value type 13", with_key(13, &[0; 8]), &["`k`", "type 13"]),
        ("value type, all bits", with_key(u32::MAX, &[0; 8]), &["`k`", "type 4294967295"]),
        ("bool of 2", with_key(7, &[2]), &["`k`", "bool of 2"]),
        (
            "string length 2^40",
            with_key(8, &(1_u64 << 40).to_le_bytes()),
            &["`k`", "1099511627776 bytes needed"],
        ),
        ("string length, all bits", with_key(8, &u64::MAX.to_le_bytes()), &["`k`", "bytes needed"]),
        ("array count 2^60", with_key(9, &array(0, huge, &[])), &["`k`", "1152921504606846976 entries"]),
        (
            "array count 2^60 of u64",
            with_key(9, &array(10, huge, &[])),
            &["`k`", "1152921504606846976 entries"],
        ),
        ("array count of strings", with_key(9, &array(8, huge, &[])), &["`k`", "entries"]),
        ("array count, all bits", with_key(9, &array(12, u64::MAX, &[])), &["`k`", "entries"]),
        ("array of type 13", with_key(9, &array(13, 1, &[0; 8])), &["`k`", "type 13"]),
        ("array of bools of 3", with_key(9, &array(7, 2, &[1, 3])), &["`k`", "bool of 3"]),
        (
            "string in array 2^40",
            with_key(9, &array(8, 1, &(1_u64 << 40).to_le_bytes())),
            &["string 0 of 1", "`k`"],
        ),
        ("arrays nested 100000 deep", with_key(9, &nested(100_000)), &["`k`", "nested"]),
        ("arrays nested 5 deep", with_key(9, &nested(5)), &["`k`", "nested more than 4"]),
        ("alignment 0", with_alignment(4, &0_u32.to_le_bytes()), &["`general.alignment`", "is 0"]),
        ("alignment 3", with_alignment(4, &3_u32.to_le_bytes()), &["`general.alignment`", "is 3"]),
        ("alignment 4", with_alignment(4, &4_u32.to_le_bytes()), &["`general.alignment`", "is 4"]),
        (
            "alignment 2^30",
            with_alignment(4, &(1_u32 << 30).to_le_bytes()),
            &["`general.alignment`", "1073741824"],
        ),
        (
            "alignment 2^31",
            with_alignment(4, &(1_u32 << 31).to_le_bytes()),
            &["`general.alignment`", "2147483648"],
        ),
        (
            "alignment of type i32",
            with_alignment(5, &32_u32.to_le_bytes()),
            &["`general.alignment`", "i32 32", "u32"],
        ),
        (
            "alignment of type string",
            with_alignment(8, &string(b"32")),
            &["`general.alignment`", "string \"32\""],
        ),
        (
            "alignment the data do not keep",
            with_alignment(4, &64_u32.to_le_bytes()),
            &["`b`", "offset 32", "alignment 64"],
        ),
        ("empty tensor name", with_first_tensor(tensor(b"", 1, &[4], 0, 0)), &["tensor 0 of 2", "is empty"]),
        (
            "tensor name not UTF-8",
            with_first_tensor(tensor(b"\xc3\x28", 1, &[4], 0, 0)),
            &["tensor 0", "not UTF-8"],
        ),
        ("tensor twice", with_first_tensor(tensor(b"b", 1, &[4], 0, 0)), &["tensor `b`", "twice"]),
        ("0 dimensions", with_first_tensor(tensor(b"a", 0, &[], 0, 0)), &["`a`", "0 dimensions"]),
        ("5 dimensions", with_first_tensor(tensor(b"a", 5, &[1; 5], 0, 0)), &["`a`", "5 dimensions"]),
        ("9 dimensions", with_first_tensor(tensor(b"a", 9, &[1; 9], 0, 0)), &["`a`", "9 dimensions"]),
        (
            "2^32 - 1 dimensions",
            with_first_tensor(tensor(b"a", u32::MAX, &[1; 4], 0, 0)),
            &["`a`", "dimensions"],
        ),
        ("a dimension of 0", with_first_tensor(tensor(b"a", 2, &[4, 0], 0, 0)), &["`a`", "dimension 1 is 0"]),
        (
            "dimensions that wrap",
            with_first_tensor(tensor(b"a", 2, &[1 << 32, 1 << 32], 0, 0)),
            &["`a`", "2^64"],
        ),
        (
            "dimensions that wrap to 8",
            with_first_tensor(tensor(b"a", 3, &[(1 << 63) + 4, 2, 1], 24, 0)),
            &["`a`", "2^64"],
        ),
        ("bytes that wrap", with_first_tensor(tensor(b"a", 1, &[1 << 62], 0, 0)), &["`a`", "overflow"]),
        (
            "a part of a block",
            with_first_tensor(tensor(b"a", 1, &[33], 8, 0)),
            &["`a`", "blocks of 32", "33"],
        ),
        (
            "Q4_K of 576 columns",
            with_first_tensor(tensor(b"a", 2, &[576, 1], 12, 0)),
            &["`a`", "Q4_K", "256", "576"],
        ),
        (
            "type that is not read",
            with_first_tensor(tensor(b"a", 1, &[256], 16, 0)),
            &["`a`", "IQ2_XXS (16)", "Q8_0"],
        ),
        ("type that was removed", with_first_tensor(tensor(b"a", 1, &[4], 4, 0)), &["`a`", "unknown type 4"]),
        ("type 1000", with_first_tensor(tensor(b"a", 1, &[4], 1000, 0)), &["`a`", "unknown type 1000"]),
        (
            "offset off the alignment",
            with_first_tensor(tensor(b"a", 1, &[4], 0, 8)),
            &["`a`", "offset 8", "32"],
        ),
        (
            "offset beyond the file",
            with_first_tensor(tensor(b"a", 1, &[4], 0, 1 << 40)),
            &["`a`", "16 bytes", "only 0"],
        ),
        (
            "offset that wraps",
            with_first_tensor(tensor(b"a", 1, &[4], 0, u64::MAX - 31)),
            &["`a`", "overflow"],
        ),
        ("tensors on the same bytes", with_first_tensor(tensor(b"a", 1, &[16], 0, 0)), &["overlap", "`a`"]),
        ("data cut by 1 byte", Raw { data: 65, ..v() }.bytes(), &["`b`", "needs 34 bytes", "only 33"]),
        ("data absent", Raw { data: 0, ..v() }.bytes(), &["`a`", "needs 32 bytes", "only 0"]),
    ]
}

#[test]
fn every_field_wrong_in_turn() {
    GgufFile::parse("valid", valid().bytes()).unwrap();
    GgufFile::parse("valid", Raw { version: 2, magic: *b"PWRI", ..valid() }.bytes()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes, parts) in cases() {
        // As a file too: mapped and given bytes must not differ.
        let path = folder.path().join("case.gguf");
        fs::write(&path, &bytes).unwrap();
        for result in [GgufFile::open(&path), GgufFile::parse(&path, bytes)] {
            let error = result.map(drop).expect_err(name);
            says(&error, parts);
            says(&error, &["case.gguf"]);
        }
    }
    allocations::assert_small();
}

#[test]
fn what_is_no_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    says(&GgufFile::open(folder.path()).unwrap_err(), &["a folder"]);
    says(&GgufFile::open(folder.path().join("absent.gguf")).unwrap_err(), &["absent.gguf", "cannot open"]);
    says(&GgufFile::open("/dev/zero").unwrap_err(), &["not a regular file"]);
}
