//! Opens a library and takes its table through one of the two doors, after all checks.

use abi_stable::abi_stability::abi_checking::check_layout_compatibility;
use abi_stable::library::{AbiHeaderRef, LibHeader, LibraryError, RootModule};
use abi_stable::type_layout::TypeLayout;
use engine_abi::convert::{TextBuffer, check_status};
use engine_abi::{
    ABI_MAJOR, ABI_MINOR, CacheTable, ComputeTable, Head, Kind, MAGIC, PlannerTable, PluginModuleRef,
    ROOT_MODULE_SYMBOL, SYMBOL, Sink, Status, StorageTable,
};
use engine_core::module::PluginKind;
use engine_core::{Error, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::fmt;
use std::path::Path;

/// How a plug-in's table was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Door {
    /// abi_stable's root module, layout checked.
    RootModule,
    /// The C function, checked by version and size.
    CSymbol,
    /// Linked into this program.
    Linked,
}

impl fmt::Display for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Door::RootModule => "abi_stable root module",
            Door::CSymbol => "C symbol",
            Door::Linked => "linked in",
        })
    }
}

/// A table of one of the four kinds; every function of version 1.0 is there.
#[derive(Clone, Copy)]
pub(crate) enum Table {
    Compute(ComputeTable),
    Storage(StorageTable),
    Cache(CacheTable),
    Planner(PlannerTable),
}

/// A library that passed all checks.
pub(crate) struct Loaded {
    pub(crate) table: Table,
    pub(crate) head: Head,
    pub(crate) door: Door,
}

/// Functions that every kind has.
macro_rules! common {
    ($table:expr, $name:ident) => {
        match $table {
            Table::Compute(table) => table.$name,
            Table::Storage(table) => table.$name,
            Table::Cache(table) => table.$name,
            Table::Planner(table) => table.$name,
        }
    };
}

impl Loaded {
    pub(crate) fn kind(&self) -> PluginKind {
        match self.table {
            Table::Compute(_) => PluginKind::Compute,
            Table::Storage(_) => PluginKind::Storage,
            Table::Cache(_) => PluginKind::Cache,
            Table::Planner(_) => PluginKind::Planner,
        }
    }

    /// The plug-in's info, as it wrote it.
    pub(crate) fn info_json(&self) -> Result<String> {
        text(common!(self.table, info))
    }

    /// The plug-in's schema, as it wrote it.
    pub(crate) fn schema_json(&self) -> Result<String> {
        text(common!(self.table, schema))
    }
}

/// Calls a function that writes one text.
fn text(function: Option<unsafe extern "C" fn(Sink, Sink) -> Status>) -> Result<String> {
    let function = function.ok_or_else(|| Error::internal("a function of its table is absent"))?;
    let (mut out, mut detail) = (TextBuffer::new(), TextBuffer::new());
    // SAFETY: the table passed all checks; the sinks live until the call returns.
    let status = unsafe { function(out.sink(), detail.sink()) };
    check_status(status, detail)?;
    out.into_text()
}

/// Opens the library at a canonical path. It stays loaded for ever: threads, thread-local destructors and constants
/// of it may be in use.
///
/// # Errors
/// One sentence that begins with a verb: "is ...", "has ...".
pub(crate) fn open(path: &Path) -> std::result::Result<Loaded, String> {
    crate::elf::check(path)?;
    // SAFETY: the library's constructors run; a child process has tried that before this process does.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|error| format!("is refused by the dynamic linker: {}", chain(&error)))?;
    let loaded = through_doors(&library);
    std::mem::forget(library);
    loaded
}

