//! A stack that computes nothing: it records what it is asked, and refuses what a test wants refused.

use crate::host_binding::unfollowed_span;
use crate::{Engine, EngineOptions, Result, Stack};
use engine_core::backend::{
    Bindings, BufferId, BufferUse, Counter, DeviceDescription, ExecutableId, Support, TimelineValue,
    ToleranceClass,
};
use engine_core::cache::{Decision, Miss, Region, Unit};
use engine_core::error::{Error, HandleKind};
use engine_core::operation::OperationList;
use engine_core::planner::{
    Budget, FfnShare, HardwareProfile, LayerPlan, LayerProfile, ModelProfile, PLAN_VERSION, Plan,
    SparsityPolicy,
};
use engine_core::storage::{FileId, Read, TierDescription};
use engine_core::{CachePolicy, ClusterSet, ComputeBackend, HostSpan, Planner, Reached, StorageTier};
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

type Denies = fn(&OperationList, usize) -> Option<String>;

/// What a device was asked.
#[derive(Default)]
pub(crate) struct Log {
    pub(crate) live: BTreeSet<u64>,
    next: u64,
    pub(crate) allocated: Vec<(BufferUse, u64)>,
    pub(crate) imports: usize,
    /// Operations of the list, tokens, and positions before them where the list knows positions.
    pub(crate) submissions: Vec<(usize, u32, Option<u32>)>,
    lists: std::collections::BTreeMap<u64, OperationList>,
    /// Submissions that succeed before one fails.
    pub(crate) fail_after: Option<usize>,
}

pub(crate) struct FakeDevice {
    description: DeviceDescription,
    denies: Denies,
    clock: Option<Clock>,
    pub(crate) log: Mutex<Log>,
}

/// Time that passes only where somebody waits: a device takes `cost` for a share of a network and nothing for the rest, one
/// submission after the other, and the host's time is the end of what it waited for last.
pub(crate) struct Clock {
    /// The host's, shared by the devices of a test.
    pub(crate) host: Arc<Mutex<u64>>,
    pub(crate) cost: u64,
    /// When each submission ends.
    ends: Mutex<Vec<u64>>,
}

impl Clock {
    pub(crate) fn new(host: &Arc<Mutex<u64>>, cost: u64) -> Clock {
        Clock { host: Arc::clone(host), cost, ends: Mutex::default() }
    }

    fn submit(&self, list: &OperationList) {
        let mut operations = list.operations.iter().filter(|operation| operation.kind.name() != "copy");
        let cost = if operations.all(|operation| operation.kind.name() == "ffn") { self.cost } else { 0 };
        let mut ends = self.ends.lock().unwrap();
        let begin = (*self.host.lock().unwrap()).max(ends.last().copied().unwrap_or(0));
        ends.push(begin + cost);
    }

    fn wait(&self, value: TimelineValue, timeout: Duration) -> Reached {
        let end = self.ends.lock().unwrap()[value.0 as usize - 1];
        let mut host = self.host.lock().unwrap();
        if timeout.is_zero() && end > *host {
            return Reached::TimedOut;
        }
        *host = end.max(*host);
        Reached::Done
    }
}

impl FakeDevice {
    pub(crate) fn new() -> FakeDevice {
        FakeDevice {
            description: DeviceDescription {
                name: "fake".into(),
                description: "computes nothing".into(),
                tolerance: ToleranceClass::F32,
                memory_bytes: 0,
                alignment: 32,
                imports_host_memory: true,
                needs_constant_weights: false,
                max_buffer_bytes: 0,
                notes: vec![],
            },
            denies: |_, _| None,
            clock: None,
            log: Mutex::default(),
        }
    }

    pub(crate) fn denying(denies: Denies) -> FakeDevice {
        FakeDevice { denies, ..FakeDevice::new() }
    }

    pub(crate) fn timed(clock: Clock) -> FakeDevice {
        FakeDevice { clock: Some(clock), ..FakeDevice::new() }
    }

