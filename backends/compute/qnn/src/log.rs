//! What the library says: through its log callback the last lines, which belong into messages about failed calls; and what it
//! prints while it opens, which belongs into the notes of its device.

use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};

/// Errors and warnings.
pub(crate) const LEVEL: u32 = 2;
/// Lines that are kept.
const KEPT: usize = 8;
/// Bytes of a line that are kept.
const LONGEST: usize = 400;

static LINES: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

/// What was printed, each line once.
static PRINTED: Mutex<Vec<String>> = Mutex::new(Vec::new());

unsafe extern "C" {
    fn vsnprintf(to: *mut c_char, bytes: usize, format: *const c_char, arguments: *mut c_void) -> c_int;
}

/// The callback. Arguments come as the platform's `va_list`, which is passed on as it is.
pub(crate) unsafe extern "C" fn callback(format: *const c_char, _: u32, _: u64, arguments: *mut c_void) {
    if format.is_null() {
        return;
    }
    let mut line = [0u8; LONGEST];
    // SAFETY: the library's format and arguments go together; at most `LONGEST` bytes are written, with a zero at the end.
    let text = unsafe {
        if vsnprintf(line.as_mut_ptr().cast(), LONGEST, format, arguments) < 0 {
            return;
        }
        CStr::from_ptr(line.as_ptr().cast())
    };
    let text = text.to_string_lossy().trim().to_owned();
    if text.is_empty() {
        return;
    }
    let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    if lines.len() == KEPT {
        lines.pop_front();
    }
    lines.push_back(text);
}

/// Keeps what was printed: the first lines, each once.
pub(crate) fn printed(text: &str) {
    let mut kept = PRINTED.lock().unwrap_or_else(PoisonError::into_inner);
    for line in text.lines() {
        let line: String = line.chars().filter(|c| !c.is_control()).take(LONGEST).collect();
        let line = line.trim();
        if !line.is_empty() && kept.len() < KEPT && kept.iter().all(|known| known != line) {
            kept.push(line.to_owned());
        }
    }
}

/// What was printed, as a note.
pub(crate) fn printed_note() -> Option<String> {
    let kept = PRINTED.lock().unwrap_or_else(PoisonError::into_inner);
    (!kept.is_empty()).then(|| format!("the library printed: {}", kept.join(" | ")))
}

/// Forgets what was said before a call.
pub(crate) fn clear() {
    LINES.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// What was said since, as the tail of a message.
pub(crate) fn said() -> String {
    let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    if lines.is_empty() {
        return String::new();
    }
    format!("; the library said: {}", lines.iter().map(String::as_str).collect::<Vec<_>>().join(" | "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_is_kept_once_and_bounded() {
        assert_eq!(printed_note(), None);
        printed("  # one\n\n\u{1b}[1mtwo\r\n# one\n");
        assert_eq!(printed_note().unwrap(), "the library printed: # one | [1mtwo");
        printed(&"x".repeat(5000));
        (0..100).for_each(|i| printed(&i.to_string()));
        let kept = PRINTED.lock().unwrap();
        assert_eq!((kept.len(), kept[2].len()), (KEPT, LONGEST));
    }
}
