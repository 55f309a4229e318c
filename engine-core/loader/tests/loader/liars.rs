//! A plug-in that answers nonsense: an error that names it, never a crash.

use crate::support::{catalogue, folder, liar, options};
use engine_core::backend::{BufferUse, Support, TimelineValue};
use engine_core::operation::{Activation, Arithmetic, OperationKind, OperationList, SlotRole};
use engine_core::{DType, Error};
use std::time::Duration;

fn list() -> OperationList {
    let mut list = OperationList::new(1);
    let x = list.per_token("x", SlotRole::Input, DType::F32, 1).unwrap();
    let y = list.per_token("y", SlotRole::Output, DType::F32, 1).unwrap();
    let kind = OperationKind::Activate { function: Activation::Relu, input: x, output: y };
    list.push("relu", kind, Arithmetic::F32);
    list
}

#[test]
fn nonsense_is_an_error_that_names_the_plugin() {
    let folder = folder();
    let path = liar(&folder, &[]);
    let catalogue = catalogue(&[&path]);
    let open = |lie: u32| catalogue.open_compute("liar", &options(&format!("lie = {lie}")));
    for (lie, wanted) in [
        (1, "gave a null instance"),
        (2, "its device description is malformed"),
        (3, "not UTF-8"),
        (4, "`tolerance` is \"f7\""),
        (5, "`alignment` is 3"),
        (6, "its pointer is null"),
        (7, "it is too long"),
        (8, "its device description is malformed"),
    ] {
        let error = open(lie).err().expect("an error").to_string();
        assert!(error.contains("compute plug-in `liar`") && error.contains(wanted), "{lie}: {error}");
    }
    let device = open(0).unwrap();
    assert_eq!(device.supports(&list(), 0), Support::no("it lies"));
    let reason = |lie: u32| match open(lie).unwrap().supports(&list(), 0) {
        Support::No { reason } => reason,
        other => panic!("{other:?}"),
    };
    assert!(reason(10).contains("unknown code 77"));
    assert!(reason(11).contains("gives no reason"));
    assert!(reason(12).contains("unknown error code 99"));
    let error = open(20).unwrap().allocate(1, BufferUse::Weights).unwrap_err();
    assert!(matches!(&error, Error::Internal { detail } if detail.contains("unknown error code 12345")));
    let error = open(21).unwrap().allocate(1, BufferUse::Weights).unwrap_err();
    assert!(matches!(error, Error::UnknownHandle { .. }));
    let error = open(30).unwrap().wait(TimelineValue(1), Duration::ZERO).unwrap_err();
    assert!(matches!(&error, Error::Internal { detail } if detail.contains("compute plug-in `liar`")));
    assert!(open(40).unwrap().counters().is_empty());
}
