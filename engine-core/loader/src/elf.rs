//! A look at a library file before the dynamic linker sees it, for messages that say more than the linker's, and
//! because the linker maps a truncated file and dies.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

const PT_LOAD: u32 = 1;

/// What is wrong with the file, if it can be seen from its headers.
pub(crate) fn check(path: &Path) -> Result<(), String> {
    let file = File::open(path).map_err(|error| format!("cannot be read: {error}"))?;
    let len = file.metadata().map_err(|error| format!("cannot be read: {error}"))?.len();
    let mut head = Vec::new();
    (&file).take(64).read_to_end(&mut head).map_err(|error| format!("cannot be read: {error}"))?;
    if len == 0 {
        return Err("is empty".into());
    }
    if !head.starts_with(b"\x7fELF") {
        return Err("is no shared library (it does not start as an ELF file)".into());
    }
    let truncated = || format!("is truncated: it has {len} bytes, its headers speak of more");
    if head.len() < 64 {
        return Err(truncated());
    }
    let (class, order) = (head[4], head[5]);
    let native_order = if cfg!(target_endian = "little") { 1 } else { 2 };
    if class != 2 || order != native_order {
        return Err(format!(
            "is built for another machine ({}-bit, {} endian)",
            if class == 1 { 32 } else { 64 },
            if order == 1 { "little" } else { "big" }
        ));
    }
    let machine = u16_at(&head, 18);
    if let Some(wanted) = native_machine().filter(|wanted| *wanted != machine) {
        return Err(format!(
            "is built for another processor: {}, this is {}",
            machine_name(machine),
            machine_name(wanted)
        ));
    }
    let (program, sections) = (u64_at(&head, 32), u64_at(&head, 40));
    let (program_size, program_count) = (u64::from(u16_at(&head, 54)), u64::from(u16_at(&head, 56)));
    let (section_size, section_count) = (u64::from(u16_at(&head, 58)), u64::from(u16_at(&head, 60)));
    let table_end = |start: u64, size: u64, count: u64| start.checked_add(size * count);
    let within = |end: Option<u64>| end.is_some_and(|end| end <= len);
    if !within(table_end(program, program_size, program_count))
        || !within(table_end(sections, section_size, section_count))
    {
        return Err(truncated());
    }
    for index in 0..program_count {
        let mut header = [0u8; 56];
        if program_size < 56 || file.read_exact_at(&mut header, program + index * program_size).is_err() {
            return Err("is damaged: its program headers cannot be read".into());
        }
        let kind = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]);
        if kind == PT_LOAD && !within(u64_at(&header, 8).checked_add(u64_at(&header, 32))) {
            return Err(truncated());
        }
    }
    Ok(())
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([bytes[at], bytes[at + 1]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut value = [0u8; 8];
    value.copy_from_slice(&bytes[at..at + 8]);
    u64::from_ne_bytes(value)
}

fn native_machine() -> Option<u16> {
    match std::env::consts::ARCH {
        "x86_64" => Some(62),
        "aarch64" => Some(183),
        "riscv64" => Some(243),
        _ => None,
    }
}

fn machine_name(machine: u16) -> String {
    match machine {
        3 => "x86".into(),
        40 => "arm".into(),
        62 => "x86_64".into(),
        183 => "aarch64".into(),
        243 => "riscv".into(),
        other => format!("ELF machine {other}"),
    }
}