fn chain(error: &dyn std::error::Error) -> String {
    // libloading says only "dlopen failed" itself; the linker's words are the source.
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

type CSymbol = unsafe extern "C" fn() -> *const Head;

fn through_doors(library: &Library) -> std::result::Result<Loaded, String> {
    // SAFETY: the symbol's name is abi_stable's own, and its first bytes are checked before anything else is read.
    let root = unsafe { library.get::<AbiHeaderRef>(ROOT_MODULE_SYMBOL.as_bytes()) };
    // SAFETY: the symbol's name is ours; what it returns is checked.
    let symbol = unsafe { library.get::<CSymbol>(SYMBOL.as_bytes()) };
    match (root, symbol) {
        (Ok(root), symbol) => match (*root).upgrade() {
            Ok(header) => through_root_module(header),
            // Another abi_stable: the C door is still there, and does not depend on it.
            Err(LibraryError::InvalidAbiHeader(_)) if symbol.is_ok() => {
                symbol.map_err(|error| chain(&error)).and_then(|symbol| through_symbol(*symbol))
            }
            Err(error) => Err(format!("is built with another abi_stable: {}", condense(&error.to_string()))),
        },
        (Err(_), Ok(symbol)) => through_symbol(*symbol),
        (Err(_), Err(_)) => Err(format!(
            "is no Thermocline plug-in: it exports neither `{SYMBOL}` nor an abi_stable root module"
        )),
    }
}

fn through_root_module(header: &'static LibHeader) -> std::result::Result<Loaded, String> {
    let versions = (header.version_strings(), PluginModuleRef::VERSION_STRINGS);
    let named = |what: &str| {
        format!(
            "{what}: it is built for interface {}, this program has {}",
            versions.0.version, versions.1.version
        )
    };
    let Some(layout) = header.layout() else {
        return Err(named("has no layout to check"));
    };
    let Some(host) = PluginModuleRef::CONSTANTS.layout().into_option() else {
        return Err(named("cannot be checked"));
    };
    let difference = compatible(host, layout);
    let module = if difference.is_none() {
        // SAFETY: the layouts are compatible.
        unsafe { header.init_root_module_with_unchecked_layout::<PluginModuleRef>() }
    } else {
        match header.init_root_module::<PluginModuleRef>() {
            Err(error @ LibraryError::IncompatibleVersionNumber { .. }) => Err(error),
            _ => {
                let differences = difference.unwrap_or_default();
                return Err(format!("{} ({})", named("has another layout"), condense(&differences)));
            }
        }
    };
    let module = module.map_err(|error| match error {
        LibraryError::IncompatibleVersionNumber { .. } => named("has another version"),
        LibraryError::RootModule { .. } => "panicked while making its root module".into(),
        other => condense(&other.to_string()),
    })?;
    let missing = || format!("says that its kind is {}, but has no such table", module.kind().0);
    let table = match module.kind() {
        Kind::COMPUTE => Table::Compute(copy_compute(module.compute().ok_or_else(missing)?)),
        Kind::STORAGE => Table::Storage(copy_storage(module.storage().ok_or_else(missing)?)),
        Kind::CACHE => Table::Cache(copy_cache(module.cache().ok_or_else(missing)?)),
        Kind::PLANNER => Table::Planner(copy_planner(module.planner().ok_or_else(missing)?)),
        Kind(other) => return Err(unknown_kind(other)),
    };
    finish(table, Door::RootModule)
}

/// What differs between two layouts such that neither is a later version of the other.
fn compatible(host: &'static TypeLayout, plugin: &'static TypeLayout) -> Option<String> {
    // abi_stable accepts a library that has more than its user knows, not one that has less; both are fine here.
    let difference = check_layout_compatibility(host, plugin).err()?;
    check_layout_compatibility(plugin, host).err().map(|_| difference.to_string())
}

/// Copies a table through the accessors, which know what a shorter one lacks.
macro_rules! copies {
    ($($copy:ident: $reference:ident => $table:ident { $($field:ident),* $(,)? })*) => {
        $(
            fn $copy(table: engine_abi::$reference) -> $table {
                $table { $($field: table.$field()),* }
            }

            impl Complete for $table {
                fn absent(&self) -> Option<&'static str> {
                    let _ = self.head;
                    absent!(self, $($field),*)
                }
            }
        )*
    };
}

/// The first function that is absent; the head is no function.
macro_rules! absent {
    ($table:expr, head $(, $field:ident)*) => {{
        $(if $table.$field.is_none() { return Some(stringify!($field)); })*
        None
    }};
}

trait Complete {
    fn absent(&self) -> Option<&'static str>;
}

copies! {
    copy_compute: ComputeTableRef => ComputeTable {
        head, info, schema, devices, why_none, open, close, describe, supports, allocate, import, free, prepare,
        release, submit, wait, counters,
    }
    copy_storage: StorageTableRef => StorageTable {
        head, info, schema, open, close, describe, open_file, file_len, close_file, resident, read, wait, cancel,
        counters,
    }
    copy_cache: CacheTableRef => CacheTable { head, info, schema, open, close, configure, step }
    copy_planner: PlannerTableRef => PlannerTable { head, info, schema, open, close, plan }
}

fn unknown_kind(code: u32) -> String {
    format!("is of kind {code}, which this program does not know")
}

/// The checks that both doors share, after those of the door.
fn finish(table: Table, door: Door) -> std::result::Result<Loaded, String> {
    let (head, kind, absent) = match &table {
        Table::Compute(t) => (t.head, Kind::COMPUTE, t.absent()),
        Table::Storage(t) => (t.head, Kind::STORAGE, t.absent()),
        Table::Cache(t) => (t.head, Kind::CACHE, t.absent()),
        Table::Planner(t) => (t.head, Kind::PLANNER, t.absent()),
    };
    check_head(&head, kind, size_1_0(kind))?;
    match absent {
        Some(name) => Err(format!("lacks the function `{name}` of its table")),
        None => Ok(Loaded { table, head, door }),
    }
}

