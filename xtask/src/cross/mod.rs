//! `cargo xtask cross`: the aarch64 build on an x86 machine, run by qemu on processors with and without extensions.

mod packages;
mod sysroot;

use crate::{conformance, demo, process};
use anyhow::{Context, Result, bail};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

const TARGET: &str = "aarch64-unknown-linux-gnu";

/// The engine's program.
const ENGINE: &str = "thermocline";

/// qemu's processors, from the one with every extension to plain NEON.
const TIERS: &[(&str, &str)] =
    &[("max", "dotprod, fp16, i8mm"), ("neoverse-n1", "dotprod, fp16"), ("cortex-a72", "plain NEON")];

/// Where Debian's cross packages put the target's C library.
const LIBC_ROOT: &str = "/usr/aarch64-linux-gnu";

/// Reads the arguments and does one of the three.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let Some((what, rest)) = arguments.split_first() else { bail!("cross needs setup, conformance or demo") };
    let tiers = tiers(rest)?;
    match what.as_str() {
        "setup" => Toolchain::ready().map(|toolchain| println!("aarch64: ready, {}", toolchain.source())),
        "conformance" => conformance_on(&tiers),
        "demo" => demo_on(&tiers),
        other => bail!("unknown argument `{other}`: cross takes setup, conformance or demo"),
    }
}

/// Everything that the long lane of CI asks of aarch64.
pub(crate) fn everything() -> Result<()> {
    let tiers: Vec<&str> = TIERS.iter().map(|tier| tier.0).collect();
    conformance_on(&tiers)?;
    demo_on(&tiers)
}

fn tiers(arguments: &[String]) -> Result<Vec<&'static str>> {
    let mut chosen = Vec::new();
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let name = match argument.as_str() {
            "--tier" => arguments.next(),
            other => bail!("unknown argument `{other}`"),
        };
        match TIERS.iter().find(|(tier, _)| Some(*tier) == name.map(String::as_str)) {
            Some((tier, _)) => chosen.push(*tier),
            None => {
                let names: Vec<String> = TIERS.iter().map(|(name, has)| format!("{name} ({has})")).collect();
                bail!("--tier takes one of {}", names.join(", "));
            }
        }
    }
    if chosen.is_empty() { Ok(TIERS.iter().map(|tier| tier.0).collect()) } else { Ok(chosen) }
}

/// The unit tests of the kernels and the suite for the cpu plug-in, tier by tier.
fn conformance_on(tiers: &[&str]) -> Result<()> {
    let toolchain = Toolchain::ready()?;
    toolchain.build()?;
    for tier in tiers {
        println!("\n=== aarch64 {tier}");
        let mut tests =
            process::cargo(&["test", "--release", "--package", "compute-cpu", "--target", TARGET]);
        toolchain.environment(&mut tests, tier);
        process::run(&mut tests)?;
        let runner = || toolchain.emulated(conformance::RUNNER, tier);
        conformance::hold(&conformance::compute_plugins(&release())?, &release(), runner, &[])?;
    }
    Ok(())
}

fn demo_on(tiers: &[&str]) -> Result<()> {
    let toolchain = Toolchain::ready()?;
    toolchain.build()?;
    for tier in tiers {
        println!("\n=== aarch64 {tier}");
        process::run(toolchain.emulated(ENGINE, tier).args(demo::ARGUMENTS))?;
    }
    Ok(())
}

fn release() -> PathBuf {
    process::target().join(TARGET).join("release")
}

/// What compiles and runs aarch64 programs here.
struct Toolchain {
    /// A sysroot of our own, where the installed toolchain has no standard library for the target.
    sysroot: Option<PathBuf>,
}

impl Toolchain {
    /// Installs and builds what is missing.
    fn ready() -> Result<Toolchain> {
        packages::install()?;
        let sysroot = if sysroot::is_installed()? { None } else { Some(sysroot::ready()?) };
        Ok(Toolchain { sysroot })
    }

    fn source(&self) -> String {
        match &self.sysroot {
            None => "with the installed toolchain's own standard library".to_owned(),
            Some(path) => format!("with the standard library in {}", path.display()),
        }
    }

    fn build(&self) -> Result<()> {
        let mut build =
            process::cargo(&["build", "--release", "--workspace", "--exclude", "xtask", "--target", TARGET]);
        self.environment(&mut build, TIERS[0].0);
        process::run(&mut build)?;
        write_wrapper(ENGINE)?;
        write_wrapper(conformance::RUNNER)
    }

    /// Lets cargo link for the target and run its programs on a tier.
    fn environment(&self, command: &mut Command, tier: &str) {
        command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc");
        // The processor is chosen by qemu's own variable, so that nothing is built again for another one.
        command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", "qemu-aarch64");
        if let Some(sysroot) = &self.sysroot {
            let flag = format!("--sysroot {}", sysroot.display());
            command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS", &flag).env("RUSTDOCFLAGS", &flag);
        }
        qemu(command, ENGINE, tier);
    }

    /// An aarch64 program of the workspace on a tier.
    fn emulated(&self, name: &str, tier: &str) -> Command {
        let mut command = process::program("qemu-aarch64");
        command.arg(release().join(name));
        qemu(&mut command, name, tier);
        command
    }
}

/// The variables by which qemu takes its processor and its C library, and how a program starts itself as a child: the
/// kernel cannot start it without qemu.
fn qemu(command: &mut Command, program: &str, tier: &str) {
    command.env("QEMU_CPU", tier).env("QEMU_LD_PREFIX", LIBC_ROOT).env("THERMOCLINE_PROBE", wrapper(program));
}

/// A script that starts a program as if the kernel could.
fn wrapper(program: &str) -> PathBuf {
    release().join(format!("{program}-emulated"))
}

fn write_wrapper(program: &str) -> Result<()> {
    let script = format!("#!/bin/sh\nexec qemu-aarch64 '{}' \"$@\"\n", release().join(program).display());
    let path = wrapper(program);
    std::fs::write(&path, script).with_context(|| format!("cannot write {}", path.display()))?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    Ok(())
}
