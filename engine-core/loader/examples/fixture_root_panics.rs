//! A library whose root module panics when it is asked for.

use abi_stable::library::{__call_root_module_loader, CheckTypeLayout, LibHeader, RootModuleResult};
use engine_abi::PluginModuleRef;

fn load() -> PluginModuleRef {
    panic!("no module today")
}

extern "C" fn erased() -> RootModuleResult {
    __call_root_module_loader(load)
}

/// The first door.
#[unsafe(export_name = "_1as_0lib_1header_0root_bmodule_bloader")]
pub static ROOT_MODULE: LibHeader =
    // SAFETY: the function makes a module of the type named here.
    unsafe { LibHeader::from_constructor::<PluginModuleRef>(erased, CheckTypeLayout::Yes) };
