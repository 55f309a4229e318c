//! Huge pages: a model read through pages of 4 KiB misses the processor's table of addresses at nearly every row.
//!
//! `chrt -f 10 thermocline bench -m smol-drelu-135m-q8_0.gguf --pp 0 --tg 128 --repeat 1 --threads 1 --storage ram`, 24 times with
//! and without in turns, on a virtual AMD EPYC of 2 cores that others used, too: the median was 33.05 tokens/s with (two thirds
//! of the file were in huge pages), 30.27 without, and 21 of the 24 pairs were faster. An earlier 5 times 5 runs under more load,
//! each process 25 seconds after the other, showed no difference (31.3 and 31.5).
#![expect(unsafe_code, reason = "advice to the system names memory by its address")]

use engine_core::HostMemory;
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

/// Where Linux says whether it gives huge pages to those who ask.
const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Asks the system to hold this memory, none of which was touched, in huge pages.
pub(crate) fn ask_for_huge(memory: &mut HostMemory) -> Result<(), Errno> {
    let bytes = memory.bytes_mut();
    let page = rustix::param::page_size();
    let skipped = bytes.as_ptr().align_offset(page);
    let Some(whole) = bytes.len().checked_sub(skipped).map(|left| left / page * page).filter(|n| *n > 0)
    else {
        return Ok(());
    };
    // SAFETY: whole pages of memory that this borrow alone uses; the advice changes none of its bytes.
    unsafe { madvise(bytes.as_mut_ptr().add(skipped).cast(), whole, Advice::LinuxHugepage) }
}

/// What there is to say about huge pages on this system, as a sentence.
pub(crate) fn note(wanted: bool) -> String {
    if !wanted {
        return "huge pages are not asked for (option `huge_pages`)".into();
    }
    let asked = HostMemory::allocate(2 * HostMemory::ALIGNMENT).map(|mut memory| ask_for_huge(&mut memory));
    if let Ok(Err(error)) = asked {
        return format!("files are in small pages: the system refuses huge ones ({error})");
    }
    match std::fs::read_to_string(SETTING) {
        Ok(setting) if setting.contains("[never]") => {
            format!(
                "files are in small pages: {SETTING} is `never`; `madvise` there would let this tier have huge ones"
            )
        }
        _ => "files are in huge pages where the system has them (option `huge_pages`)".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Flags of the mapping that holds this address.
    fn flags(address: usize) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (mut within, mut found) = (false, String::new());
        for line in maps.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let number = |text| usize::from_str_radix(text, 16);
            if let Some((Ok(start), Ok(end))) = range.map(|(start, end)| (number(start), number(end))) {
                within = (start..end).contains(&address);
            } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| within) {
                found = flags.to_owned();
            }
        }
        found
    }

    #[test]
    fn what_is_asked_for_is_marked() {
        let mut memory = HostMemory::allocate(5 << 20).unwrap();
        let middle = memory.bytes().as_ptr() as usize + (2 << 20);
        let before = flags(middle);
        assert!(!before.is_empty() && !before.contains(" hg"), "{before}");
        match ask_for_huge(&mut memory) {
            Ok(()) => assert!(flags(middle).contains(" hg"), "{}", flags(middle)),
            // Linux without huge pages: the tier says so, and goes on.
            Err(error) => assert!(note(true).contains(&error.to_string()), "{error}: {}", note(true)),
        }
        assert!(memory.bytes().iter().all(|byte| *byte == 0));
        // Too small for a page of its own.
        ask_for_huge(&mut HostMemory::allocate(7).unwrap()).unwrap();
        assert!(note(false).contains("not asked for") && note(true).contains("pages"));
    }
}
