//! The cache table over a [`CacheModule`].

use crate::boundary::{self, guarded};
use engine_abi::convert::{self, slice, write, write_units};
use engine_abi::{Bytes, CacheTable, Instance, Kind, Miss, Region, Sink, Status, Unit, UnitSink};
use engine_core::cache::{self, CachePolicy};
use engine_core::module::CacheModule;
use engine_core::{Error, Result};
use std::sync::{Mutex, TryLockError};

/// Where [`table`] finds the author's module.
pub trait Export {
    /// The module.
    fn module() -> &'static dyn CacheModule;
}

/// A policy is called one call at a time; the lock turns a breach of that rule into an error.
struct Policy(Mutex<Box<dyn CachePolicy>>);

impl Policy {
    fn with<R>(&self, f: impl FnOnce(&mut dyn CachePolicy) -> Result<R>) -> Result<R> {
        match self.0.try_lock() {
            Ok(mut policy) => f(policy.as_mut()),
            Err(TryLockError::Poisoned(poisoned)) => f(poisoned.into_inner().as_mut()),
            Err(TryLockError::WouldBlock) => Err(Error::invalid("two calls to one cache policy at a time")),
        }
    }
}

/// The table of the module.
pub const fn table<E: Export>() -> CacheTable {
    CacheTable {
        head: boundary::head::<CacheTable>(Kind::CACHE),
        info: Some(info::<E>),
        schema: Some(schema::<E>),
        open: Some(open::<E>),
        close: Some(close),
        configure: Some(configure),
        step: Some(step),
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
            boundary::open(out, || Ok(Policy(Mutex::new(E::module().open(&options)?))))
        })
    }
}

unsafe extern "C" fn close(instance: *mut Instance) {
    // SAFETY: see above.
    unsafe { boundary::close::<Policy>(instance) }
}

unsafe extern "C" fn configure(
    instance: *mut Instance,
    regions: *const Region,
    regions_len: usize,
    detail: Sink,
) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let policy = boundary::instance::<Policy>(instance)?;
            let regions: Vec<cache::Region> =
                slice(regions, regions_len, "regions")?.iter().map(convert::region_from_abi).collect();
            policy.with(|policy| policy.configure(&regions))
        })
    }
}

unsafe extern "C" fn step(
    instance: *mut Instance,
    layer: u32,
    hits: *const Unit,
    hits_len: usize,
    misses: *const Miss,
    misses_len: usize,
    pinned: *const Unit,
    pinned_len: usize,
    admit: UnitSink,
    evict: UnitSink,
    detail: Sink,
) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let policy = boundary::instance::<Policy>(instance)?;
            let hits: Vec<cache::Unit> =
                slice(hits, hits_len, "hits")?.iter().map(convert::unit_from_abi).collect();
            let misses: Vec<cache::Miss> =
                slice(misses, misses_len, "misses")?.iter().map(convert::miss_from_abi).collect();
            let pinned: Vec<cache::Unit> =
                slice(pinned, pinned_len, "pinned")?.iter().map(convert::unit_from_abi).collect();
            let decision = policy.with(|policy| policy.step(layer, &hits, &misses, &pinned))?;
            write_units(admit, &decision.admit);
            write_units(evict, &decision.evict);
            Ok(())
        })
    }
}
