//! The macros that a plug-in crate calls.

/// Exports a module through both doors of the boundary: once per library.
///
/// The kind is `compute`, `storage`, `cache` or `planner`; the expression makes the module (a value of a type that
/// implements `ComputeModule` and so on), and is evaluated once, at the first call.
#[macro_export]
macro_rules! export_plugin {
    (compute: $module:expr $(,)?) => {
        $crate::export_plugin!(@export compute, ComputeModule, ComputeTable, ComputeTableRef, COMPUTE, $module);
    };
    (storage: $module:expr $(,)?) => {
        $crate::export_plugin!(@export storage, StorageModule, StorageTable, StorageTableRef, STORAGE, $module);
    };
    (cache: $module:expr $(,)?) => {
        $crate::export_plugin!(@export cache, CacheModule, CacheTable, CacheTableRef, CACHE, $module);
    };
    (planner: $module:expr $(,)?) => {
        $crate::export_plugin!(@export planner, PlannerModule, PlannerTable, PlannerTableRef, PLANNER, $module);
    };
    (@export $kind:ident, $module_trait:ident, $table:ident, $table_ref:ident, $code:ident, $module:expr) => {
        const _: () = {
            use $crate::private::abi_stable::library::{
                __call_root_module_loader, CheckTypeLayout, LibHeader, RootModuleResult,
            };
            use $crate::private::abi_stable::prefix_type::{PrefixTypeTrait as _, WithMetadata};
            use $crate::private::engine_abi::{Head, Kind, PluginModule, PluginModuleRef, $table, $table_ref};
            use $crate::private::engine_core::module::$module_trait;

            struct Exported;

            impl $crate::$kind::Export for Exported {
                fn module() -> &'static dyn $module_trait {
                    static MODULE: ::std::sync::OnceLock<::std::boxed::Box<dyn $module_trait>> =
                        ::std::sync::OnceLock::new();
                    MODULE.get_or_init(|| ::std::boxed::Box::new($module)).as_ref()
                }
            }

            const TABLE: &WithMetadata<$table> = &WithMetadata::new($crate::$kind::table::<Exported>());

            /// The second door.
            #[unsafe(no_mangle)]
            pub extern "C" fn thermocline_plugin() -> *const Head {
                ::std::ptr::from_ref(&TABLE.value).cast::<Head>()
            }

            fn root_module() -> PluginModuleRef {
                #[allow(clippy::needless_update, reason = "one of four tables is set")]
                PluginModule {
                    kind: Kind::$code,
                    $kind: ::std::option::Option::Some($table_ref(TABLE.static_as_prefix())),
                    ..PluginModule::EMPTY
                }
                .leak_into_prefix()
            }

            extern "C" fn erased_root_module() -> RootModuleResult {
                __call_root_module_loader(root_module)
            }

            /// The first door.
            #[unsafe(export_name = "_1as_0lib_1header_0root_bmodule_bloader")]
            pub static ROOT_MODULE: LibHeader =
                // SAFETY: the function makes a module of the type named here.
                unsafe { LibHeader::from_constructor::<PluginModuleRef>(erased_root_module, CheckTypeLayout::Yes) };
        };
    };
}

/// A [`PluginInfo`](engine_core::module::PluginInfo) with this name and sentence; version, vendor and license are those
/// of the calling package's manifest.
#[macro_export]
macro_rules! info {
    ($name:expr, $description:expr $(,)?) => {
        $crate::private::engine_core::module::PluginInfo {
            name: ::std::convert::Into::into($name),
            version: ::std::convert::Into::into(::std::env!("CARGO_PKG_VERSION")),
            vendor: ::std::convert::Into::into(match ::std::env!("CARGO_PKG_AUTHORS") {
                "" => ::std::env!("CARGO_PKG_NAME"),
                authors => authors,
            }),
            license: ::std::convert::Into::into(::std::env!("CARGO_PKG_LICENSE")),
            description: ::std::convert::Into::into($description),
            build: ::std::format!(
                "{} {}, {}",
                ::std::env::consts::ARCH,
                ::std::env::consts::OS,
                if ::std::cfg!(debug_assertions) { "debug" } else { "release" },
            ),
        }
    };
}
