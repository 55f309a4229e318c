//! Tests: long texts cross whole or not at all, and no reserved word is passed over.

use super::*;
use crate::{Bytes, HostSpan};
use engine_core::HostMemory;
use engine_core::Result;
use engine_core::backend::{ActiveRanges, Bindings};
use engine_core::operation::OperationList;

/// More than an array may have elements.
const LONG: usize = (1 << 26) + 1;

#[test]
fn long_text_crosses_whole() {
    let text = vec![b'x'; LONG];
    // SAFETY: the bytes live until the end of the test.
    unsafe {
        assert_eq!(text_from_abi(bytes_of(&text), "x").unwrap().len(), LONG);
        let endless = Bytes { data: text.as_ptr(), len: (1 << 28) + 1 };
        assert!(text_from_abi(endless, "x").unwrap_err().to_string().contains("268435457 bytes"));
    }
    let mut buffer = TextBuffer::new();
    let sink = buffer.sink();
    // SAFETY: sink and bytes live until the end of the call.
    unsafe { sink.write.unwrap()(sink.context, bytes_of(&text)) };
    assert_eq!(buffer.into_text().unwrap().len(), LONG);
}

#[test]
fn no_reserved_word_is_passed_over() {
    fn refused<T>(result: Result<T>, what: &str) {
        let error = result.err().expect(what).to_string();
        assert!(error.contains(what) && error.contains("a reserved word holds"), "{error}");
    }
    let list = OperationList::new(1);
    let list = ListDescriptor::new(&list).unwrap();
    let plain = list.as_abi();
    let newer = crate::OperationList { reserved: [0, 0, 0, 1], ..plain };
    // SAFETY: everything lives until the end of the test.
    unsafe {
        list_from_abi(&raw const plain).unwrap();
        refused(list_from_abi(&raw const newer), "operation list");
    }

    let ranges = [ActiveRanges { operation: 0, ranges: &[] }];
    let bindings = Bindings { tokens: 1, ranges: &ranges, ..Bindings::default() };
    let bindings = BindingsDescriptor::new(&bindings);
    let plain = bindings.as_abi();
    let newer = crate::Bindings { reserved: [1, 0, 0, 0], ..plain };
    // SAFETY: as above; there is one range.
    let range = crate::ActiveRanges { reserved: 1, ..unsafe { *plain.ranges } };
    let newer_range = crate::Bindings { ranges: &raw const range, ..plain };
    // SAFETY: as above.
    unsafe {
        BindingsOwned::from_abi(&raw const plain).map(drop).unwrap();
        refused(BindingsOwned::from_abi(&raw const newer), "bindings");
        refused(BindingsOwned::from_abi(&raw const newer_range), "active ranges");
    }

    let memory = HostMemory::allocate(8).unwrap();
    // SAFETY: nobody follows it after the test.
    let span = span_to_abi(unsafe { memory.span() });
    let newer = HostSpan { reserved: 1, ..span };
    let read = crate::Read { file: 1, start: 0, end: 8, into: span, priority: 0, reserved: 0 };
    // SAFETY: as above.
    unsafe {
        span_from_abi(&span).unwrap();
        refused(span_from_abi(&newer), "host span");
        read_from_abi(&read).map(drop).unwrap();
        refused(read_from_abi(&crate::Read { reserved: 1, ..read }), "read");
        refused(read_from_abi(&crate::Read { into: newer, ..read }), "host span");
    }
}
