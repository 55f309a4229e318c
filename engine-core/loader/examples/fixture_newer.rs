//! A cache plug-in built for a later minor version: its root module and its table have a field more than the host's.

#![allow(
    non_local_definitions,
    non_camel_case_types,
    dead_code,
    clippy::type_complexity,
    reason = "abi_stable's derive, and functions of C written out"
)]

use abi_stable::StableAbi;
use abi_stable::library::{
    __call_root_module_loader, CheckTypeLayout, LibHeader, RootModule, RootModuleResult,
};
use abi_stable::prefix_type::{PrefixTypeTrait, WithMetadata};
use abi_stable::sabi_types::VersionStrings;
use engine_abi::{
    Bytes, ComputeTableRef, Head, Instance, Kind, Miss, PlannerTableRef, Region, Sink, Status,
    StorageTableRef, Unit, UnitSink,
};
use engine_core::cache::{CachePolicy, Decision};
use engine_core::module::{CacheModule, Module, PluginInfo};
use engine_core::options::{OptionTable, Schema};
use engine_core::{Result, cache};

/// What abi_stable's derive writes into a layout is of the package that it is compiled in. These types stand for those
/// of a later engine-abi.
macro_rules! env {
    ("CARGO_PKG_NAME") => {
        "engine-abi"
    };
    ("CARGO_PKG_VERSION") => {
        "1.1.0"
    };
}

/// As in version 1.0, and a function at the end.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
#[sabi(kind(Prefix(prefix_ref = CacheTableRef)))]
#[sabi(missing_field(option))]
pub struct CacheTable {
    head: Head,
    info: Option<unsafe extern "C" fn(out: Sink, detail: Sink) -> Status>,
    schema: Option<unsafe extern "C" fn(out: Sink, detail: Sink) -> Status>,
    open: Option<unsafe extern "C" fn(options: Bytes, out: *mut *mut Instance, detail: Sink) -> Status>,
    close: Option<unsafe extern "C" fn(instance: *mut Instance)>,
    configure: Option<
        unsafe extern "C" fn(
            instance: *mut Instance,
            regions: *const Region,
            regions_len: usize,
            detail: Sink,
        ) -> Status,
    >,
    #[sabi(last_prefix_field)]
    step: Option<
        unsafe extern "C" fn(
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
        ) -> Status,
    >,
    forget: Option<unsafe extern "C" fn(instance: *mut Instance)>,
}

/// As in version 1.0, and a kind at the end.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
#[sabi(kind(Prefix(prefix_ref = PluginModuleRef)))]
#[sabi(missing_field(option))]
pub struct PluginModule {
    kind: Kind,
    compute: Option<ComputeTableRef>,
    storage: Option<StorageTableRef>,
    cache: Option<CacheTableRef>,
    #[sabi(last_prefix_field)]
    planner: Option<PlannerTableRef>,
    codec: Option<CacheTableRef>,
}

impl RootModule for PluginModuleRef {
    abi_stable::declare_root_module_statics! {PluginModuleRef}

    const BASE_NAME: &'static str = "thermocline";
    const NAME: &'static str = "thermocline";
    const VERSION_STRINGS: VersionStrings = VersionStrings::new("1.1.0");
}

struct Fixture;

impl Module for Fixture {
    fn info(&self) -> PluginInfo {
        engine_plugin::info!("newer", "Of a later version.")
    }
    fn schema(&self) -> Schema {
        Schema::default()
    }
}

impl CacheModule for Fixture {
    fn open(&self, _: &OptionTable) -> Result<Box<dyn CachePolicy>> {
        Ok(Box::new(Policy))
    }
}

/// Admits everything.
struct Policy;

impl CachePolicy for Policy {
    fn configure(&mut self, _: &[cache::Region]) -> Result<()> {
        Ok(())
    }
    fn step(
        &mut self,
        _: u32,
        _: &[cache::Unit],
        misses: &[cache::Miss],
        _: &[cache::Unit],
    ) -> Result<Decision> {
        Ok(Decision { admit: misses.iter().map(|miss| miss.unit).collect(), evict: Vec::new() })
    }
}

struct Exported;

impl engine_plugin::cache::Export for Exported {
    fn module() -> &'static dyn CacheModule {
        &Fixture
    }
}

unsafe extern "C" fn forget(_: *mut Instance) {}

const OLD: engine_abi::CacheTable = engine_plugin::cache::table::<Exported>();

const TABLE: &WithMetadata<CacheTable> = &WithMetadata::new(CacheTable {
    head: Head { struct_size: size_of::<CacheTable>() as u32, abi_minor: 1, ..OLD.head },
    info: OLD.info,
    schema: OLD.schema,
    open: OLD.open,
    close: OLD.close,
    configure: OLD.configure,
    step: OLD.step,
    forget: Some(forget),
});

fn load() -> PluginModuleRef {
    let table = Some(CacheTableRef(TABLE.static_as_prefix()));
    PluginModule {
        kind: Kind::CACHE,
        compute: None,
        storage: None,
        cache: table,
        planner: None,
        codec: table,
    }
    .leak_into_prefix()
}

extern "C" fn erased() -> RootModuleResult {
    __call_root_module_loader(load)
}

/// The first door, and the only one.
#[unsafe(export_name = "_1as_0lib_1header_0root_bmodule_bloader")]
pub static ROOT_MODULE: LibHeader =
    // SAFETY: the function makes a module of the type named here.
    unsafe { LibHeader::from_constructor::<PluginModuleRef>(erased, CheckTypeLayout::Yes) };
