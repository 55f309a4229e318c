//! One model on several devices: the reference's logits at every step, the same bits whatever the threads, devices that
//! work at the same time, and what is said when one is lost or cannot do its part.

use crate::reference::{follows_on, limit};
use crate::stack::{Outcome, catalogue, ensure, on_device, on_vulkan, shared, show, story, trial_with};
use crate::wrapped::{UnderWay, Wrapped, everything, products_only};
use engine_core::ComputeBackend;
use engine_core::backend::ToleranceClass;
use engine_core::options::OptionTable;
use engine_runtime::{Activations, Engine, EngineOptions, Placement, Session, SparsityChoice, Stack};
use formats::GgufFile;
use libtest_mimic::{Failed, Trial};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Two devices, and what the config says of them.
#[derive(Clone, Copy)]
struct Hybrid {
    devices: [&'static str; 2],
    /// Of the vulkan plug-in: whether weights are viewed in host memory.
    import: &'static str,
    /// Of the vulkan plug-in; 0 is none.
    memory_limit: i64,
    hot: Option<f32>,
    attention: Option<&'static str>,
    prefill: Option<&'static str>,
    activations: Activations,
    sparsity: SparsityChoice,
    tier: &'static str,
    threads: i64,
    batch: u32,
    strict: bool,
}

impl Hybrid {
    fn of(devices: [&'static str; 2]) -> Hybrid {
        Hybrid {
            devices,
            import: "auto",
            memory_limit: 0,
            hot: Some(0.3),
            attention: None,
            prefill: None,
            activations: Activations::F32,
            sparsity: SparsityChoice::Auto,
            tier: "mmap",
            threads: 2,
            batch: 256,
            strict: true,
        }
    }

    fn open(&self) -> Result<Vec<Arc<dyn ComputeBackend>>, Failed> {
        let open = |device: &&str| {
            let mut options = OptionTable::new();
            match *device {
                "vulkan" => {
                    options.insert("memory_limit".into(), self.memory_limit.into());
                    options.insert("import".into(), self.import.into())
                }
                "qnn" => None,
                _ => options.insert("threads".into(), self.threads.into()),
            };
            Ok(catalogue().open_compute(device, &options)?)
        };
        self.devices.iter().map(open).collect()
    }

    fn load(&self) -> Result<Engine, Failed> {
        Ok(self.load_on(self.open()?)?)
    }

    fn load_on(&self, backends: Vec<Arc<dyn ComputeBackend>>) -> engine_runtime::Result<Engine> {
        Engine::load(story(), self.stack(backends), self.options())
    }

    /// What runs where, with nothing loaded.
    fn plan_on(&self, backends: Vec<Arc<dyn ComputeBackend>>) -> engine_runtime::Result<Placement> {
        Engine::plan_file(&GgufFile::open(story())?, &self.stack(backends), self.options())
    }

    fn stack(&self, backends: Vec<Arc<dyn ComputeBackend>>) -> Stack {
        let none = OptionTable::new();
        let catalogue = catalogue();
        let opened = || -> Result<Stack, Failed> {
            Ok(Stack {
                compute: self.devices.iter().map(|name| (*name).to_owned()).zip(backends).collect(),
                storage: catalogue.open_storage(self.tier, &none)?,
                cache: catalogue.open_cache("lru", &none)?,
                planner: catalogue.open_planner("greedy", &none)?,
            })
        };
        opened().unwrap_or_else(|error| panic!("{error:?}"))
    }

    fn options(&self) -> EngineOptions {
        EngineOptions {
            context: 256,
            batch: self.batch,
            activations: self.activations,
            sparsity: self.sparsity,
            strict: self.strict,
            hot: self.hot,
            attention: self.attention.map(str::to_owned),
            prefill: self.prefill.map(str::to_owned),
            ..EngineOptions::default()
        }
    }
}

pub(crate) fn trials() -> Vec<Trial> {
    let reference = shared("reference-tiny-story-9m.json");
    let mut trials = Vec::new();
    let vulkan = Hybrid::of(["vulkan", "cpu"]);
    let cases = [
        ("cpu_reference", Hybrid::of(["reference", "cpu"])),
        (
            "cpu_reference::int8",
            Hybrid { activations: Activations::Int8, ..Hybrid::of(["reference", "cpu"]) },
        ),
        ("vulkan_home", vulkan),
        ("vulkan_home::int8", Hybrid { activations: Activations::Int8, ..vulkan }),
        ("cpu_home", Hybrid { attention: Some("cpu"), ..vulkan }),
        ("qnn", Hybrid { attention: Some("cpu"), ..Hybrid::of(["qnn", "cpu"]) }),
        (
            "qnn::int8",
            Hybrid { attention: Some("cpu"), activations: Activations::Int8, ..Hybrid::of(["qnn", "cpu"]) },
        ),
        ("cpu_home::copied", Hybrid { attention: Some("cpu"), import: "off", ..vulkan }),
        (
            "cpu_home::predictor",
            Hybrid { attention: Some("cpu"), sparsity: SparsityChoice::Predictor, ..vulkan },
        ),
    ];
    for (name, hybrid) in cases {
        let name = format!("hybrid::follows::{name}");
        let path = reference.clone();
        let run = move || follows(hybrid, &path);
        // The predictors leave something out: that is held against another limit, by the tests of predictors.
        if hybrid.sparsity == SparsityChoice::Predictor {
            trials.push(on_vulkan(name, move || same_as_the_oracle(hybrid)));
        } else if hybrid.devices.contains(&"vulkan") && reference.is_file() {
            trials.push(on_vulkan(name, run));
        } else if hybrid.devices.contains(&"qnn") && reference.is_file() {
            trials.push(on_device("qnn", name, run));
        } else {
            trials.push(trial_with(name, std::slice::from_ref(&reference), run));
        }
    }
    trials.push(on_vulkan("hybrid::both_devices_did_the_work".into(), both_devices_did_the_work));
    trials.push(on_vulkan("hybrid::the_cache_follows_the_sequence".into(), the_cache_follows_the_sequence));
    trials.push(on_vulkan("hybrid::memory_divides_the_model".into(), memory_divides_the_model));
    trials.push(on_vulkan("hybrid::memory_limits_are_kept".into(), memory_limits_are_kept));
    trials.push(on_vulkan("hybrid::given_rows_are_as_all_rows".into(), given_rows_are_as_all_rows));
    trials.push(Trial::test("hybrid::same_bits", || same_bits(Hybrid::of(["reference", "cpu"]))));
    trials.push(on_vulkan("hybrid::same_bits::vulkan".into(), move || {
        same_bits(Hybrid { attention: Some("cpu"), ..vulkan })
    }));
    trials.push(Trial::test("hybrid::devices_work_at_the_same_time", devices_work_at_the_same_time));
    trials.push(Trial::test("hybrid::a_lost_device_ends_the_run", a_lost_device_ends_the_run));
    trials.push(Trial::test("hybrid::a_device_that_denies_all_is_told", a_device_that_denies_all_is_told));
    trials
        .push(Trial::test("hybrid::a_device_does_the_part_that_it_can", a_device_does_the_part_that_it_can));
    trials.push(Trial::test("hybrid::what_needs_one_device_says_so", what_needs_one_device_says_so));
    trials
}

/// Every teacher-forced step of the reference, within the tolerance that one device is held to.
fn follows(hybrid: Hybrid, reference: &Path) -> Outcome {
    let engine = hybrid.load()?;
    let divided = engine.plan().layers.iter().all(|layer| layer.ffn.len() == 2);
    ensure(divided && engine.device_names().len() == 2, || format!("{:?}", engine.plan()))?;
    // An NPU's products are of f16 numbers.
    let f16 = engine.backends().iter().any(|device| device.describe().tolerance == ToleranceClass::F16);
    let limit = limit(hybrid.activations).max(if f16 { 5e-3 } else { 0.0 });
    let (logits, greedy) = follows_on(&engine, limit, reference)?;
    let (devices, activations) = (engine.device_names().join(" + "), hybrid.activations.name());
    show(|| format!("{devices} {activations}: logits {logits:.1e}, greedy {greedy:.1e}"));
    Ok(())
}

const IDS: [u32; 12] = [5, 431, 300, 301, 17, 511, 44, 300, 2, 90, 1023, 7];

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Logits after each id: five in batches, the rest one by one.
fn logits(engine: &Engine) -> Result<Vec<Vec<f32>>, Failed> {
    let mut session = engine.session()?;
    let mut rows = vec![session.prefill(&IDS[..5])?.to_vec()];
    for id in &IDS[5..] {
        rows.push(session.decode(*id)?.to_vec());
    }
    Ok(rows)
}

/// The largest difference, as a share of the largest logit.
fn distance(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let row = |(a, b): (&Vec<f32>, &Vec<f32>)| {
        let largest = a.iter().fold(0f32, |most, x| most.max(x.abs()));
        a.iter().zip(b).fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest
    };
    a.iter().zip(b).map(row).fold(0f32, f32::max)
}

/// As the same plan with the oracle in the first device's place, within the tolerance: what predictors leave out, both leave
/// out. The plan without predictors is further away than that.
fn same_as_the_oracle(hybrid: Hybrid) -> Outcome {
    let oracle = Hybrid { devices: ["reference", hybrid.devices[1]], ..hybrid };
    let (engine, oracle) = (hybrid.load()?, oracle.load()?);
    ensure(engine.plan().layers == oracle.plan().layers, || {
        format!("{:?}, {:?}", engine.plan(), oracle.plan())
    })?;
    let (found, wanted) = (logits(&engine)?, logits(&oracle)?);
    let dense = logits(&Hybrid { sparsity: SparsityChoice::Dense, ..hybrid }.load()?)?;
    let most = limit(hybrid.activations) as f32;
    let (near, far) = (distance(&found, &wanted), distance(&dense, &wanted));
    show(|| format!("{:?} beside the oracle: {near:.1e}; without predictors: {far:.1e}", hybrid.devices));
    ensure(near <= most, || format!("{near} from the oracle"))?;
    ensure(far > 4.0 * most, || format!("{far} without predictors: this shows nothing"))
}

fn count(session: &Session, device: &str, counter: &str) -> u64 {
    let statistics = session.statistics();
    let device = statistics.devices.iter().find(|counters| counters.name == device);
    device
        .and_then(|device| device.counters.iter().find(|(name, _)| name == counter))
        .map_or(0, |(_, value)| *value)
}

/// The driver's own counters, and those of the cpu, over one token.
fn both_devices_did_the_work() -> Outcome {
    let engine = Hybrid { attention: Some("cpu"), ..Hybrid::of(["vulkan", "cpu"]) }.load()?;
    let mut session = engine.session()?;
    session.prefill(&IDS)?;
    let counts = |session: &Session| {
        let vulkan = |name| count(session, "vulkan", name);
        [
            vulkan("command_buffers_executed"),
            vulkan("dispatches_executed"),
            count(session, "cpu", "weight_bytes_read"),
        ]
    };
    let before = counts(&session);
    session.decode(7)?;
    let after = counts(&session);
    // A share per layer on the driver: one command buffer with three products each.
    ensure(after[0] >= before[0] + 8 && after[1] >= before[1] + 8 * 3 && after[2] > before[2], || {
        format!("{before:?}, then {after:?}")
    })?;
    // The statistics say which part ran where, how often.
    let stages = session.statistics().stages;
    let of = |device: &str, what: &str| {
        let found = stages.iter().find(|stage| stage.device == device && stage.what == what);
        found.map_or(0, |stage| stage.submissions)
    };
    ensure(of("vulkan", "ffn") == 8 && of("cpu", "ffn") == 8 && of("cpu", "ffn.merge..logits") == 1, || {
        format!("{stages:?}")
    })
}

/// Batches on one device, single tokens on the other, and back: the cache is where it is needed.
fn the_cache_follows_the_sequence() -> Outcome {
    let hybrid = Hybrid { attention: Some("cpu"), prefill: Some("vulkan"), ..Hybrid::of(["vulkan", "cpu"]) };
    let engine = hybrid.load()?;
    let prefill = engine.plan().layers[0].prefill.as_ref().ok_or("no placement of batches")?;
    ensure(prefill.attention == 0 && engine.plan().layers[0].attention == 1, || format!("{prefill:?}"))?;
    let alone = crate::stack::Setup::on("cpu").load(&story())?;
    let run = |engine: &Engine| -> Result<Vec<Vec<f32>>, Failed> {
        let mut session = engine.session()?;
        let mut rows = vec![session.prefill(&IDS[..5])?.to_vec()];
        rows.push(session.decode(IDS[5])?.to_vec());
        rows.push(session.decode(IDS[6])?.to_vec());
        rows.push(session.prefill(&IDS[7..10])?.to_vec());
        session.rewind(6)?;
        rows.push(session.decode(IDS[10])?.to_vec());
        rows.push(session.prefill(&IDS[2..9])?.to_vec());
        rows.push(session.decode(IDS[11])?.to_vec());
        if engine.device_names().len() == 2 {
            // Keys and values of 8 layers, those that are not there yet.
            let row = 8 * 2 * 2 * u64::from(engine.model().layers[0].attention.n_head_kv as u32 * 32);
            let moved = session.statistics().kv_bytes_moved;
            ensure(moved > 0 && moved % row == 0, || {
                format!("{moved} bytes were moved, a position has {row}")
            })?;
        }
        Ok(rows)
    };
    let (found, wanted) = (run(&engine)?, run(&alone)?);
    let distance = distance(&found, &wanted);
    ensure(distance <= limit(Activations::F32) as f32, || format!("{distance} from one device"))
}

/// What a device may hold decides what it is given, and it never holds more: weights, caches and what lists need.
fn memory_divides_the_model() -> Outcome {
    let alone = crate::stack::Setup::on("cpu").load(&story())?;
    let wanted = logits(&alone)?;
    let mut before = 0;
    for limit in [5_000_000, 8_000_000, 12_000_000] {
        let hybrid = Hybrid {
            import: "off",
            memory_limit: limit,
            hot: None,
            attention: Some("cpu"),
            batch: 16,
            ..Hybrid::of(["vulkan", "cpu"])
        };
        let engine = hybrid.load()?;
        let mut session = engine.session()?;
        session.prefill(&IDS)?;
        session.decode(7)?;
        let peak = count(&session, "vulkan", "bytes_allocated_peak");
        let on_device = |share: &&engine_core::planner::FfnShare| share.device == 0;
        let shares = engine.plan().layers.iter().flat_map(|layer| &layer.ffn);
        let neurons: u32 = shares.filter(on_device).map(|share| share.clusters.len()).sum();
        show(|| format!("limit {limit}: {neurons} neurons on the device, at most {peak} bytes"));
        ensure(peak <= limit as u64, || format!("{peak} bytes where {limit} are allowed"))?;
        ensure(neurons > before, || format!("{neurons} neurons within {limit} bytes, {before} within less"))?;
        before = neurons;
        let distance = distance(&logits(&engine)?, &wanted);
        ensure(distance <= crate::reference::limit(Activations::F32) as f32, || {
            format!("{distance} from one device")
        })?;
    }
    Ok(())
}

/// Where a limit allows a plan it allows what the plan needs, to the last move of the KV cache; and what is allowed is used.
fn memory_limits_are_kept() -> Outcome {
    let plain = Hybrid { hot: None, batch: 16, strict: false, ..Hybrid::of(["vulkan", "cpu"]) };
    let (cpu, vulkan) = (Some("cpu"), Some("vulkan"));
    let cases = [
        plain,
        Hybrid { attention: cpu, import: "off", ..plain },
        Hybrid { attention: cpu, prefill: vulkan, import: "off", ..plain },
        Hybrid { attention: vulkan, prefill: cpu, ..plain },
    ];
    for case in cases {
        let mut best = 0.0f64;
        for limit in [400_000, 1_000_000, 1_700_000, 2_900_000, 5_000_000, 9_000_000] {
            let hybrid = Hybrid { memory_limit: limit, ..case };
            let at = || format!("{:?}, {:?}, {}, {limit}", case.attention, case.prefill, case.import);
            let devices = hybrid.open()?;
            let allowed = hybrid.plan_on(devices.clone());
            let engine = match hybrid.load_on(devices) {
                Ok(engine) => engine,
                Err(error) => {
                    ensure(allowed.is_err(), || format!("{}: planned, and then {error}", at()))?;
                    continue;
                }
            };
            allowed.map_err(|error| format!("{}: loaded, though {error}", at()))?;
            let mut session = engine.session()?;
            session.prefill(&IDS)?;
            session.decode(7)?;
            session.prefill(&IDS[..3])?;
            session.score(&IDS, &mut |_, _| ())?;
            let peak = count(&session, "vulkan", "bytes_allocated_peak");
            ensure(peak <= limit as u64, || format!("{}: {peak} bytes", at()))?;
            best = best.max(peak as f64 / limit as f64);
        }
        show(|| format!("{:?}, {:?}, {}: {best:.2}", case.attention, case.prefill, case.import));
        // A device that views weights where they are has little else to fill its memory with.
        let least = if case.import == "off" { 0.7 } else { 0.5 };
        ensure(best > least, || {
            format!("{:?}, {:?}, {}: {best}", case.attention, case.prefill, case.import)
        })?;
    }
    Ok(())
}

/// A device that is given the rows of its neurons alone answers as one that views all of them.
fn given_rows_are_as_all_rows() -> Outcome {
    for sparsity in [SparsityChoice::Auto, SparsityChoice::Predictor] {
        // The cold rest, with its masks, on the device that copies; the hot neurons on the cpu.
        let views = Hybrid { sparsity, attention: Some("cpu"), ..Hybrid::of(["cpu", "vulkan"]) };
        let copies = Hybrid { import: "off", ..views };
        let (views, copies) = (views.load()?, copies.load()?);
        let copied = copies.weight_bytes_copied();
        ensure(copied > views.weight_bytes_copied() && copied < views.weight_bytes(), || {
            format!("{copied} bytes are copied")
        })?;
        let distance = distance(&logits(&views)?, &logits(&copies)?);
        show(|| format!("{sparsity:?}: rows given beside rows viewed: {distance:.1e}"));
        ensure(distance <= 1e-4, || format!("{sparsity:?}: {distance} from a device that views all rows"))?;
    }
    Ok(())
}

/// One plan gives one answer: whatever the number of threads, the batch and the tier.
fn same_bits(hybrid: Hybrid) -> Outcome {
    let wanted: Vec<Vec<u32>> = logits(&hybrid.load()?)?.iter().map(|row| bits(row)).collect();
    for other in
        [Hybrid { threads: 1, ..hybrid }, Hybrid { tier: "ram", ..hybrid }, Hybrid { batch: 2, ..hybrid }]
    {
        let found: Vec<Vec<u32>> = logits(&other.load()?)?.iter().map(|row| bits(row)).collect();
        ensure(found == wanted, || {
            format!("other bits with {} threads, {}, batches of {}", other.threads, other.tier, other.batch)
        })?;
    }
    Ok(())
}

/// Devices, and what is under way on them.
type Watched = (Vec<Arc<Wrapped>>, Arc<Mutex<UnderWay>>);

fn wrapped(hybrid: &Hybrid, change: impl Fn(usize, Wrapped) -> Wrapped) -> Result<Watched, Failed> {
    let under_way = Arc::new(Mutex::new(UnderWay::default()));
    let devices = hybrid.open()?.into_iter().enumerate();
    let devices =
        devices.map(|(at, device)| Arc::new(change(at, Wrapped::new(device, at, &under_way)))).collect();
    Ok((devices, under_way))
}

fn backends(devices: &[Arc<Wrapped>]) -> Vec<Arc<dyn ComputeBackend>> {
    devices.iter().map(|device| Arc::clone(device) as Arc<dyn ComputeBackend>).collect()
}

/// Both shares of a layer are under way at once. With every share made to take a while, and then one of them twice that, a
/// step takes about what the slower one does (printed, not asserted: the times are the machine's).
fn devices_work_at_the_same_time() -> Outcome {
    // The cpu twice: the oracle answers only when it is done.
    let hybrid = Hybrid { threads: 1, ..Hybrid::of(["cpu", "reference"]) };
    for factors in [[1, 1], [2, 1], [1, 2]] {
        let unit = Duration::from_millis(4);
        let mut backends_of = hybrid.open()?;
        let second =
            catalogue().open_compute("cpu", &OptionTable::from_iter([("threads".into(), 1.into())]))?;
        backends_of[1] = second;
        let under_way = Arc::new(Mutex::new(UnderWay::default()));
        let devices: Vec<Arc<Wrapped>> = backends_of
            .into_iter()
            .enumerate()
            .map(|(at, device)| Arc::new(Wrapped::new(device, at, &under_way).taking(unit * factors[at])))
            .collect();
        let engine = hybrid.load_on(backends(&devices))?;
        let mut session = engine.session()?;
        session.prefill(&IDS[..5])?;
        let before = Instant::now();
        session.decode(7)?;
        let took = before.elapsed();
        show(|| {
            let sum = unit * (factors[0] + factors[1]) * 8;
            let most = unit * factors[0].max(factors[1]) * 8;
            format!(
                "shares of {factors:?} x {unit:?}: a step took {took:.1?}; the larger {most:?}, the sum {sum:?}"
            )
        });
        let most = under_way.lock().map_or(0, |under_way| under_way.most);
        ensure(most == 2, || format!("shares of {most} device(s) at the same time"))?;
    }
    Ok(())
}

fn a_lost_device_ends_the_run() -> Outcome {
    let hybrid = Hybrid::of(["reference", "cpu"]);
    for at in 0..2 {
        let (devices, _) = wrapped(&hybrid, |_, device| device)?;
        let engine = hybrid.load_on(backends(&devices))?;
        let mut session = engine.session()?;
        session.prefill(&IDS[..5])?;
        devices[at].fail_after(4);
        let error = session.decode(IDS[5]).err().ok_or("a lost device was not told")?.to_string();
        let name = hybrid.devices[at];
        ensure(
            error.contains(&format!("device `{name}`, decoding (from blk."))
                && error.contains("as the test wanted"),
            || error.clone(),
        )?;
        ensure(*session.tokens() == IDS[..5] && session.logits().is_empty(), || {
            "the sequence changed".into()
        })?;
        // The sequence is what it was before: what follows is as if nothing had happened.
        let found = bits(session.decode(IDS[5])?);
        ensure(found == bits(&logits(&hybrid.load()?)?[1]), || "other bits after a failure".into())?;
    }
    Ok(())
}

fn a_device_that_denies_all_is_told() -> Outcome {
    let hybrid = Hybrid { strict: false, ..Hybrid::of(["reference", "cpu"]) };
    let denying = |at: usize, device: Wrapped| if at == 0 { device.denying(everything) } else { device };
    let (devices, _) = wrapped(&hybrid, denying)?;
    let engine = hybrid.load_on(backends(&devices))?;
    ensure(engine.device_names() == ["cpu"], || format!("{:?}", engine.device_names()))?;
    let lines: Vec<String> = engine.plan().fallbacks.iter().map(ToString::to_string).collect();
    ensure(
        lines.iter().any(|line| line.contains("device reference") && line.contains("a test denies it")),
        || format!("{lines:?}"),
    )?;
    let strict = Hybrid { strict: true, ..hybrid };
    let error = strict.load_on(backends(&devices)).err().ok_or("strict allowed it")?.to_string();
    ensure(error.contains("strict") && error.contains("a test denies it"), || error.clone())
}

/// As with an NPU: products there, attention and norms here.
fn a_device_does_the_part_that_it_can() -> Outcome {
    let npu = |at: usize, device: Wrapped| if at == 0 { device.denying(products_only) } else { device };
    let hybrid = Hybrid { attention: Some("cpu"), ..Hybrid::of(["reference", "cpu"]) };
    let (devices, _) = wrapped(&hybrid, npu)?;
    let engine = hybrid.load_on(backends(&devices))?;
    let layer = &engine.plan().layers[0];
    let prefill = layer.prefill.as_ref().ok_or("no placement of batches")?;
    ensure(layer.attention == 1 && prefill.attention == 1 && prefill.projections == 0, || {
        format!("{layer:?}")
    })?;
    ensure(prefill.ffn.len() == 1 && prefill.ffn[0].device == 0, || format!("{prefill:?}"))?;
    let alone = crate::stack::Setup::on("cpu").load(&story())?;
    let distance = distance(&logits(&engine)?, &logits(&alone)?);
    ensure(distance <= limit(Activations::F32) as f32, || format!("{distance} from one device"))?;
    // Asked for no device by name, the first one was wanted for all, and a line says why it does not have it.
    let unasked = Hybrid { attention: None, strict: false, ..hybrid };
    let engine = unasked.load_on(backends(&devices))?;
    let lines: Vec<String> = engine.plan().fallbacks.iter().map(ToString::to_string).collect();
    ensure(
        lines
            .iter()
            .any(|line| line.contains("wanted reference, got cpu") && line.contains("on this device")),
        || format!("{lines:?}"),
    )?;
    let error = Hybrid { attention: Some("reference"), ..unasked }.load_on(backends(&devices));
    let error = error.err().ok_or("attention ran where it cannot")?.to_string();
    ensure(error.contains("attention = \"reference\"") && error.contains("on this device"), || error.clone())
}

fn what_needs_one_device_says_so() -> Outcome {
    use engine_runtime::{Observer, Wanted};
    let engine = Hybrid::of(["reference", "cpu"]).load()?;
    let wanted = Wanted { hidden: true, ..Wanted::default() };
    let error = Observer::new(&engine, wanted).err().ok_or("observed on two devices")?.to_string();
    ensure(error.contains("reference, cpu") && error.contains("one device"), || error.clone())?;
    let unknown = Hybrid { attention: Some("gpu"), ..Hybrid::of(["reference", "cpu"]) };
    let error = unknown.load_on(unknown.open()?).err().ok_or("an unknown device was taken")?.to_string();
    ensure(
        error.contains("`attention`") && error.contains("\"gpu\"") && error.contains("reference, cpu"),
        || error.clone(),
    )
}