fn check_head(head: &Head, kind: Kind, size: usize) -> std::result::Result<(), String> {
    if head.magic != MAGIC {
        return Err(format!("has a table with magic {:#018x}, wanted {MAGIC:#018x}", head.magic));
    }
    if head.abi_major != ABI_MAJOR {
        return Err(format!(
            "is built for interface {}.{}, this program has {ABI_MAJOR}.{ABI_MINOR}",
            head.abi_major, head.abi_minor
        ));
    }
    if head.kind != kind {
        return Err(unknown_kind(head.kind.0));
    }
    if head.reserved != [0; 4] {
        return Err("says something in its table's reserved words that this program does not know".into());
    }
    // All functions of 1.0 are required; those of later minor versions are not.
    if (head.struct_size as usize) < size {
        return Err(format!("has a table of {} bytes, interface 1.0 has {size}", head.struct_size));
    }
    Ok(())
}

fn through_symbol(symbol: CSymbol) -> std::result::Result<Loaded, String> {
    // SAFETY: the function takes nothing and returns a pointer, by the interface's first promise.
    let head = unsafe { symbol() };
    if head.is_null() || !head.is_aligned() {
        return Err(format!("returned a null or misaligned table from `{SYMBOL}`"));
    }
    // SAFETY: not null, aligned, and a head is what every version of the interface starts with.
    let found = unsafe { head.read() };
    let table = match found.kind {
        // SAFETY: `read_table` checks the head first, so the table is as long as it says.
        Kind::COMPUTE => Table::Compute(unsafe { read_table(head, Kind::COMPUTE) }?),
        // SAFETY: as above.
        Kind::STORAGE => Table::Storage(unsafe { read_table(head, Kind::STORAGE) }?),
        // SAFETY: as above.
        Kind::CACHE => Table::Cache(unsafe { read_table(head, Kind::CACHE) }?),
        // SAFETY: as above.
        Kind::PLANNER => Table::Planner(unsafe { read_table(head, Kind::PLANNER) }?),
        Kind(other) => {
            check_head(&found, found.kind, 0)?;
            return Err(unknown_kind(other));
        }
    };
    finish(table, Door::CSymbol)
}

/// Reads a table of type `T`. Functions beyond the end of a shorter table, of an older minor version, are null.
///
/// # Safety
/// `head` leads to a table that is as long as its head says, and `T` is a table: a head followed by functions that may
/// be null.
unsafe fn read_table<T: Copy>(head: *const Head, kind: Kind) -> std::result::Result<T, String> {
    // SAFETY: the caller's promise.
    let found = unsafe { head.read() };
    check_head(&found, kind, size_1_0(kind))?;
    let mut table = std::mem::MaybeUninit::<T>::zeroed();
    let len = (found.struct_size as usize).min(size_of::<T>());
    // SAFETY: both sides are at least `len` bytes long, and apart.
    unsafe { std::ptr::copy_nonoverlapping(head.cast::<u8>(), table.as_mut_ptr().cast::<u8>(), len) };
    // SAFETY: zeros are null functions, and the rest came from such a table.
    Ok(unsafe { table.assume_init() })
}

/// Bytes of a table of version 1.0.
fn size_1_0(kind: Kind) -> usize {
    let functions = match kind {
        Kind::COMPUTE => 16,
        Kind::STORAGE => 13,
        Kind::CACHE => 6,
        Kind::PLANNER => 5,
        _ => 0,
    };
    size_of::<Head>() + functions * size_of::<usize>()
}