    pub(crate) fn describing(change: impl FnOnce(&mut DeviceDescription)) -> FakeDevice {
        let mut device = FakeDevice::new();
        change(&mut device.description);
        device
    }

    fn handle(&self) -> u64 {
        let mut log = self.log.lock().unwrap();
        log.next += 1;
        let handle = log.next;
        log.live.insert(handle);
        handle
    }

    fn give_back(&self, kind: HandleKind, handle: u64) -> engine_core::Result<()> {
        match self.log.lock().unwrap().live.remove(&handle) {
            true => Ok(()),
            false => Err(Error::unknown(kind, handle)),
        }
    }
}

impl ComputeBackend for FakeDevice {
    fn describe(&self) -> &DeviceDescription {
        &self.description
    }

    fn supports(&self, list: &OperationList, index: usize) -> Support {
        (self.denies)(list, index).map_or(Support::Yes, Support::no)
    }

    fn allocate(&self, bytes: u64, purpose: BufferUse) -> engine_core::Result<BufferId> {
        self.log.lock().unwrap().allocated.push((purpose, bytes));
        Ok(BufferId(self.handle()))
    }

    fn import(&self, _: HostSpan) -> engine_core::Result<BufferId> {
        self.log.lock().unwrap().imports += 1;
        Ok(BufferId(self.handle()))
    }

    fn free(&self, buffer: BufferId) -> engine_core::Result<()> {
        self.give_back(HandleKind::Buffer, buffer.0)
    }

    fn prepare(&self, list: &OperationList) -> engine_core::Result<ExecutableId> {
        list.validate()?;
        let handle = self.handle();
        self.log.lock().unwrap().lists.insert(handle, list.clone());
        Ok(ExecutableId(handle))
    }

    fn release(&self, executable: ExecutableId) -> engine_core::Result<()> {
        self.give_back(HandleKind::Executable, executable.0)
    }

    fn submit(
        &self,
        executable: ExecutableId,
        bindings: &Bindings<'_>,
        _: &[TimelineValue],
    ) -> engine_core::Result<TimelineValue> {
        let mut log = self.log.lock().unwrap();
        let list =
            log.lists.get(&executable.0).ok_or(Error::unknown(HandleKind::Executable, executable.0))?;
        bindings.validate(list)?;
        let operations = list.operations.len();
        if log.fail_after == Some(log.submissions.len()) {
            return Err(Error::DeviceLost { detail: "as the test wanted".into() });
        }
        if let Some(clock) = &self.clock {
            clock.submit(list);
        }
        let past = bindings.sequences.first().map(|sequence| sequence.past);
        log.submissions.push((operations, bindings.tokens, past));
        Ok(TimelineValue(log.submissions.len() as u64))
    }

    fn wait(&self, value: TimelineValue, timeout: Duration) -> engine_core::Result<Reached> {
        Ok(self.clock.as_ref().map_or(Reached::Done, |clock| clock.wait(value, timeout)))
    }

    fn counters(&self) -> Vec<Counter> {
        vec![Counter { name: "submissions".into(), value: self.log.lock().unwrap().submissions.len() as u64 }]
    }
}

pub(crate) struct FakeTier {
    description: TierDescription,
    len: u64,
    reads: bool,
}

impl FakeTier {
    pub(crate) fn new(path: &Path, resident: bool) -> FakeTier {
        let description = TierDescription {
            name: "fake-tier".into(),
            description: "holds nothing".into(),
            alignment: 1,
            granularity: 1,
            resident,
            max_depth: 1,
            curve: vec![],
            notes: vec![],
        };
        FakeTier { description, len: std::fs::metadata(path).unwrap().len(), reads: false }
    }

    /// Answers reads with whatever is in the memory already.
    pub(crate) fn reading(path: &Path) -> FakeTier {
        FakeTier { reads: true, ..FakeTier::new(path, true) }
    }
}

impl StorageTier for FakeTier {
    fn describe(&self) -> &TierDescription {
        &self.description
    }

