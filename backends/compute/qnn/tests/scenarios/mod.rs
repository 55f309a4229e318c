//! What each process of the tests does.

mod device;

use std::path::Path;

use engine_core::backend::Counter;
use engine_core::module::ComputeModule;
use engine_core::options::OptionTable;
use engine_core::{ClusterRange, ComputeBackend, Error};
use libtest_mimic::Failed;
use thermocline_compute_qnn::QnnModule;

use crate::standin::{crashes, ensure};
use device::{Layer, Numbers};

/// Runs one.
pub(crate) fn run(scenario: &str, library: &str) -> Result<(), String> {
    let result = match scenario {
        "missing" => missing(library),
        "crash" => crashes("libthermocline_compute_qnn.so"),
        "hang" => hangs(library),
        "spellings" => spellings(library),
        "nothing" => unfit(library, "it offers no interface"),
        "other-version" => unfit(library, "it has no HTP backend (number 6) with core API 2"),
        "stuck-run" => stuck_run(library),
        "stuck-compiling" => stuck_compiling(library),
        "failing-run" => failing_run(library),
        "refused-binary" => refused_binary(library),
        "closed-device" => closed_device(library),
        "noisy" => {
            quiet(library, &["the library talks while it is asked", "the library talks while it opens"])
        }
        // What the library of the tested build prints when it is loaded.
        "quiet" => quiet(library, &["# LIBNATIVE: "]),
        "compiling-memory" => compiling_memory(library),
        "another-soc" => another_soc(library),
        "cache" => cache(library),
        "chunks" => chunks(library),
        "rounded" => rounded(library),
        "overlapping" => overlapping(library),
        "one-graph" => one_graph(library),
        "beyond" => beyond(library),
        "ranges" => ranges(library),
        "two-chips" => two_chips(library),
        "loads" => loads(library),
        other => Err(format!("no scenario `{other}`").into()),
    };
    result.map_err(|failed| failed.message().unwrap_or("failed").to_owned())
}

/// Options that name the library and keep nothing on disk.
fn options(library: &str) -> OptionTable {
    let mut options = OptionTable::new();
    options.insert("library".into(), library.into());
    options.insert("context_cache".into(), "off".into());
    options
}

/// Those and more, as TOML.
fn with(library: &str, more: &str) -> Result<OptionTable, Failed> {
    let mut options = options(library);
    options.extend(more.parse::<OptionTable>().map_err(|e| e.to_string())?);
    Ok(options)
}

/// The same with a folder of finished graphs.
fn cached(library: &str, folder: &Path, more: &str) -> Result<OptionTable, Failed> {
    with(library, &format!("context_cache = {:?}\n{more}", folder.display().to_string()))
}

fn open(options: &OptionTable) -> Result<Box<dyn ComputeBackend>, Error> {
    QnnModule.open(0, options)
}

fn counter(device: &dyn ComputeBackend, name: &str) -> u64 {
    let of = |c: &Counter| (c.name == name).then_some(c.value);
    device.counters().iter().find_map(of).unwrap_or(u64::MAX)
}

/// No library is no error of the plug-in: there are no devices, and it says what to install.
fn missing(library: &str) -> Result<(), Failed> {
    let devices = QnnModule.devices(&options(library))?;
    let why = QnnModule.why_none();
    ensure(devices.is_empty() && why.contains(library) && why.contains("pip download"), why)?;
    let error = open(&options(library)).err();
    ensure(matches!(&error, Some(Error::Unsupported { .. })), error)
}

fn unfit(library: &str, words: &str) -> Result<(), Failed> {
    let devices = QnnModule.devices(&options(library))?;
    let why = QnnModule.why_none();
    ensure(devices.is_empty() && why.contains(words) && why.contains(library), why)
}

fn lost(error: &Option<Error>, words: &str) -> bool {
    matches!(error, Some(Error::DeviceLost { detail }) if detail.contains(words))
}

fn hangs(library: &str) -> Result<(), Failed> {
    let options = with(library, "driver_timeout_ms = 300")?;
    let error = QnnModule.devices(&options).err();
    ensure(lost(&error, "did not end opening its device within 300 ms"), &error)?;
    let again = open(&options).err();
    ensure(lost(&again, "is not called again"), &again)
}