/// abi_stable's errors run to tens of kilobytes; what counts are the lines that say what was expected and found.
fn condense(text: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let mut lines = text.lines().map(str::trim);
    while let Some(line) = lines.next() {
        if line.starts_with("Error:") && kept.len() < 6 {
            kept.push(line);
            kept.extend(lines.by_ref().take(5).filter(|l| !l.is_empty()).take(5));
        }
    }
    let joined = if kept.is_empty() { text.trim().to_owned() } else { kept.join(" ") };
    let joined = joined.split_whitespace().collect::<Vec<_>>().join(" ");
    match joined.char_indices().nth(400) {
        Some((end, _)) => format!("{}...", &joined[..end]),
        None => joined,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_this_version_are_those_of_1_0() {
        let sizes = [
            (Kind::COMPUTE, size_of::<ComputeTable>()),
            (Kind::STORAGE, size_of::<StorageTable>()),
            (Kind::CACHE, size_of::<CacheTable>()),
            (Kind::PLANNER, size_of::<PlannerTable>()),
        ];
        for (kind, size) in sizes {
            // When a table grows, the number in `size_1_0` stays, and this becomes "less than".
            assert_eq!(size_1_0(kind), size);
        }
    }

    #[test]
    fn functions_beyond_an_older_table_are_absent() {
        /// A planner table as a host of a later minor version has it.
        #[repr(C)]
        #[derive(Clone, Copy)]
        struct Later {
            table: PlannerTable,
            added: Option<unsafe extern "C" fn(u32) -> u32>,
        }
        unsafe extern "C" fn info(_: Sink, _: Sink) -> Status {
            Status::OK
        }
        unsafe extern "C" fn added(x: u32) -> u32 {
            x + 1
        }
        let older = PlannerTable {
            head: Head {
                magic: MAGIC,
                struct_size: size_of::<PlannerTable>() as u32,
                kind: Kind::PLANNER,
                abi_major: ABI_MAJOR,
                abi_minor: 0,
                reserved: [0; 4],
            },
            info: Some(info),
            schema: Some(info),
            open: None,
            close: None,
            plan: None,
        };
        let head = std::ptr::from_ref(&older).cast::<Head>();
        // SAFETY: the table is as long as it says.
        let read = unsafe { read_table::<Later>(head, Kind::PLANNER) }.unwrap();
        assert!(read.added.is_none() && read.table.info.is_some() && read.table.open.is_none());

        let mut newer = Later { table: older, added: Some(added) };
        newer.table.head.struct_size = size_of::<Later>() as u32;
        newer.table.head.abi_minor = 7;
        let head = std::ptr::from_ref(&newer).cast::<Head>();
        // SAFETY: as above.
        assert!(unsafe { read_table::<Later>(head, Kind::PLANNER) }.unwrap().added.is_some());
        // SAFETY: as above.
        assert!(unsafe { read_table::<PlannerTable>(head, Kind::PLANNER) }.unwrap().info.is_some());

        newer.table.head.struct_size = size_of::<Head>() as u32;
        let head = std::ptr::from_ref(&newer).cast::<Head>();
        // SAFETY: the head alone is read.
        let error = unsafe { read_table::<PlannerTable>(head, Kind::PLANNER) }.err().unwrap();
        assert!(error.contains("interface 1.0 has"), "{error}");
    }

    /// The module of a host of a later minor version: what 1.0 has, and a kind at the end.
    mod later {
        #![allow(non_local_definitions, dead_code, reason = "abi_stable's derive; only layouts are compared")]

        use engine_abi::{CacheTableRef, ComputeTableRef, Kind, PlannerTableRef, StorageTableRef};

        /// abi_stable's derive notes the package that it is compiled in; this stands for a later engine-abi.
        macro_rules! env {
            ("CARGO_PKG_NAME") => {
                "engine-abi"
            };
            ("CARGO_PKG_VERSION") => {
                "1.1.0"
            };
        }

        macro_rules! module {
            ($name:ident { $kind:ty $(, $added:ident)* }) => {
                pub(super) mod $name {
                    use super::*;

                    #[repr(C)]
                    #[derive(abi_stable::StableAbi)]
                    #[sabi(kind(Prefix(prefix_ref = PluginModuleRef)))]
                    #[sabi(missing_field(option))]
                    pub(in super::super) struct PluginModule {
                        kind: $kind,
                        compute: Option<ComputeTableRef>,
                        storage: Option<StorageTableRef>,
                        cache: Option<CacheTableRef>,
                        #[sabi(last_prefix_field)]
                        planner: Option<PlannerTableRef>,
                        $($added: Option<PlannerTableRef>,)*
                    }
                }
            };
        }
        module!(longer { Kind, codec });
        module!(other { u64, codec });
    }

    /// The library has the layout that every Rust plug-in of this version has. (That of a newer library in this host is
    /// tested with a whole one, in `tests/loader/versions.rs`.)
    #[test]
    fn an_older_library_suits_a_newer_host() {
        use abi_stable::StableAbi;
        let library = PluginModuleRef::LAYOUT;
        let host = later::longer::PluginModuleRef::LAYOUT;
        assert!(check_layout_compatibility(host, library).is_err(), "abi_stable alone refuses it");
        assert_eq!(compatible(host, library), None);
        assert_eq!(compatible(library, host), None);
        assert_eq!(compatible(library, library), None);
        let other = later::other::PluginModuleRef::LAYOUT;
        for (host, library) in [(other, library), (library, other)] {
            let difference = compatible(host, library).expect("another layout");
            assert!(difference.contains("mismatched type"), "{difference}");
            assert!(!difference.contains("mismatched package"), "{difference}");
        }
    }

    #[test]
    fn long_errors_are_condensed() {
        let long = format!("x\n  Error: mismatched\n expected: a\n found: b\n{}", "noise\n".repeat(1000));
        assert!(condense(&long).starts_with("Error: mismatched expected: a found: b"));
        assert!(condense(&"word ".repeat(1000)).len() < 500);
    }
}
