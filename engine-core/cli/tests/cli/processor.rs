//! What the CPU backend makes of the processor it finds: kernel tiers, affinity, quota (facts: traps 26 to 28).

use crate::program::{Outcome, command, command_of, executable, model, run};
use crate::{SystemTest, Test};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) fn tests() -> Vec<Test> {
    vec![
        ("trap_26_portable_kernels_give_the_same_text", trap_26_portable),
        ("trap_26_unknown_kernels_are_an_error", trap_26_unknown),
        ("trap_28_tiers_agree_over_200_tokens", trap_28_tiers_agree),
        ("threads_are_counted", threads_are_counted),
    ]
}

pub(crate) fn tests_where_allowed() -> Vec<SystemTest> {
    let taskset = Command::new("taskset").arg("--version").output();
    let taskset = taskset.is_err().then(|| "needs the program taskset".to_owned());
    let quota = Group::new("probe", 100_000).err();
    vec![
        ("trap_27_one_processor_is_one_thread", taskset, trap_27_affinity),
        ("trap_27_a_quota_of_one_is_one_thread", quota, trap_27_quota),
    ]
}

const TIER: &str = "THERMOCLINE_CPU_FEATURES";

/// A greedy run of 200 tokens and more flags, on the best kernels or on these.
fn greedy(tier: Option<&str>, more: &[&str]) -> Value {
    let model = model();
    let base =
        ["run", "-m", &model, "-p", "Once upon a time, there was a little", "-n", "200", "--temp", "0"];
    let mut command = command(&[&base[..], &["--json", "--ignore-eos", "--device", "cpu"], more].concat());
    tier.map(|tier| command.env(TIER, tier));
    Outcome::of(&mut command).json()
}

fn notes(run: &Value) -> String {
    run["plan"]["device_notes"].to_string()
}

fn trap_26_portable() {
    let (best, portable) = (greedy(None, &[]), greedy(Some("portable"), &[]));
    assert!(notes(&best).contains("the best tier that this processor and system run"), "{}", notes(&best));
    assert!(notes(&portable).contains("kernels: portable, as asked for"), "{}", notes(&portable));
    assert_eq!(best["text"], portable["text"]);
}

fn trap_26_unknown() {
    let model = model();
    let base = ["run", "-m", &model, "-p", "Once", "-n", "1"];
    let tiers = ["avx9000", "is no tier of this architecture", "portable"];
    Outcome::of(command(&base).env(TIER, "avx9000")).fails_with(&tiers);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.toml");
    std::fs::write(&path, "[compute.options.cpu]\nfeatures = 'avx9000'\n").unwrap();
    run(&[&base[..], &["--config", path.to_str().unwrap()]].concat()).fails_with(&tiers);
}

/// All tiers round alike (but for i8mm's int8 products), so the ids are the same, whatever the activations.
fn trap_28_tiers_agree() {
    for activations in ["f32", "int8"] {
        let flags = ["--activations", activations];
        let (best, portable) = (greedy(None, &flags), greedy(Some("portable"), &flags));
        assert_eq!(best["ids"].as_array().unwrap().len(), 200);
        assert_eq!(best["ids"], portable["ids"], "{activations}: {} {}", notes(&best), notes(&portable));
    }
}

/// Statistics say how many threads there are, not how many came since the start.
fn threads_are_counted() {
    let model = model();
    let value = run(&["run", "-m", &model, "-p", "Once", "-n", "2", "--json", "--threads", "2"]).json();
    let devices = value["statistics"]["devices"].as_array().unwrap();
    let cpu = devices.iter().find(|device| device["name"] == "cpu").unwrap();
    let threads = cpu["counters"].as_array().unwrap().iter().find(|counter| counter[0] == "threads").unwrap();
    assert_eq!(threads[1], 2, "{cpu}");
}

/// The notes of device `cpu`, from `devices --json`.
fn cpu_notes(outcome: &Outcome) -> String {
    let devices = outcome.json();
    let cpu = devices["devices"].as_array().unwrap().iter().find(|device| device["name"] == "cpu").unwrap();
    cpu["notes"].to_string()
}

fn trap_27_affinity() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
    let first = allowed.split([',', '-']).next().unwrap();
    let mut pinned = command_of(Path::new("taskset"));
    pinned.args(["-c", first]).arg(executable()).args(["devices", "--json"]);
    let notes = cpu_notes(&Outcome::of(&mut pinned));
    assert!(notes.contains("threads: 1, the processors of the affinity mask"), "{notes}");
}

/// A control group of ours with a CPU quota; removed when dropped.
struct Group {
    folder: PathBuf,
}

impl Group {
    /// With `quota` microseconds of every 100 ms; or why there can be none here.
    fn new(name: &str, quota: u32) -> Result<Group, String> {
        let (root, file, text) = match Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
            true => ("/sys/fs/cgroup", "cpu.max", format!("{quota} 100000")),
            false => ("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", quota.to_string()),
        };
        let folder = Path::new(root).join(format!("thermocline-{name}-{}", std::process::id()));
        let refused = |error| format!("needs a control group that can be written ({root}: {error})");
        std::fs::create_dir(&folder).map_err(refused)?;
        let group = Group { folder };
        // Elsewhere than in a control group this would make an ordinary file.
        let settings = group.folder.join(file);
        let open = std::fs::OpenOptions::new().write(true).open(settings);
        open.and_then(|mut file| std::io::Write::write_all(&mut file, text.as_bytes())).map_err(refused)?;
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A group that is still there harms nobody.
        let _ = std::fs::remove_dir(&self.folder);
    }
}

fn trap_27_quota() {
    let group = Group::new("quota", 100_000).unwrap();
    let mut limited = command_of(Path::new("sh"));
    let script = "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"";
    limited.arg("-c").arg(script).arg(&group.folder).arg(executable()).args(["devices", "--json"]);
    let notes = cpu_notes(&Outcome::of(&mut limited));
    let one_core = std::thread::available_parallelism().is_ok_and(|count| count.get() == 1);
    let wanted =
        if one_core { "threads: 1" } else { "threads: 1, because of a CPU quota of 1.00 processors" };
    assert!(notes.contains(wanted), "{notes}");
}