/// The third run never ends: its error says so, everything after it fails at once, and closing returns.
fn stuck_run(library: &str) -> Result<(), Failed> {
    let device = open(&with(library, "submit_timeout_s = 1")?)?;
    let layer = Layer::linear(&*device, 1, (16, 32), 1)?;
    for _ in 0..2 {
        layer.submit(&*device, 1)?;
    }
    let error = layer.submit(&*device, 1).err();
    ensure(lost(&error, "did not end a graph within 1000 ms"), &error)?;
    let after = layer.submit(&*device, 1).err();
    ensure(matches!(after, Some(Error::DeviceLost { .. })), after)?;
    let other = Layer::linear(&*device, 1, (8, 32), 1).err();
    ensure(matches!(other, Some(Error::DeviceLost { .. })), other)?;
    drop(device);
    let again = open(&options(library)).err();
    ensure(lost(&again, "is not called again"), &again)
}

fn stuck_compiling(library: &str) -> Result<(), Failed> {
    let device = open(&with(library, "compile_timeout_s = 1")?)?;
    let error = Layer::linear(&*device, 1, (16, 32), 1).err();
    ensure(lost(&error, "did not end compiling the graph of linear within 1000 ms"), &error)?;
    drop(device);
    Ok(())
}

/// A run that fails is that submission's error; the device goes on.
fn failing_run(library: &str) -> Result<(), Failed> {
    let device = open(&options(library))?;
    let layer = Layer::linear(&*device, 1, (16, 32), 1)?;
    let first = layer.run(&*device, 1)?;
    layer.submit(&*device, 1)?;
    let error = layer.submit(&*device, 1).err();
    ensure(matches!(&error, Some(Error::Internal { detail }) if detail.contains("QNN code 6001")), &error)?;
    let next = layer.run(&*device, 1)?;
    ensure(next == first, (next, first))
}

/// The library's own refusal of a binary names the file and what to do.
fn refused_binary(library: &str) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let device = open(&cached(library, folder.path(), "")?)?;
    drop(Layer::linear(&*device, 1, (16, 32), 1)?);
    let error = Layer::linear(&*device, 1, (16, 32), 1).err();
    let said =
        |detail: &str| detail.contains(".qnnctx: the library refuses") && detail.contains("remove the file");
    ensure(matches!(&error, Some(Error::Data { detail }) if said(detail)), &error)
}

/// A device that cannot be opened is an error with the library's code, as often as it is asked for.
fn closed_device(library: &str) -> Result<(), Failed> {
    for _ in 0..2 {
        let error = open(&options(library)).err();
        let said = error.as_ref().map(ToString::to_string).unwrap_or_default();
        ensure(said.contains("opening the device for SoC") && said.contains("14001"), &error)?;
        let listed = QnnModule.devices(&options(library)).err();
        ensure(listed.is_some_and(|error| error.to_string().contains("14001")), &said)?;
    }
    Ok(())
}

/// Another spelling of a path is the same library, which is not called again.
fn spellings(library: &str) -> Result<(), Failed> {
    let first = open(&with(library, "driver_timeout_ms = 300")?).err();
    ensure(lost(&first, "did not end opening its device within 300 ms"), &first)?;
    let path = Path::new(library);
    let (folder, file) = (path.parent().ok_or("no folder")?, path.file_name().ok_or("no file")?);
    let name = folder.file_name().ok_or("no name")?;
    let link = folder.join("link.so");
    std::os::unix::fs::symlink(path, &link)?;
    let spelled = [folder.join("..").join(name).join(file), folder.join(".").join(file), link.clone()];
    for other in &spelled {
        let error = open(&options(&other.display().to_string())).err();
        ensure(lost(&error, "is not called again"), (other, &error))?;
    }
    Ok(std::fs::remove_file(link)?)
}

