//! The first door: abi_stable's root module.

use crate::{CacheTableRef, ComputeTableRef, Kind, PlannerTableRef, StorageTableRef};
use abi_stable::StableAbi;
use abi_stable::library::RootModule;
use abi_stable::package_version_strings;
use abi_stable::sabi_types::VersionStrings;

/// What a plug-in written in Rust exports: its kind, and the table of that kind.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
#[sabi(kind(Prefix(prefix_ref = PluginModuleRef)))]
#[sabi(missing_field(option))]
pub struct PluginModule {
    /// Which of the tables is there.
    pub kind: Kind,
    /// For compute devices.
    pub compute: Option<ComputeTableRef>,
    /// For a storage tier.
    pub storage: Option<StorageTableRef>,
    /// For a cache policy.
    pub cache: Option<CacheTableRef>,
    /// For a planner.
    #[sabi(last_prefix_field)]
    pub planner: Option<PlannerTableRef>,
}

impl PluginModule {
    /// A module without tables, to be completed with the one that there is.
    pub const EMPTY: PluginModule =
        PluginModule { kind: Kind(0), compute: None, storage: None, cache: None, planner: None };
}

impl RootModule for PluginModuleRef {
    abi_stable::declare_root_module_statics! {PluginModuleRef}

    const BASE_NAME: &'static str = "thermocline";
    const NAME: &'static str = "thermocline";
    const VERSION_STRINGS: VersionStrings = package_version_strings!();
}

/// Name of the symbol of the first door, as abi_stable 0.11 spells it.
pub const ROOT_MODULE_SYMBOL: &str = "_1as_0lib_1header_0root_bmodule_bloader";
