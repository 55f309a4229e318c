//! A device in the hands of a test: it denies, fails, takes its time and tells what is under way.

use engine_core::backend::{
    Bindings, BufferId, BufferUse, Counter, DeviceDescription, ExecutableId, Support, TimelineValue,
};
use engine_core::operation::{OperationKind, OperationList};
use engine_core::{ComputeBackend, Error, HostSpan, Reached, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Why an operation of a list is denied; `None` where it is not.
pub(crate) type Denies = fn(&OperationList, usize) -> Option<String>;

/// Shares of networks that are under way, of all devices of a test.
#[derive(Default)]
pub(crate) struct UnderWay {
    now: BTreeSet<(usize, u64)>,
    /// The most devices that had one at the same time.
    pub(crate) most: usize,
}

#[derive(Default)]
struct State {
    /// Executables whose only products are those of a network.
    networks: BTreeSet<u64>,
    submissions: u64,
    fail_at: Option<u64>,
    /// When the device has done what it was given.
    busy_until: Option<Instant>,
    ends: BTreeMap<u64, Instant>,
}

pub(crate) struct Wrapped {
    inner: Arc<dyn ComputeBackend>,
    number: usize,
    denies: Denies,
    /// How long one share of a network takes at least.
    takes: Duration,
    under_way: Arc<Mutex<UnderWay>>,
    state: Mutex<State>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Wrapped {
    pub(crate) fn new(
        inner: Arc<dyn ComputeBackend>,
        number: usize,
        under_way: &Arc<Mutex<UnderWay>>,
    ) -> Wrapped {
        let (takes, under_way) = (Duration::ZERO, Arc::clone(under_way));
        Wrapped { inner, number, denies: |_, _| None, takes, under_way, state: Mutex::default() }
    }

    pub(crate) fn denying(self, denies: Denies) -> Wrapped {
        Wrapped { denies, ..self }
    }

    pub(crate) fn taking(self, takes: Duration) -> Wrapped {
        Wrapped { takes, ..self }
    }

    /// The submission after so many more fails, and no other.
    pub(crate) fn fail_after(&self, submissions: u64) {
        let mut state = lock(&self.state);
        state.fail_at = Some(state.submissions + submissions);
    }
}

/// What an NPU may run: products of linear maps and of dense networks, and copies.
pub(crate) fn products_only(list: &OperationList, index: usize) -> Option<String> {
    use engine_core::operation::Selection;
    match &list.operations[index].kind {
        OperationKind::Copy { .. } | OperationKind::Linear { accumulate: false, .. } => None,
        OperationKind::Ffn(ffn) if ffn.selection == Selection::All && !ffn.accumulate => None,
        other => Some(format!("no {} on this device", other.name())),
    }
}

pub(crate) fn everything(_: &OperationList, _: usize) -> Option<String> {
    Some("a test denies it".into())
}

impl ComputeBackend for Wrapped {
    fn describe(&self) -> &DeviceDescription {
        self.inner.describe()
    }

    fn supports(&self, list: &OperationList, index: usize) -> Support {
        (self.denies)(list, index).map_or_else(|| self.inner.supports(list, index), Support::no)
    }

    fn allocate(&self, bytes: u64, purpose: BufferUse) -> Result<BufferId> {
        self.inner.allocate(bytes, purpose)
    }

    fn import(&self, span: HostSpan) -> Result<BufferId> {
        self.inner.import(span)
    }

    fn free(&self, buffer: BufferId) -> Result<()> {
        self.inner.free(buffer)
    }

    fn prepare(&self, list: &OperationList) -> Result<ExecutableId> {
        let executable = self.inner.prepare(list)?;
        let products = |kind: &OperationKind| !matches!(kind, OperationKind::Copy { .. });
        let mut products = list.operations.iter().filter(|operation| products(&operation.kind)).peekable();
        if products.peek().is_some() && products.all(|o| matches!(o.kind, OperationKind::Ffn(_))) {
            lock(&self.state).networks.insert(executable.0);
        }
        Ok(executable)
    }

    fn release(&self, executable: ExecutableId) -> Result<()> {
        self.inner.release(executable)
    }

    fn submit(
        &self,
        executable: ExecutableId,
        bindings: &Bindings<'_>,
        waits: &[TimelineValue],
    ) -> Result<TimelineValue> {
        let mut state = lock(&self.state);
        let at = state.submissions;
        state.submissions += 1;
        if state.fail_at == Some(at) {
            return Err(Error::DeviceLost { detail: "as the test wanted".into() });
        }
        let value = self.inner.submit(executable, bindings, waits)?;
        let network = state.networks.contains(&executable.0);
        let now = Instant::now();
        let begins = state.busy_until.map_or(now, |busy| busy.max(now));
        let ends = begins + if network { self.takes } else { Duration::ZERO };
        state.busy_until = Some(ends);
        state.ends.insert(value.0, ends);
        if network {
            let mut under_way = lock(&self.under_way);
            under_way.now.insert((self.number, value.0));
            let devices: BTreeSet<usize> = under_way.now.iter().map(|(device, _)| *device).collect();
            under_way.most = under_way.most.max(devices.len());
        }
        Ok(value)
    }

    fn wait(&self, value: TimelineValue, timeout: Duration) -> Result<Reached> {
        let ends = lock(&self.state).ends.get(&value.0).copied();
        let left = ends.map_or(Duration::ZERO, |ends| ends.saturating_duration_since(Instant::now()));
        if left > timeout {
            std::thread::sleep(timeout);
            return Ok(Reached::TimedOut);
        }
        std::thread::sleep(left);
        let reached = self.inner.wait(value, timeout - left);
        if !matches!(reached, Ok(Reached::TimedOut)) {
            lock(&self.under_way).now.remove(&(self.number, value.0));
        }
        reached
    }

    fn counters(&self) -> Vec<Counter> {
        self.inner.counters()
    }
}
