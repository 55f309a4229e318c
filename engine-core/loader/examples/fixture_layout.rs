//! A library with an interface of version 1.0.0 whose layout is another.

#![allow(non_local_definitions, non_camel_case_types, reason = "abi_stable's derive")]

use abi_stable::StableAbi;
use abi_stable::library::{
    __call_root_module_loader, CheckTypeLayout, LibHeader, RootModule, RootModuleResult,
};
use abi_stable::prefix_type::PrefixTypeTrait;
use abi_stable::sabi_types::VersionStrings;

/// Named as the real one, with another field.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = PluginModuleRef)))]
#[sabi(missing_field(option))]
pub struct PluginModule {
    /// What it is.
    #[sabi(last_prefix_field)]
    pub kind: u64,
}

impl RootModule for PluginModuleRef {
    abi_stable::declare_root_module_statics! {PluginModuleRef}

    const BASE_NAME: &'static str = "thermocline";
    const NAME: &'static str = "thermocline";
    const VERSION_STRINGS: VersionStrings = VersionStrings::new("1.0.0");
}

fn load() -> PluginModuleRef {
    PluginModule { kind: 1 }.leak_into_prefix()
}

extern "C" fn erased() -> RootModuleResult {
    __call_root_module_loader(load)
}

/// The first door.
#[unsafe(export_name = "_1as_0lib_1header_0root_bmodule_bloader")]
pub static ROOT_MODULE: LibHeader =
    // SAFETY: the function makes a module of the type named here.
    unsafe { LibHeader::from_constructor::<PluginModuleRef>(erased, CheckTypeLayout::Yes) };