/// The parent sees nothing of this on the standard output but what the program prints itself, and what the library printed
/// is told with the device.
fn quiet(library: &str, words: &[&str]) -> Result<(), Failed> {
    let devices = QnnModule.devices(&options(library))?;
    let device = open(&options(library))?;
    for description in devices.iter().chain([device.describe()]) {
        let note = description.notes.iter().find(|note| note.starts_with("the library printed: "));
        let told = |words: &&str| note.is_some_and(|note| note.contains(words));
        ensure(words.iter().all(told), description)?;
    }
    ensure(devices.len() == 1, devices)?;
    Layer::ffn(&*device, 2, (32, 64))?.run(&*device, 2)?;
    drop(device);
    Ok(())
}

/// A binary for another chip in a file's place ends the run with an error that says so.
fn another_soc(library: &str) -> Result<(), Failed> {
    let mut files = Vec::new();
    let folders = [tempfile::tempdir()?, tempfile::tempdir()?];
    for (folder, soc) in folders.iter().zip([57, 30]) {
        let device = open(&cached(library, folder.path(), &format!("soc = {soc}"))?)?;
        drop(Layer::linear(&*device, 1, (16, 32), 1)?);
        let file = std::fs::read_dir(folder.path())?.next().ok_or("no file")??.path();
        files.push(file);
    }
    ensure(files[0].file_name() != files[1].file_name(), &files)?;
    std::fs::copy(&files[0], &files[1])?;
    let device = open(&cached(library, folders[1].path(), "soc = 30")?)?;
    let error = Layer::linear(&*device, 1, (16, 32), 1).err();
    let said = |d: &str| {
        d.contains("made for SoC 57") && d.contains("this device is SoC 30") && d.contains("remove the file")
    };
    ensure(matches!(&error, Some(Error::Data { detail }) if said(detail)), &error)
}

/// A second opening loads what the first one compiled, and gives the same bits.
fn cache(library: &str) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let options = cached(library, folder.path(), "")?;
    let mut results = Vec::new();
    for (compiled, loaded) in [(2, 0), (0, 2)] {
        let device = open(&options)?;
        let one = Layer::ffn(&*device, 4, (64, 96))?.run(&*device, 3)?;
        let two = Layer::linear(&*device, 1, (16, 32), 1)?.run(&*device, 1)?;
        let counts = (counter(&*device, "graphs_compiled"), counter(&*device, "graphs_loaded"));
        ensure(counts == (compiled, loaded), counts)?;
        results.push((one, two));
    }
    ensure(results[0] == results[1], "a loaded graph gives other numbers")
}

/// 300 tokens are two whole chunks of 128 and a padded one; each token is what it is alone.
fn chunks(library: &str) -> Result<(), Failed> {
    let device = open(&options(library))?;
    let layer = Layer::ffn(&*device, 300, (64, 128))?;
    let many = layer.run(&*device, 300)?;
    let want = layer.reference(300);
    let error = Numbers::distance(&many, &want);
    ensure(error < 2e-3, error)?;
    ensure(counter(&*device, "graphs_executed") == 3, counter(&*device, "graphs_executed"))?;
    let few = layer.run(&*device, 130)?;
    ensure(few[..130 * 64] == many[..130 * 64], "a token's result depends on how many there are")
}

/// Weights in 8 bits are what they say they are: near the rounded ones in f64, not near the file's.
fn rounded(library: &str) -> Result<(), Failed> {
    for soc in [30, 57] {
        let device = open(&with(library, &format!("weights = 'w8'\nsoc = {soc}"))?)?;
        let layer = Layer::linear(&*device, 32, (64, 256), 1)?;
        let got = layer.run(&*device, 32)?;
        let near = Numbers::distance(&got, &layer.rounded_reference(32));
        let far = Numbers::distance(&got, &layer.reference(32));
        ensure(near < 2e-3 && far > near, (near, far))?;
    }
    Ok(())
}

/// An output that lies where another operation's input does is written before that is read.
fn overlapping(library: &str) -> Result<(), Failed> {
    let device = open(&options(library))?;
    let layer = Layer::linear(&*device, 2, (32, 32), 2)?;
    let apart = layer.run(&*device, 2)?;
    let together = layer.run_overlapping(&*device, 2)?;
    ensure(
        Numbers::distance(&together, &layer.chained_reference(2)) < 4e-3,
        "the second product read what is old",
    )?;
    ensure(together[64..] != apart[64..], "nothing overlaps")
}

