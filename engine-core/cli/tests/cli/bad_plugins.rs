//! Plug-ins that are absent, damaged or something else, and devices that are not there.

use crate::Test;
use crate::program::{Outcome, command, command_of, executable, installed, model, plugin, run};
use serde_json::Value;
use std::path::Path;

pub(crate) fn tests() -> Vec<Test> {
    vec![
        ("must_show_3_without_the_cpu_plugin", must_show_3_without_the_cpu_plugin),
        ("must_show_5_bad_libraries", must_show_5_bad_libraries),
        ("plugins_list_and_inspect", plugins_list_and_inspect),
        ("plugins_doctor_lists_every_place", plugins_doctor_lists_every_place),
        ("plugins_are_listed_with_the_options_of_the_config", plugins_with_options_of_the_config),
        ("plugins_conformance", plugins_conformance),
        ("trap_23_found_from_anywhere", trap_23_found_from_anywhere),
        ("trap_23_nothing_found", trap_23_nothing_found),
        ("trap_24_one_bad_plugin_stops_no_other", trap_24_one_bad_plugin_stops_no_other),
        ("trap_24_two_of_one_name", trap_24_two_of_one_name),
        ("trap_25_absent_device", trap_25_absent_device),
        ("trap_25_devices_are_named_as_the_config_takes_them", trap_25_devices_are_named),
        ("devices_of_hybrids_are_those_of_the_run", devices_of_hybrids_are_those_of_the_run),
        ("wrong_plugin_names_and_options", wrong_plugin_names_and_options),
    ]
}

fn run_installed(program: &Path, more: &[&str]) -> Outcome {
    let model = model();
    Outcome::of(
        command_of(program).args(["run", "-m", &model, "-p", "Once", "-n", "1", "--temp", "0"]).args(more),
    )
}

fn must_show_3_without_the_cpu_plugin() {
    let folder = tempfile::tempdir().unwrap();
    let program = installed(folder.path(), |name| name != "libthermocline_compute_cpu.so");
    run_installed(&program, &[]).fails_with(&["cpu", "looked at:", folder.path().to_str().unwrap()]);
    let outcome = run_installed(&program, &["--device", "reference", "--json"]);
    assert_eq!(outcome.json()["plan"]["devices"], serde_json::json!(["reference"]));
}

/// Content for a library that is none.
fn bad_libraries(folder: &Path) -> Vec<(&'static str, std::path::PathBuf)> {
    let good = std::fs::read(plugin("compute_cpu")).unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let mut other_machine = good.clone();
    other_machine[18..20].copy_from_slice(&243u16.to_le_bytes()); // e_machine: RISC-V
    vec![
        ("text", write("libthermocline_compute_text.so", b"just text")),
        ("empty", write("libthermocline_compute_empty.so", b"")),
        ("cut", write("libthermocline_compute_cut.so", &good[..good.len() / 3])),
        ("machine", write("libthermocline_compute_machine.so", &other_machine)),
        ("zeros", write("libthermocline_compute_zeros.so", &[&good[..1000], &vec![0; 5000][..]].concat())),
    ]
}

fn must_show_5_bad_libraries() {
    let folder = tempfile::tempdir().unwrap();
    let model = model();
    for (name, path) in bad_libraries(folder.path()) {
        let flags = ["--plugin", path.to_str().unwrap(), "--device", name];
        let outcome = run(&[&["run", "-m", &model, "-p", "Once"][..], &flags].concat());
        outcome.fails_with(&[name, path.file_name().unwrap().to_str().unwrap()]);
        let inspected = run(&["plugins", "inspect", path.to_str().unwrap()]);
        inspected.fails_with(&[path.file_name().unwrap().to_str().unwrap()]);
    }
    let flags = ["--plugin", "/nonexistent/libx.so", "--device", "x"];
    run(&[&["run", "-m", &model, "-p", "Once"][..], &flags].concat()).fails_with(&["/nonexistent/libx.so"]);
}

