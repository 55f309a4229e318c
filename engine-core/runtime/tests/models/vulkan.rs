//! The vulkan device with a real model: that the driver did the work, and that loading again and again keeps no memory.

use crate::stack::{Outcome, Setup, ensure, on_vulkan, show, story};
use libtest_mimic::Trial;

/// Loads of the leak test; `THERMOCLINE_LOADS` asks for more.
const LOADS: u32 = 12;
/// Loads after which memory must not grow: drivers make their caches at first.
const WARM: u32 = 4;
/// Growth that is no leak, in KiB: what the allocator keeps, whatever the number of loads.
const NOISE_KIB: u64 = 24 << 10;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        on_vulkan("vulkan::did_the_work".into(), did_the_work),
        on_vulkan("vulkan::loads_keep_nothing".into(), loads_keep_nothing),
    ]
}

/// The driver executed every layer of every token: no other compute plug-in was opened.
fn did_the_work() -> Outcome {
    let (engine, device) = Setup::on("vulkan").load_watched(&story())?;
    let count = |name: &str| device.counters().into_iter().find(|c| c.name == name).map_or(0, |c| c.value);
    let mut session = engine.session()?;
    session.prefill(&[1, 5, 9])?;
    let before = [count("dispatches_executed"), count("command_buffers_executed")];
    session.decode(7)?;
    let after = [count("dispatches_executed"), count("command_buffers_executed")];
    // Eight layers with two norms, four projections, two ropes, append, attention and three products.
    ensure(after[0] >= before[0] + 8 * 13, || format!("a token took {} dispatches", after[0] - before[0]))?;
    ensure(after[1] > before[1], || "the driver executed nothing".into())
}

/// Resident memory of this process in KiB.
fn resident() -> Result<u64, libtest_mimic::Failed> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line =
        status.lines().find_map(|l| l.strip_prefix("VmRSS:")).ok_or("no VmRSS in /proc/self/status")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse()?)
}

fn loads_keep_nothing() -> Outcome {
    let loads = std::env::var("THERMOCLINE_LOADS").ok().and_then(|n| n.parse().ok()).unwrap_or(LOADS);
    let mut before = 0;
    for load in 0..loads.max(WARM + 1) {
        if load == WARM {
            before = resident()?;
        }
        let (engine, device) =
            Setup { context: 32, batch: 4, ..Setup::on("vulkan") }.load_watched(&story())?;
        if load == 0 {
            engine.session()?.prefill(&[1, 5])?;
        }
        drop(engine);
        let kept = device.counters().into_iter().find(|c| c.name == "bytes_allocated").map_or(0, |c| c.value);
        ensure(kept == 0, || format!("load {load}: {kept} bytes of the device were not given back"))?;
    }
    let after = resident()?;
    show(|| format!("{loads} loads: {before} KiB after {WARM}, {after} KiB at the end"));
    ensure(after <= before + NOISE_KIB, || {
        format!("{loads} loads grew the process from {before} to {after} KiB")
    })
}