    fn open(&self, _: &Path) -> engine_core::Result<FileId> {
        Ok(FileId(1))
    }

    fn len(&self, _: FileId) -> engine_core::Result<u64> {
        Ok(self.len)
    }

    fn close(&self, _: FileId) -> engine_core::Result<()> {
        Ok(())
    }

    fn resident(&self, _: FileId, range: Range<u64>) -> engine_core::Result<Option<HostSpan>> {
        Ok(self.description.resident.then(|| unfollowed_span(range.end - range.start)))
    }

    fn read(&self, _: &[Read]) -> engine_core::Result<TimelineValue> {
        if self.reads { Ok(TimelineValue(1)) } else { Err(Error::unsupported("a fake reads nothing")) }
    }

    fn wait(&self, _: TimelineValue, _: Duration) -> engine_core::Result<Reached> {
        Ok(Reached::Done)
    }

    fn cancel(&self, _: TimelineValue) -> engine_core::Result<()> {
        Ok(())
    }

    fn counters(&self) -> Vec<Counter> {
        vec![]
    }
}

pub(crate) struct FakeCache;

impl CachePolicy for FakeCache {
    fn configure(&mut self, regions: &[Region]) -> engine_core::Result<()> {
        assert!(regions.iter().all(|region| region.capacity() > 0));
        Ok(())
    }

    fn step(&mut self, _: u32, _: &[Unit], _: &[Miss], _: &[Unit]) -> engine_core::Result<Decision> {
        Err(Error::unsupported("never asked while everything is resident"))
    }
}

/// Puts everything on the first device, then lets a test change the plan.
pub(crate) struct FakePlanner(pub(crate) fn(&mut Plan, &Budget));

impl Planner for FakePlanner {
    fn plan(
        &self,
        model: &ModelProfile,
        hardware: &HardwareProfile,
        budget: &Budget,
    ) -> engine_core::Result<Plan> {
        let layer = |profile: &LayerProfile| {
            let policy = budget.sparsity.and_then(|kind| profile.policy(kind));
            let sparsity = policy.unwrap_or(SparsityPolicy::Dense);
            let clusters = ClusterSet::all(profile.neurons);
            LayerPlan { attention: 0, ffn: vec![FfnShare { device: 0, clusters, sparsity }], prefill: None }
        };
        let mut plan = Plan {
            version: PLAN_VERSION,
            requires: vec![],
            model_hash: model.hash.clone(),
            hardware_hash: hardware.hash.clone(),
            planner: "fake-planner".into(),
            devices: hardware.devices.iter().map(|device| device.name.clone()).collect(),
            embedding: 0,
            layers: model.layers.iter().map(layer).collect(),
            fallbacks: vec![],
            notes: vec![],
            predicted_seconds: 0.0,
        };
        (self.0)(&mut plan, budget);
        Ok(plan)
    }
}

/// The committed story model.
pub(crate) fn story() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-story-9m-q8_0.gguf")
}

/// The story model on one fake device.
pub(crate) fn load(device: &Arc<FakeDevice>, options: EngineOptions) -> Result<Engine> {
    load_planned(device, FakePlanner(|_, _| ()), options)
}

pub(crate) fn load_planned(
    device: &Arc<FakeDevice>,
    planner: FakePlanner,
    options: EngineOptions,
) -> Result<Engine> {
    load_on([device, &Arc::new(FakeDevice::new())], planner, options)
}

/// The story model on two fake devices.
pub(crate) fn load_on(
    devices: [&Arc<FakeDevice>; 2],
    planner: FakePlanner,
    options: EngineOptions,
) -> Result<Engine> {
    let path = story();
    let [first, second] = devices;
    let stack = Stack {
        compute: vec![("first".into(), Arc::clone(first) as _), ("second".into(), Arc::clone(second) as _)],
        storage: Arc::new(FakeTier::reading(&path)),
        cache: Box::new(FakeCache),
        planner: Arc::new(planner),
    };
    Engine::load(path, stack, options)
}