fn list(more: &[&str]) -> Vec<Value> {
    let value = run(&[&["plugins", "list", "--json"][..], more].concat()).json();
    value["plugins"].as_array().unwrap().clone()
}

fn plugins_list_and_inspect() {
    let plugins = list(&[]);
    for (kind, name) in [
        ("compute", "cpu"),
        ("compute", "reference"),
        ("storage", "ram"),
        ("storage", "mmap"),
        ("cache", "lru"),
        ("planner", "greedy"),
    ] {
        let found = plugins.iter().find(|p| p["kind"] == kind && p["name"] == name);
        let found = found.unwrap_or_else(|| panic!("{kind}/{name} is not in {plugins:?}"));
        assert_eq!(found["state"], "chosen", "{found}");
    }
    let text = run(&["plugins", "list"]);
    assert!(text.stdout.starts_with("kind") && text.stdout.contains("greedy"), "{}", text.stdout);
    let cpu = run(&["plugins", "inspect", "compute/cpu", "--json"]).json();
    assert!(cpu["options"].as_array().unwrap().iter().any(|option| option["name"] == "threads"), "{cpu}");
    assert!(!cpu["description"].as_str().unwrap().is_empty());
    assert_eq!(cpu["devices"][0]["name"], "cpu");
    let by_path = run(&["plugins", "inspect", plugin("storage_mmap").to_str().unwrap(), "--json"]).json();
    assert_eq!(by_path["name"], "mmap");
    let text = run(&["plugins", "inspect", "cpu"]);
    assert!(text.stdout.contains("threads") && text.stdout.contains("compute"), "{}", text.stdout);
    run(&["plugins", "inspect", "cqu"]).fails_with(&["cqu", "cpu"]);
}

fn plugins_doctor_lists_every_place() {
    let folder = tempfile::tempdir().unwrap();
    bad_libraries(folder.path());
    let outcome = Outcome::of(command(&["plugins", "doctor"]).env("THERMOCLINE_PLUGIN_PATH", folder.path()));
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    for wanted in [
        folder.path().to_str().unwrap(),
        executable().parent().unwrap().to_str().unwrap(),
        "THERMOCLINE_PLUGIN_PATH",
        "libthermocline_compute_text.so",
        "refused",
    ] {
        assert!(outcome.stdout.contains(wanted), "{wanted}: {}", outcome.stdout);
    }
    let value = run(&["plugins", "doctor", "--json"]).json();
    assert!(value["searched"].is_array() && value["plugins"].is_array(), "{value}");
}

fn plugins_with_options_of_the_config() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.toml");
    let with = |text: &str, arguments: &[&str]| {
        std::fs::write(&path, text).unwrap();
        run(&[&["plugins"][..], arguments, &["--config", path.to_str().unwrap()]].concat())
    };
    let text =
        "[compute.options.qnn]\nlibrary = '/no/such/libOther.so'\n[compute.options.cpu]\nthreads = 1\n";
    let listed = with(text, &["list"]);
    let why = listed.stdout.lines().find(|line| line.starts_with("qnn: no devices: "));
    assert!(why.is_some_and(|why| why.contains("/no/such/libOther.so")), "{}", listed.stdout);
    for arguments in [&["inspect", "qnn"][..], &["doctor"]] {
        let outcome = with(text, arguments);
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        assert!(outcome.stdout.contains("/no/such/libOther.so"), "{}", outcome.stdout);
    }
    let cpu = with(text, &["inspect", "cpu", "--json"]).json();
    let notes = cpu["devices"][0]["notes"].as_array().unwrap();
    assert!(notes.iter().any(|note| note == "threads: 1, as asked for by `threads`"), "{cpu}");
    // Wrong ones, of a device and of what has none.
    let wrong = "[compute.options.cpu]\nthread = 1\n[storage.options.ram]\nthreads = 'many'\n";
    let doctor = with(wrong, &["doctor"]);
    assert_eq!(doctor.code, 1, "{}", doctor.stdout);
    for wanted in [
        "no devices: configuration: [compute.options.cpu]: unknown key `thread`; did you mean `threads`?",
        "problem: [compute.options.cpu]: unknown key `thread`",
        "problem: [storage.options.ram]: `threads` is \"many\"",
    ] {
        assert!(doctor.stdout.contains(wanted), "{wanted}: {}", doctor.stdout);
    }
}