/// Projections side by side are one graph.
fn one_graph(library: &str) -> Result<(), Failed> {
    let device = open(&options(library))?;
    let layer = Layer::linear(&*device, 4, (32, 64), 3)?;
    let got = layer.run(&*device, 4)?;
    ensure(Numbers::distance(&got, &layer.reference(4)) < 2e-3, "other numbers")?;
    let counts = (counter(&*device, "graphs_compiled"), counter(&*device, "graphs_executed"));
    ensure(counts == (1, 1), counts)
}

/// A token whose hidden activations leave f16's range has no number, and its neighbours have theirs.
fn beyond(library: &str) -> Result<(), Failed> {
    let device = open(&options(library))?;
    let mut layer = Layer::ffn(&*device, 3, (64, 96))?;
    let before = layer.run(&*device, 3)?;
    for factor in [5e4, 1e5] {
        layer.enlarge_first(&*device, factor)?;
        let got = layer.run(&*device, 3)?;
        ensure(got[..64].iter().all(|x| x.is_nan()), &got[..64])?;
        ensure(got[64..] == before[64..], "a neighbour changed")?;
    }
    Ok(())
}

/// A layer keeps graphs for the last four sets of ranges, and each gives its own neurons' sum.
fn ranges(library: &str) -> Result<(), Failed> {
    let device = open(&options(library))?;
    let layer = Layer::ffn(&*device, 1, (64, 96))?;
    let mut compiled = Vec::new();
    for first in [0, 16, 32, 48, 64, 64, 16, 0] {
        let got = layer.run_range(&*device, 1, ClusterRange::new(first, first + 17))?;
        let error = Numbers::distance(&got, &layer.reference_range(1, first as usize..first as usize + 17));
        ensure(error < 2e-3, (first, error))?;
        compiled.push(counter(&*device, "graphs_compiled"));
    }
    ensure(compiled == [1, 2, 3, 4, 5, 5, 5, 6], compiled)
}

/// The library knows one chip per process: a second one is refused while the first is open.
fn two_chips(library: &str) -> Result<(), Failed> {
    let first = open(&with(library, "soc = 57")?)?;
    let error = open(&with(library, "soc = 30")?).err();
    ensure(
        matches!(&error, Some(Error::Unsupported { detail }) if detail.contains("SoC 57 already")),
        &error,
    )?;
    let same = open(&with(library, "soc = 57")?)?;
    Layer::linear(&*same, 1, (16, 32), 1)?.run(&*same, 1)?;
    drop((first, same));
    let other = open(&with(library, "soc = 30")?)?;
    Layer::linear(&*other, 1, (16, 32), 1)?.run(&*other, 1)?;
    let unknown = open(&with(library, "soc = 9999")?).err();
    let said = |detail: &str| detail.contains("soc = 9999") && detail.contains("57 (SM8650)");
    ensure(matches!(&unknown, Some(Error::InvalidArgument { detail }) if said(detail)), unknown)
}

/// What a process takes besides, in KiB: stacks, the allocator's own, code that is paged in.
const BESIDES: u64 = 16 << 10;

