//! The C header: made from the crate's own types, current, and fit for C11 and C++17.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

fn generate() -> String {
    let config = cbindgen::Config::from_file(root().join("cbindgen.toml")).expect("cbindgen.toml");
    // File by file, in the order of reading: no other crate is looked at, and no cargo is run.
    let sources = ["lib", "codes", "data", "operation", "bindings", "tables"];
    let builder = sources.iter().fold(cbindgen::Builder::new().with_config(config), |builder, name| {
        builder.with_src(root().join(format!("src/{name}.rs")))
    });
    let mut header = Vec::new();
    builder.generate().expect("cbindgen").write(&mut header);
    let header = String::from_utf8(header).expect("UTF-8");
    let lines: Vec<String> = header.lines().map(|line| without_links(line.trim_end())).collect();
    format!("{}\n", lines.join("\n").trim_end())
}

/// Links and escapes of doc comments mean something in Rust only.
fn without_links(line: &str) -> String {
    let mut text = line.replace("\\[", "\u{1}").replace("\\]", "\u{2}");
    while let Some(start) = text.find("[`") {
        let Some(end) = text[start..].find("`]").map(|end| start + end + 1) else { break };
        let target = match text[end + 1..].strip_prefix('(').and_then(|rest| rest.find(')')) {
            Some(close) => end + 1 + close + 2,
            None => end + 1,
        };
        text = format!("{}{}{}", &text[..start], &text[start + 1..end], &text[target..]);
    }
    text.replace('\u{1}', "[").replace('\u{2}', "]")
}

#[test]
fn header_is_current() {
    let path = root().join("include/thermocline_plugin.h");
    let header = generate();
    if std::env::var_os("THERMOCLINE_WRITE_HEADER").is_some() {
        std::fs::write(&path, &header).expect("the header can be written");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == header,
        "{} is not what the crate says; run THERMOCLINE_WRITE_HEADER=1 cargo test -p engine-abi header",
        path.display()
    );
}

#[test]
fn header_compiles_without_warnings() {
    for (compiler, standard, extension) in [("cc", "-std=c11", "c"), ("c++", "-std=c++17", "cpp")] {
        if Command::new(compiler).arg("--version").output().is_err() {
            // Past the test harness, which would keep it to itself.
            let _ = writeln!(std::io::stderr(), "skipped: no {compiler} here");
            continue;
        }
        let folder = std::env::temp_dir().join(format!("thermocline-header-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a temporary folder");
        let source = folder.join(format!("use.{extension}"));
        let sizes: String = sizes()
            .iter()
            .map(|(name, size)| {
                format!("extern char size_of_{name}[sizeof(Thermocline{name}) == {size} ? 1 : -1];\n")
            })
            .collect();
        let text = format!(
            "#include \"thermocline_plugin.h\"\n\
            static ThermoclineComputeTable table;\n\
            const ThermoclineHead *thermocline_plugin(void) {{ return &table.head; }}\n{sizes}"
        );
        std::fs::write(&source, text).expect("a source file");
        let output = Command::new(compiler)
            .args([standard, "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only", "-I"])
            .arg(root().join("include"))
            .arg(&source)
            .output()
            .expect("the compiler runs");
        let _ = std::fs::remove_dir_all(&folder);
        assert!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// C and Rust have to agree on every struct.
fn sizes() -> Vec<(&'static str, usize)> {
    macro_rules! sizes {
        ($($name:ident),* $(,)?) => { vec![$((stringify!($name), size_of::<engine_abi::$name>())),*] };
    }
    sizes![
        ActiveRanges,
        Binding,
        Bindings,
        BufferView,
        Bytes,
        CacheTable,
        ClusterRange,
        ComputeTable,
        Head,
        HostSpan,
        Miss,
        Operation,
        OperationList,
        PlannerTable,
        Read,
        Region,
        SequenceSpan,
        Sink,
        Slot,
        StorageTable,
        Unit,
        UnitSink,
    ]
}