fn plugins_conformance() {
    let outcome = run(&["plugins", "conformance", "cache/lru"]);
    assert_eq!(outcome.code, 0, "{}{}", outcome.stdout, outcome.stderr);
    assert!(outcome.stdout.contains("cache plug-in `lru`"), "{}", outcome.stdout);
    run(&["plugins", "conformance", "/nonexistent/libx.so"]).fails_with(&["/nonexistent/libx.so"]);
    run(&["plugins", "conformance", "cache/lru", "--set", "x"]).ends_with(2, &["KEY=VALUE"]);
}

fn trap_23_found_from_anywhere() {
    let model = model();
    let elsewhere = tempfile::tempdir().unwrap();
    let arguments = ["run", "-m", &model, "-p", "Once", "-n", "1", "--json"];
    let from_elsewhere = Outcome::of(command(&arguments).current_dir(elsewhere.path()));
    assert_eq!(from_elsewhere.code, 0, "{}", from_elsewhere.stderr);
    let link = elsewhere.path().join("tc");
    std::os::unix::fs::symlink(executable(), &link).unwrap();
    let by_link = Outcome::of(command_of(&link).args(arguments));
    assert_eq!(by_link.code, 0, "{}", by_link.stderr);
    // The config's place wins over the program's own folder, and a variable names one, too.
    let copy = elsewhere.path().join("libthermocline_compute_cpu.so");
    std::fs::copy(plugin("compute_cpu"), &copy).unwrap();
    let path_of_cpu = |outcome: Outcome| {
        let value = outcome.json();
        let plugins = value["plugins"].as_array().unwrap();
        plugins.iter().find(|p| p["kind"] == "compute").unwrap()["path"].as_str().unwrap().to_owned()
    };
    let by_variable = Outcome::of(command(&arguments).env("THERMOCLINE_PLUGIN_PATH", elsewhere.path()));
    assert_eq!(path_of_cpu(by_variable), copy.canonicalize().unwrap().to_str().unwrap());
    let by_flag = Outcome::of(command(&arguments).args(["--plugin", copy.to_str().unwrap()]));
    assert_eq!(path_of_cpu(by_flag), copy.canonicalize().unwrap().to_str().unwrap());
}

fn trap_23_nothing_found() {
    let folder = tempfile::tempdir().unwrap();
    let program = installed(folder.path(), |_| false);
    run_installed(&program, &[]).fails_with(&[
        "no",
        "plug-in",
        "looked at:",
        folder.path().to_str().unwrap(),
    ]);
    let listed = Outcome::of(command_of(&program).args(["plugins", "list"]));
    assert_eq!(listed.code, 0, "{}", listed.stderr);
}

fn trap_24_one_bad_plugin_stops_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let bad = bad_libraries(folder.path());
    let model = model();
    let arguments =
        ["run", "-m", &model, "-p", "Once", "-n", "1", "--json", "--plugin", folder.path().to_str().unwrap()];
    let outcome = run(&arguments);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let plugins = list(&["--plugin", folder.path().to_str().unwrap()]);
    for (_, path) in bad {
        let name = path.file_name().unwrap().to_str().unwrap();
        let found = plugins.iter().find(|p| p["path"].as_str().is_some_and(|p| p.ends_with(name)));
        let found = found.unwrap_or_else(|| panic!("{name} is not in {plugins:?}"));
        assert_eq!(found["state"], "refused");
        let reason = found["reason"].as_str().unwrap();
        assert!(!reason.is_empty() && !reason.contains('\n') && reason.len() < 400, "one line: {reason}");
    }
}

