//! How many threads to run and where: the process's affinity, its CPU quota and the processor's physical cores decide,
//! and the reason is a sentence that people can read.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use engine_plugin::machine::{Roots, control_groups};

/// The choice made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    /// Number of threads, at least 1.
    pub(crate) threads: usize,
    /// The processor for each thread to be pinned to; threads beyond its length float.
    pub(crate) processors: Vec<usize>,
    /// Why, as a sentence.
    pub(crate) reason: String,
}

/// The processors that this process may run on, ascending.
pub(crate) fn affinity() -> Vec<usize> {
    match rustix::thread::sched_getaffinity(None) {
        Ok(set) => (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect(),
        Err(_) => Vec::new(),
    }
}

/// Chooses; `asked` is the option `threads`, 0 for a choice of our own.
pub(crate) fn choose(asked: usize, affinity: &[usize], roots: &Roots) -> Choice {
    let cores = one_per_core(affinity, roots);
    let allowed = affinity.len().max(1);
    let quota = cpu_quota(roots);
    let quota_threads = quota.map(|q| (q.floor() as usize).max(1));
    let quota_text = |q: f64| format!("a CPU quota of {q:.2} processors");
    if asked > 0 {
        let mut reason = format!("threads: {asked}, as asked for by `threads`");
        if asked > allowed {
            reason += &format!("; the affinity mask allows only {allowed} processors, so they share them");
        } else if let Some(q) = quota.filter(|q| asked as f64 > *q) {
            reason += &format!("; that exceeds {}, so they will be throttled", quota_text(q));
        }
        return Choice { threads: asked, processors: pin_order(&cores, affinity), reason };
    }
    let physical = cores.len().max(1);
    let (threads, reason) = match (quota, quota_threads) {
        (Some(q), Some(t)) if t < physical => (t, format!("threads: {t}, because of {}", quota_text(q))),
        _ if physical < allowed => (
            physical,
            format!(
                "threads: {physical}, the physical cores behind the {allowed} processors of the affinity mask"
            ),
        ),
        _ => (physical, format!("threads: {physical}, the processors of the affinity mask")),
    };
    Choice { threads, processors: pin_order(&cores, affinity), reason }
}

/// Physical cores first, then their siblings.
fn pin_order(cores: &[usize], affinity: &[usize]) -> Vec<usize> {
    cores.iter().copied().chain(affinity.iter().copied().filter(|cpu| !cores.contains(cpu))).collect()
}

/// The first allowed processor of each physical core.
fn one_per_core(affinity: &[usize], roots: &Roots) -> Vec<usize> {
    let mut seen = BTreeSet::new();
    affinity
        .iter()
        .copied()
        .filter(|cpu| {
            let file = roots.sys.join(format!("devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"));
            match fs::read_to_string(file) {
                Ok(siblings) => seen.insert(siblings),
                // Without topology every processor counts as a core.
                Err(_) => true,
            }
        })
        .collect()
}

/// The smallest CPU quota, in processors, of this process's control groups and their parents.
fn cpu_quota(roots: &Roots) -> Option<f64> {
    control_groups(roots, "cpu").iter().filter_map(|folder| quota_of(folder)).reduce(f64::min)
}

fn quota_of(folder: &Path) -> Option<f64> {
    let number = |text: &str| text.trim().parse::<f64>().ok();
    let (quota, period) = match fs::read_to_string(folder.join("cpu.max")) {
        Ok(text) => {
            let mut words = text.split_whitespace();
            (number(words.next()?)?, words.next().and_then(number).unwrap_or(100_000.0))
        }
        Err(_) => (
            number(&fs::read_to_string(folder.join("cpu.cfs_quota_us")).ok()?)?,
            number(&fs::read_to_string(folder.join("cpu.cfs_period_us")).ok()?)?,
        ),
    };
    (quota > 0.0 && period > 0.0).then(|| quota / period)
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
        fn choose(&self, asked: usize, affinity: &[usize]) -> Choice {
            let roots = Roots { proc: self.0.path().join("proc"), sys: self.0.path().join("sys") };
            choose(asked, affinity, &roots)
        }
    }

    #[test]
    fn quota_of_either_version_limits() {
        let v2 = Fake::new();
        v2.write("proc/self/cgroup", "0::/a/b\n");
        v2.write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
        v2.write("sys/fs/cgroup/a/cpu.max", "250000 100000\n");
        let choice = v2.choose(0, &[0, 1, 2, 3]);
        assert_eq!(choice.threads, 2);
        assert!(choice.reason.contains("quota of 2.50"), "{}", choice.reason);

        let v1 = Fake::new();
        v1.write("proc/self/cgroup", "4:memory:/x\n3:cpu,cpuacct:/x\n");
        v1.write("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "50000\n");
        v1.write("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us", "100000\n");
        assert_eq!(v1.choose(0, &[0, 1]).threads, 1, "half a processor is still one thread");
        let over = v1.choose(2, &[0, 1]);
        assert_eq!(over.threads, 2);
        assert!(over.reason.contains("throttled"), "{}", over.reason);

        let unlimited = Fake::new();
        unlimited.write("proc/self/cgroup", "3:cpu:/x\n");
        unlimited.write("sys/fs/cgroup/cpu/x/cpu.cfs_quota_us", "-1\n");
        unlimited.write("sys/fs/cgroup/cpu/x/cpu.cfs_period_us", "100000\n");
        assert_eq!(unlimited.choose(0, &[3, 5]).threads, 2);
    }

    #[test]
    fn siblings_count_once_and_come_last() {
        let fake = Fake::new();
        for (cpu, siblings) in [(0, "0,2\n"), (1, "1,3\n"), (2, "0,2\n"), (3, "1,3\n")] {
            fake.write(&format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"), siblings);
        }
        let choice = fake.choose(0, &[0, 1, 2, 3]);
        assert_eq!((choice.threads, choice.processors), (2, vec![0, 1, 2, 3]));
        assert_eq!(fake.choose(0, &[0, 2, 3]).processors, [0, 3, 2]);
        let many = fake.choose(9, &[1, 3]);
        assert_eq!(many.threads, 9);
        assert!(many.reason.contains("allows only 2"), "{}", many.reason);
        assert_eq!(fake.choose(0, &[]).threads, 1);
    }
}
