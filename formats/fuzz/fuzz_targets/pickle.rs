//! A file of `torch.save`: the archive of any bytes, or an archive that is right around a pickle of any bytes.

#![no_main]

use formats::pickle::Checkpoint;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let parts = formats_fuzz::parts(data);
    let bytes =
        if formats_fuzz::part(&parts, "data.pkl").is_some() { archive(&parts) } else { data.to_vec() };
    let Ok(file) = Checkpoint::parse("fuzz.pt", bytes) else { return };
    for tensor in file.tensors() {
        let elements: u64 = tensor.dims.iter().product();
        assert_eq!(file.bytes_of(tensor).len() as u64 % elements.max(1), 0);
        assert!(file.tensor(&tensor.name).is_some());
    }
});

/// A zip archive with the parts as stored files of the folder `a`.
fn archive(parts: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    for (name, part) in parts {
        let name = format!("a/{name}");
        let offset = (bytes.len() as u32).to_le_bytes();
        let size = (part.len() as u32).to_le_bytes();
        let name_length = (name.len() as u16).to_le_bytes();
        // Both records share version, flags, method, time, date and checksum: all 0.
        let middle = [&[0; 14][..], &size, &size, &name_length, &[0; 2]].concat();
        bytes.extend([b"PK\x03\x04", &middle[..], name.as_bytes(), part].concat());
        directory.extend([b"PK\x01\x02\0\0", &middle[..], &[0; 10], &offset, name.as_bytes()].concat());
    }
    let count = (parts.len() as u16).to_le_bytes();
    let (start, length) = (bytes.len() as u32, directory.len() as u32);
    bytes.extend(directory);
    let place = [length.to_le_bytes(), start.to_le_bytes()].concat();
    bytes.extend([b"PK\x05\x06\0\0\0\0", &count[..], &count, &place, &[0; 2]].concat());
    bytes
}