fn trap_24_two_of_one_name() {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("libthermocline_compute_cpu.so");
    std::fs::copy(plugin("compute_cpu"), &copy).unwrap();
    let plugins = list(&["--plugin", copy.to_str().unwrap()]);
    let both: Vec<&Value> = plugins.iter().filter(|p| p["kind"] == "compute" && p["name"] == "cpu").collect();
    let states: Vec<&str> = both.iter().map(|p| p["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["chosen", "shadowed"], "{both:?}");
    assert_eq!(both[0]["path"].as_str().unwrap(), copy.canonicalize().unwrap().to_str().unwrap());
}

fn trap_25_absent_device() {
    let model = model();
    let base = ["run", "-m", &model, "-p", "Once", "-n", "1", "--json"];
    let allowed = run(&[&base[..], &["--device", "npu,cpu"]].concat());
    let wanted = "fallback: devices: wanted npu, got cpu, because there is no compute plug-in `npu`";
    assert!(allowed.stderr.contains(wanted), "{}", allowed.stderr);
    let value = allowed.json();
    assert_eq!(value["plan"]["fallbacks"][0]["wanted"], "npu");
    run(&[&base[..], &["--device", "npu,cpu", "--strict"]].concat()).fails_with(&["strict", "npu"]);
    run(&[&base[..], &["--device", "npu"]].concat()).fails_with(&["npu"]);
    run(&[&base[..], &["--device", "cpu:7"]].concat()).fails_with(&["cpu", "7"]);
    assert_eq!(run(&[&base[..], &["--device", "cpu", "--strict"]].concat()).code, 0);
}

fn trap_25_devices_are_named() {
    let devices = run(&["devices", "--json"]).json();
    let names: Vec<&str> =
        devices["devices"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"cpu") && names.contains(&"reference"), "{names:?}");
    let model = model();
    for name in names {
        let outcome =
            run(&["run", "-m", &model, "-p", "Once", "-n", "1", "--json", "--strict", "--device", name]);
        assert_eq!(outcome.json()["plan"]["devices"], serde_json::json!([name]));
    }
    let text = run(&["devices"]);
    assert!(text.stdout.starts_with("name") && text.stdout.contains("cpu"), "{}", text.stdout);
}

fn devices_of_hybrids_are_those_of_the_run() {
    let model = model();
    let base = ["run", "-m", &model, "-p", "Once", "-n", "1"];
    run(&[&base[..], &["--device", "cpu,reference,cpu"]].concat()).ends_with_usage(&["`cpu`", "named twice"]);
    run(&[&base[..], &["--device", "cpu:0,reference,cpu"]].concat())
        .ends_with_usage(&["`cpu:0` and `cpu` are the same device"]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hybrid.toml");
    let path = path.to_str().unwrap();
    for key in ["attention", "prefill"] {
        let config = format!("[compute]\ndevices = ['npu', 'cpu']\n[planner]\n{key} = 'nosuch'\n");
        std::fs::write(path, &config).unwrap();
        let at = format!("hybrid.toml: [planner]: `{key}`");
        run(&[&base[..], &["--config", path]].concat()).fails_with(&[
            &at,
            "\"nosuch\"",
            "none of",
            "npu, cpu",
        ]);
        std::fs::write(path, config.replace("nosuch", "npu")).unwrap();
        run(&[&base[..], &["--config", path]].concat()).fails_with(&[&at, "\"npu\"", "cannot be had"]);
    }
}

fn wrong_plugin_names_and_options() {
    let model = model();
    let base = ["run", "-m", &model, "-p", "Once"];
    run(&[&base[..], &["--storage", "mmpa"]].concat()).fails_with(&[
        "storage",
        "`mmpa`",
        "did you mean `mmap`?",
    ]);
    run(&[&base[..], &["--planner", "greed"]].concat()).fails_with(&["planner", "`greedy`"]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.toml");
    std::fs::write(&path, "[compute.options.cpu]\nthread = 1\n").unwrap();
    run(&[&base[..], &["--config", path.to_str().unwrap()]].concat())
        .fails_with(&["[compute.options.cpu]", "did you mean `threads`?"]);
}
