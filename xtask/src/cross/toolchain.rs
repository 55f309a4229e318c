//! What compiles and runs aarch64 programs here: compiler, sysroot, emulator.

use super::{Tier, packages, sysroot};
use crate::{conformance, process};
use anyhow::{Context, Result};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The target.
pub(super) const TARGET: &str = "aarch64-unknown-linux-gnu";

/// The engine's program.
pub(super) const ENGINE: &str = "thermocline";

/// What the suite needs.
pub(super) const SUITE: &[&str] = &["compute-cpu", "compute-reference", "engine-loader", "conformance"];

/// What the story model's run needs.
pub(super) const STORY: &[&str] = &[
    "compute-cpu",
    "storage-ram",
    "storage-mmap",
    "cache-lru",
    "placement-greedy",
    "engine-loader",
    "thermocline",
];

/// A profile of its own, so that this build and one for the machine itself do not wait for each other. Kernels and oracle
/// are compiled as they are shipped; everything else only has to be there soon.
const PROFILE: &[&str] = &[
    "profile.emulated.inherits='release'",
    "profile.emulated.opt-level=1",
    "profile.emulated.debug=false",
    "profile.emulated.package.compute-cpu.opt-level=3",
    "profile.emulated.package.compute-reference.opt-level=3",
    "profile.emulated.package.engine-core.opt-level=2",
    "profile.emulated.package.half.opt-level=3",
];

/// Where programs and plug-ins for the target are built.
pub(super) fn built() -> PathBuf {
    process::target().join(TARGET).join("emulated")
}

/// Compiler and emulator, ready.
pub(super) struct Toolchain {
    /// A sysroot of our own, where the installed toolchain has no standard library for the target.
    sysroot: Option<PathBuf>,
}

impl Toolchain {
    /// Installs and builds what is missing.
    pub(super) fn ready() -> Result<Toolchain> {
        packages::install()?;
        let sysroot = if sysroot::is_installed()? { None } else { Some(sysroot::ready()?) };
        Ok(Toolchain { sysroot })
    }

    /// Why [`Toolchain::ready`] cannot do its work here, or nothing.
    pub(super) fn missing() -> Result<Option<String>> {
        let std_here = sysroot::is_installed()? || sysroot::is_cached()?;
        Ok(packages::missing(!std_here))
    }

    /// Where the standard library comes from, in words.
    pub(super) fn source(&self) -> String {
        match &self.sysroot {
            None => "with the installed toolchain's own standard library".to_owned(),
            Some(path) => format!("with the standard library in {}", path.display()),
        }
    }

    /// Builds packages.
    pub(super) fn build(&self, packages: &[&[&str]]) -> Result<()> {
        let mut build = self.cargo("build");
        build.args(packages.concat().into_iter().flat_map(|package| ["--package", package]));
        process::run(&mut build)
    }

    /// Builds the unit tests of the cpu plug-in and answers the program that they are.
    pub(super) fn build_unit_tests(&self) -> Result<PathBuf> {
        let mut build = self.cargo("test");
        build.args([
            "--package",
            "compute-cpu",
            "--lib",
            "--no-run",
            "--message-format",
            "json-render-diagnostics",
        ]);
        println!("$ cargo test --package compute-cpu --lib --no-run --target {TARGET}");
        let messages = process::output(&mut build)?;
        messages
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
            .find_map(|message| message["executable"].as_str().map(PathBuf::from))
            .context("cargo named no program of unit tests")
    }

    /// Runs the unit tests on a tier.
    pub(super) fn unit_tests(&self, program: &Path, tier: &Tier, cases: u32) -> Result<()> {
        let mut tests = process::program(packages::EMULATOR);
        tests.arg(program).env("PROPTEST_CASES", cases.to_string());
        tests.env("QEMU_CPU", tier.cpu).env("QEMU_LD_PREFIX", packages::LIBC_ROOT);
        process::run(&mut tests)
    }

    /// A program of the workspace on a tier.
    ///
    /// The kernel cannot start it, and it starts itself as a child: both go through a script that names the emulator.
    pub(super) fn program(&self, name: &str, tier: &Tier) -> Result<Command> {
        let script = wrapper(name, tier);
        let text = format!(
            "#!/bin/sh\nQEMU_CPU={} QEMU_LD_PREFIX={} exec qemu-aarch64 -0 \"$0\" '{}' \"$@\"\n",
            tier.cpu,
            packages::LIBC_ROOT,
            built().join(name).display()
        );
        std::fs::write(&script, text).with_context(|| format!("cannot write {}", script.display()))?;
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))?;
        let mut command = process::program(&script);
        // An emulated probe of a plug-in takes longer than the second and a half that a user's may.
        let config = built().join("emulated.toml");
        std::fs::write(&config, "[plugins]\nprobe_timeout_ms = 60000\n")
            .with_context(|| format!("cannot write {}", config.display()))?;
        command.env("THERMOCLINE_PROBE", &script).env("THERMOCLINE_CONFIG", &config);
        Ok(command)
    }

    fn cargo(&self, what: &str) -> Command {
        let mut command = process::cargo(&[what, "--profile", "emulated", "--target", TARGET]);
        command.args(PROFILE.iter().flat_map(|setting| ["--config", setting]));
        command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", packages::LINKER);
        if let Some(sysroot) = &self.sysroot {
            let flag = format!("--sysroot {}", sysroot.display());
            command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS", flag);
        }
        command
    }
}

fn wrapper(program: &str, tier: &Tier) -> PathBuf {
    built().join(format!("{program}-{}", tier.cpu))
}

/// A compute plug-in for the target.
pub(super) fn plugin(name: &str) -> PathBuf {
    built().join(format!("libthermocline_compute_{name}.so"))
}

/// Where a report of a tier is kept.
pub(super) fn report(tier: &Tier) -> PathBuf {
    built().join(format!("conformance-{}.json", tier.cpu))
}

/// The runner of the suite on a tier.
pub(super) fn suite(toolchain: &Toolchain, tier: &Tier, plugin: &Path) -> Result<Command> {
    let mut command = toolchain.program(conformance::RUNNER, tier)?;
    command.arg(plugin).arg("--oracle").arg(self::plugin("reference"));
    command.arg("--json").arg(report(tier));
    Ok(command)
}
