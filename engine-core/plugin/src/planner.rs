//! The planner table over a [`PlannerModule`].

use crate::boundary::{self, guarded};
use engine_abi::convert::{self, request_from_json, text_from_abi, write};
use engine_abi::{Bytes, Instance, Kind, PlannerTable, Sink, Status};
use engine_core::module::PlannerModule;
use engine_core::planner::Planner;

/// Where [`table`] finds the author's module.
pub trait Export {
    /// The module.
    fn module() -> &'static dyn PlannerModule;
}

struct Placer(Box<dyn Planner>);

/// The table of the module.
pub const fn table<E: Export>() -> PlannerTable {
    PlannerTable {
        head: boundary::head::<PlannerTable>(Kind::PLANNER),
        info: Some(info::<E>),
        schema: Some(schema::<E>),
        open: Some(open::<E>),
        close: Some(close),
        plan: Some(plan),
    }
}

// SAFETY of the functions below: the host keeps the rules of engine-abi's documentation: sinks and pointers are live
// for the call, instances come from `open` and are not used after `close`.

unsafe extern "C" fn info<E: Export>(out: Sink, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            write(out, &convert::info_to_json(&E::module().info()));
            Ok(())
        })
    }
}

unsafe extern "C" fn schema<E: Export>(out: Sink, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            write(out, &E::module().schema().to_json());
            Ok(())
        })
    }
}

unsafe extern "C" fn open<E: Export>(options: Bytes, out: *mut *mut Instance, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let options = boundary::options(options)?;
            boundary::open(out, || Ok(Placer(E::module().open(&options)?)))
        })
    }
}

unsafe extern "C" fn close(instance: *mut Instance) {
    // SAFETY: see above.
    unsafe { boundary::close::<Placer>(instance) }
}

unsafe extern "C" fn plan(instance: *mut Instance, request: Bytes, out: Sink, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let planner = boundary::instance::<Placer>(instance)?;
            let (model, hardware, budget) = request_from_json(text_from_abi(request, "request")?)?;
            let plan = planner.0.plan(&model, &hardware, &budget)?;
            write(out, &plan.to_json());
            Ok(())
        })
    }
}