/// Compiling a graph takes no more of the process's memory than is counted while it goes on, and less is counted afterwards;
/// where that much is not left, it is refused before the library hears of it.
fn compiling_memory(library: &str) -> Result<(), Failed> {
    const WEIGHTS: u64 = 4096 * 2048 * 2;
    let folder = tempfile::tempdir()?;
    let device = open(&cached(library, folder.path(), "")?)?;
    drop(Layer::linear(&*device, 1, (16, 32), 1)?);
    let list = Layer::unprepared_linear(&*device, (4096, 2048))?;
    let (counted, before) = (counter(&*device, "bytes_allocated"), status("VmRSS"));
    // From here on the most is counted anew.
    std::fs::write("/proc/self/clear_refs", "5")?;
    let executable = device.prepare(&list)?;
    let taken = status("VmHWM").saturating_sub(before);
    let peak = counter(&*device, "bytes_allocated_peak") - counted;
    let kept = counter(&*device, "bytes_allocated") - counted;
    if std::env::var_os("SHOW_DISTANCES").is_some() {
        eprint(&format!("{peak} bytes counted at most, {kept} kept, {taken} KiB taken"));
    }
    ensure(taken <= (peak >> 10) + BESIDES, (peak, kept, taken))?;
    ensure((WEIGHTS..WEIGHTS + (1 << 20)).contains(&kept) && peak > 3 * WEIGHTS, (peak, kept))?;
    device.release(executable)?;
    drop(device);
    // Room for the buffer of the weights, which are f32 there, and for the graph, but not for compiling it.
    let limit = 5 * WEIGHTS;
    let device = open(&with(library, &format!("memory_limit = {limit}"))?)?;
    let list = Layer::unprepared_linear(&*device, (4096, 2048))?;
    let error = device.prepare(&list).err();
    let said = |d: &str| d.contains("compiling the graph of linear needs") && d.contains("`memory_limit`");
    ensure(matches!(&error, Some(Error::OutOfMemory { detail }) if said(detail)), &error)?;
    let counts = (counter(&*device, "graphs_compiled"), counter(&*device, "bytes_allocated"));
    ensure(counts == (0, 2 * WEIGHTS), counts)?;
    drop(device);
    // What was compiled before is loaded within less.
    let device = open(&cached(library, folder.path(), &format!("memory_limit = {}", limit + WEIGHTS))?)?;
    let list = Layer::unprepared_linear(&*device, (4096, 2048))?;
    device.prepare(&list)?;
    ensure(counter(&*device, "graphs_loaded") == 1, counter(&*device, "graphs_loaded"))
}

/// The most that the process's memory may grow over the loads, in KiB: allocators keep what they got, and what is resident
/// goes up and down by several MiB from one load to the next.
const GROWTH: u64 = 8 << 10;

/// Fifty times (or THERMOCLINE_LOADS): open, compile, run, give back. Threads and files must not grow at all, memory no more
/// than the allocator's own noise: a leak of each load's weights would be 75 MiB.
fn loads(library: &str) -> Result<(), Failed> {
    let count: u64 = std::env::var("THERMOCLINE_LOADS").ok().and_then(|n| n.parse().ok()).unwrap_or(50);
    let (mut memory, mut handles) = (Vec::new(), Vec::new());
    for load in 1..=count {
        let device = open(&options(library))?;
        let layer = Layer::ffn(&*device, 4, (256, 1024))?;
        layer.run(&*device, 4)?;
        layer.release(&*device)?;
        let left = counter(&*device, "bytes_allocated");
        ensure(left == 0, format!("load {load} left {left} bytes"))?;
        drop(device);
        memory.push(status("VmRSS"));
        handles.push((entries("/proc/self/task")?, entries("/proc/self/fd")?));
    }
    let least = |of: &[u64]| of.iter().copied().min().unwrap_or(0);
    let (first, last) = (least(&memory[10..20]), least(&memory[memory.len() - 10..]));
    if std::env::var_os("SHOW_DISTANCES").is_some() {
        eprint(&format!(
            "least of ten loads: {first} KiB from the tenth on, {last} in the end; threads and files {:?}",
            handles.last()
        ));
    }
    ensure(handles[4] == handles[handles.len() - 1], (handles[4], handles.last()))?;
    ensure(
        last < first + GROWTH,
        format!("least of ten loads: {first} KiB from the tenth on, {last} in the end"),
    )
}

fn entries(folder: &str) -> Result<usize, Failed> {
    Ok(std::fs::read_dir(folder)?.count())
}

#[expect(clippy::print_stderr, reason = "a program of its own")]
fn eprint(words: &str) {
    eprintln!("{words}");
}

/// Memory of this process in KiB, by a field of /proc/self/status.
fn status(field: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':'));
    line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse().ok()).unwrap_or(0)
}
