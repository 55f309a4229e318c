//! The memory that this process can have: the machine's, or its control groups' where they allow less.

use std::fs;
use std::path::{Path, PathBuf};

/// Where the system's files are; tests bring their own.
#[derive(Clone, Debug)]
pub struct Roots {
    /// `/proc`.
    pub proc: PathBuf,
    /// `/sys`.
    pub sys: PathBuf,
}

impl Default for Roots {
    fn default() -> Roots {
        Roots { proc: "/proc".into(), sys: "/sys".into() }
    }
}

/// The memory in bytes that this process can have; `None` where the system does not say.
pub fn memory(roots: &Roots) -> Option<u64> {
    let text = fs::read_to_string(roots.proc.join("meminfo")).unwrap_or_default();
    let kib =
        |line: &str| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok();
    let machine = text.lines().find_map(kib).map(|kib| kib.saturating_mul(1024));
    machine.into_iter().chain(control_group_memory(roots)).min()
}

/// The smallest memory limit, in bytes, of this process's control groups and their parents. Groups without a limit have
/// none, or one beyond any machine.
pub fn control_group_memory(roots: &Roots) -> Option<u64> {
    let limit_of = |folder: &PathBuf| {
        let text = fs::read_to_string(folder.join("memory.max"));
        let text = text.or_else(|_| fs::read_to_string(folder.join("memory.limit_in_bytes")));
        text.ok()?.trim().parse::<u64>().ok()
    };
    control_groups(roots, "memory").iter().filter_map(limit_of).min()
}

/// The folders of this process's control groups for `controller`, of version 1 and 2, and of their parents.
pub fn control_groups(roots: &Roots, controller: &str) -> Vec<PathBuf> {
    let groups = fs::read_to_string(roots.proc.join("self/cgroup")).unwrap_or_default();
    let mut folders = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let mounts: Vec<PathBuf> = if controllers.is_empty() {
            vec![roots.sys.join("fs/cgroup"), roots.sys.join("fs/cgroup/unified")]
        } else if controllers.split(',').any(|c| c == controller) {
            vec![roots.sys.join("fs/cgroup").join(controllers), roots.sys.join("fs/cgroup").join(controller)]
        } else {
            continue;
        };
        for mount in mounts {
            // Within a container the path may be the host's; then only the mount's own root exists here.
            folders.extend(
                Path::new(path).ancestors().map(|group| mount.join(group.strip_prefix("/").unwrap_or(group))),
            );
        }
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake(tempfile::TempDir);

    impl Fake {
        fn new() -> Fake {
            Fake(tempfile::tempdir().unwrap())
        }
        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        fn roots(&self) -> Roots {
            Roots { proc: self.0.path().join("proc"), sys: self.0.path().join("sys") }
        }
        fn limit(&self) -> Option<u64> {
            control_group_memory(&self.roots())
        }
    }

    #[test]
    fn limits_of_either_version_count() {
        let v2 = Fake::new();
        assert_eq!(v2.limit(), None);
        v2.write("proc/self/cgroup", "0::/a/b\n");
        v2.write("sys/fs/cgroup/a/b/memory.max", "max\n");
        assert_eq!(v2.limit(), None);
        v2.write("sys/fs/cgroup/a/memory.max", "2147483648\n");
        assert_eq!(v2.limit(), Some(2 << 30));
        let container = Fake::new();
        container.write("proc/self/cgroup", "0::/../of/the/host\n");
        container.write("sys/fs/cgroup/memory.max", "1000000\n");
        assert_eq!(container.limit(), Some(1_000_000));
        let v1 = Fake::new();
        v1.write("proc/self/cgroup", "4:memory:/x\n3:cpu,cpuacct:/x\n");
        v1.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        v1.write("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "3000\n");
        v1.write("sys/fs/cgroup/cpu,cpuacct/x/memory.limit_in_bytes", "1\n");
        assert_eq!(v1.limit(), Some(3000));
    }

    #[test]
    fn the_smaller_of_machine_and_group_is_what_there_is() {
        let fake = Fake::new();
        assert_eq!(memory(&fake.roots()), None);
        fake.write("proc/meminfo", "MemFree:  1 kB\nMemTotal:        2048 kB\n");
        assert_eq!(memory(&fake.roots()), Some(2 << 20));
        fake.write("proc/self/cgroup", "0::/a\n");
        fake.write("sys/fs/cgroup/a/memory.max", "1000000\n");
        assert_eq!(memory(&fake.roots()), Some(1_000_000));
        fake.write("sys/fs/cgroup/a/memory.max", "9000000\n");
        assert_eq!(memory(&fake.roots()), Some(2 << 20));
    }
}
