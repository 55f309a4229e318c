//! Rules for single source files: a first line that says what the file is for, its size, where `unsafe` may stand.

use super::rust_text::{code_only, has_word};
use std::path::Path;

/// Places that may hold `unsafe`, and why; a trailing `/` covers everything below.
const UNSAFE_PLACES: &[(&str, &str)] = &[
    ("backends/", "kernels, devices, mappings"),
    ("engine-core/abi/", "the C table"),
    ("engine-core/plugin/", "the C table, the author's side"),
    ("engine-core/loader/", "the C table, the host's side; loading libraries"),
    ("engine-core/src/host.rs", "host memory shared with devices"),
    ("engine-core/runtime/src/host_binding.rs", "lends host memory to submissions"),
    ("formats/src/gguf/mapping.rs", "maps a file"),
    (
        "formats/tests/formats/allocations.rs",
        "an allocator that counts, to show that lengths are checked first",
    ),
    ("conformance/", "guard regions and unmapped rows around a device's memory; plug-ins that misbehave"),
];

/// Files that may be longer than [`LONGEST`] lines, and why.
const LONG_FILES: &[(&str, &str)] = &[];

/// Past this a file holds a second idea.
const LONGEST: usize = 600;

/// Names that a policy must not use: its decisions are pure.
const IMPURE: &[&str] =
    &["std::fs", "std::net", "std::io", "std::env", "std::process", "std::time", "std::thread"];

/// Endings of files that people read and edit.
const TEXT: &[&str] = &[".rs", ".md", ".toml", ".py", ".sh", ".yml", ".h", ".ci/run"];

/// Checks every source file.
pub(super) fn check(root: &Path, files: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    let mut crates_with_unsafe = Vec::new();
    for file in files.iter().filter(|f| TEXT.iter().any(|ending| f.ends_with(ending))) {
        let Ok(text) = std::fs::read_to_string(root.join(file)) else {
            found.push(format!("{file}: no UTF-8 text"));
            continue;
        };
        found.extend(whitespace(file, &text));
        if file.ends_with(".rs") {
            let code = code_only(&text);
            found.extend(rust(file, &text, &code));
            // What the macro expands to exports a C symbol, which counts as unsafe code too.
            if has_word(&code, "unsafe") || has_word(&code, "export_plugin") {
                crates_with_unsafe.push(crate_folder(file).to_owned());
            }
        }
    }
    for file in files.iter().filter(|f| f.ends_with("/src/lib.rs") || f.ends_with("/src/main.rs")) {
        let Ok(text) = std::fs::read_to_string(root.join(file)) else { continue };
        let folder = crate_folder(file);
        if !crates_with_unsafe.iter().any(|c| c == folder) && !text.contains("#![forbid(unsafe_code)]") {
            found.push(format!("{file}: the crate has no unsafe code; say so with #![forbid(unsafe_code)]"));
        }
    }
    found
}

fn crate_folder(file: &str) -> &str {
    ["/src/", "/tests/", "/benches/", "/examples/"]
        .iter()
        .filter_map(|part| file.find(part))
        .min()
        .map_or(file, |at| &file[..at])
}

fn whitespace(file: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if line.contains('\t') {
            found.push(format!("{file}:{}: a tab", at + 1));
        }
        if line.ends_with([' ', '\r']) {
            found.push(format!("{file}:{}: space at the end of the line", at + 1));
        }
    }
    if !text.is_empty() && !text.ends_with('\n') {
        found.push(format!("{file}: no newline at the end"));
    }
    found
}

fn rust(file: &str, text: &str, code: &str) -> Vec<String> {
    let mut found = Vec::new();
    if !text.lines().next().is_some_and(|line| line.len() > 8 && line.starts_with("//! ")) {
        found.push(format!("{file}:1: the first line must say what the file is for: `//! ...`"));
    }
    let lines = text.lines().count();
    if lines > LONGEST && !LONG_FILES.iter().any(|(long, _)| long == &file) {
        found.push(format!("{file}: {lines} lines, more than {LONGEST}; look for the second idea in it"));
    }
    let may_be_unsafe = UNSAFE_PLACES
        .iter()
        .any(|(place, _)| if place.ends_with('/') { file.starts_with(place) } else { file == *place });
    if !may_be_unsafe && has_word(code, "unsafe") {
        found.push(format!("{file}: `unsafe` outside the places listed in xtask/src/tidy/sources.rs"));
    }
    if file.starts_with("planners/") {
        // Constants of the target are no look at the environment.
        let code = code.replace("std::env::consts", "");
        let grouped = from_std(&code);
        let names = IMPURE.iter().filter(|name| has_word(&code, name) || grouped.iter().any(|g| g == *name));
        found.extend(
            names.map(|name| format!("{file}: a policy must not use {name}: its decisions are pure")),
        );
    }
    found
}

/// What `use std::{...}` brings in, a level deep: `std::fs` of `use std::{collections::HashMap, fs}`.
fn from_std(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("std::") {
        let rest = code[at + "std::".len()..].trim_start();
        let Some(group) = rest.strip_prefix('{') else { continue };
        let (mut depth, mut name) = (0, String::new());
        for c in group.chars() {
            match c {
                '}' if depth == 0 => break,
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => found.push(std::mem::take(&mut name)),
                c if depth == 0 => name.push(c),
                _ => {}
            }
        }
        found.push(name);
    }
    let first = |name: &String| {
        name.trim().split(|c: char| c != '_' && !c.is_alphanumeric()).next().map(str::to_owned)
    };
    found.iter().filter_map(first).map(|name| format!("std::{name}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_bite() {
        let check = |file: &str, text: &str| {
            let mut found = whitespace(file, text);
            found.extend(rust(file, text, &code_only(text)));
            found.join("\n")
        };
        assert_eq!(check("formats/src/a.rs", "//! Reads a thing.\nfn f() {}\n"), "");
        assert!(check("formats/src/a.rs", "fn f() {}\n").contains("what the file is for"));
        assert!(
            check("formats/src/a.rs", "//! Reads a thing.\nunsafe fn f() {}\n").contains("`unsafe` outside")
        );
        assert_eq!(check("backends/compute/cpu/src/a.rs", "//! Reads a thing.\nunsafe fn f() {}\n"), "");
        assert!(
            check("planners/cache/lru/src/a.rs", "//! Decides a thing.\nuse std::fs;\n").contains("std::fs")
        );
        for uses in [
            "use std::{fs, io};",
            "use std::{collections::{BTreeMap, BTreeSet}, time::Instant};",
            "use ::std::{\n    cmp,\n    thread as t,\n};",
            "fn f() { std::process::exit(1) }",
        ] {
            let text = format!("//! Decides a thing.\n{uses}\n");
            assert!(check("planners/cache/lru/src/a.rs", &text).contains("a policy must not use"), "{uses}");
        }
        let pure = "//! Decides a thing.\nuse std::{cmp, collections::{fs, BTreeMap}, fmt};\n";
        assert_eq!(check("planners/cache/lru/src/a.rs", pure), "");
        assert!(check("a.md", "//! A line. \n").contains("space at the end"));
        assert!(check("a.md", "//! A\tline.\n").contains("a tab"));
        let long = "//! A long one.\n".to_owned() + &"\n".repeat(LONGEST);
        assert!(check("formats/src/a.rs", &long).contains("second idea"));
    }
}
