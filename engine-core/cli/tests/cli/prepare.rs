//! `prepare`: what it writes computes what the model computes, and says how neurons behave. `perplexity` measures both.

use crate::Test;
use crate::program::{hybrid, model, run};
use formats::{GgufFile, ModelDescription};
use std::path::Path;

pub(crate) fn tests() -> Vec<Test> {
    vec![
        ("prepare_sorts_neurons_and_changes_nothing", sorts),
        ("prepare_sorts_the_neurons_of_each_expert", sorts_experts),
        ("prepare_refuses_what_it_should", refuses),
        ("prepare_calibrates_and_goes_on_where_it_stopped", goes_on),
        ("prepare_trains_predictors", trains),
        ("perplexity_is_that_of_score", perplexity),
    ]
}

const STORIES: &str = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park.\n\
    <|endoftext|>\nTom had a big red ball. He threw it to his dog Max, and Max ran after it as fast as he could.\n\
    <|endoftext|>\nThe sun was warm and the birds sang. Mia and her mother went to the shop to buy some bread.\n";

fn corpus(folder: &Path) -> String {
    let path = folder.join("stories.txt");
    std::fs::write(&path, STORIES).unwrap();
    path.to_str().unwrap().to_owned()
}

fn sorts() {
    let folder = tempfile::tempdir().unwrap();
    let (model, corpus) = (model(), corpus(folder.path()));
    let output = folder.path().join("prepared.gguf");
    let output = output.to_str().unwrap();
    let report = run(&["prepare", "-m", &model, "--corpus", &corpus, "-o", output, "--json"]).json();
    assert_eq!(report["layers"].as_array().unwrap().len(), 8);
    assert!(report["divergence"].as_f64().unwrap() < 1e-2, "{report}");
    assert!(report["layers"][0]["active"].as_f64().unwrap() < 0.5, "{report}");

    let prepared = ModelDescription::describe(&GgufFile::open(output).unwrap()).unwrap();
    for layer in &prepared.layers {
        let tensor = layer.ffn.frequency.as_ref().expect("a prepared layer has frequencies");
        let file = GgufFile::open(output).unwrap();
        let (numbers, _) = file.tensor_bytes(tensor).as_chunks::<4>();
        let frequency: Vec<f32> = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        assert!(frequency.is_sorted_by(|a, b| a >= b) && frequency[0] > frequency[1023], "{frequency:?}");
    }
    // Exact skipping is exact: not a bit of the answer changes, and it is chosen where nothing is asked for.
    let answer = |more: &[&str]| {
        let base = ["run", "-m", output, "-p", "Once upon a time", "-n", "60", "--temp", "0", "--json"];
        run(&[&base[..], more].concat()).json()
    };
    let (chosen, dense) = (answer(&[]), answer(&["--sparsity", "dense"]));
    assert_eq!(chosen["ids"], dense["ids"]);
    assert!(chosen["plan"].to_string().contains("gate-first"), "{}", chosen["plan"]);
}

/// A folder with a tensor per expert, another with experts of all kinds in one: gate-first is chosen for ReLU.
fn sorts_experts() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = corpus(folder.path());
    for (name, zero_below) in [("smallthinker", true), ("qwen3moe", false)] {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../runtime/tests/fixtures").join(name);
        let model = model.to_str().unwrap();
        let output = folder.path().join(format!("{name}.gguf"));
        let output = output.to_str().unwrap();
        let prepare = |more: &[&str]| {
            run(&[&["prepare", "-m", model, "--corpus", &corpus, "-o", output, "--json"][..], more].concat())
        };
        let report = prepare(&[]).json();
        let layers = report["layers"].as_array().unwrap();
        assert!(report["divergence"].as_f64().unwrap() < 1e-4, "{report}");
        let active = |layer: &serde_json::Value| layer["active"].as_f64().unwrap();
        assert!(layers.iter().all(|layer| active(layer) > 0.05 && active(layer) < 0.95), "{report}");

        let file = GgufFile::open(output).unwrap();
        let described = ModelDescription::describe(&file).unwrap();
        for (index, layer) in described.layers.iter().enumerate() {
            let experts = layer.ffn.experts.as_ref().unwrap().count;
            let tensor = layer.ffn.frequency.as_ref().unwrap();
            assert_eq!(tensor.dims, [layer.ffn.n_ff as u64, experts as u64]);
            let (numbers, _) = file.tensor_bytes(tensor).as_chunks::<4>();
            let frequency: Vec<f32> = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            for expert in frequency.chunks(layer.ffn.n_ff) {
                assert!(expert.is_sorted_by(|a, b| a >= b), "layer {index}: {expert:?}");
            }
            assert!(file.tensor(&format!("blk.{index}.ffn_down_t_exps.weight")).is_some());
        }
        let answer = |more: &[&str]| {
            let base = ["run", "-m", output, "-p", "Once upon a time", "-n", "40", "--temp", "0", "--json"];
            run(&[&base[..], more].concat()).json()
        };
        let (chosen, dense) = (answer(&[]), answer(&["--sparsity", "dense"]));
        assert_eq!(chosen["ids"], dense["ids"]);
        assert_eq!(chosen["plan"].to_string().contains("gate-first"), zero_below, "{}", chosen["plan"]);

        let force = "--force";
        prepare(&[force, "--planes", "gate"]).fails_with(&["bit planes", "mixture of experts"]);
        prepare(&[force, "--predictors", "train"]).fails_with(&["no predictors", "mixture of experts"]);
        prepare(&[force, "--policy", "threshold"]).fails_with(&["--policy threshold", "experts"]);
    }
}

fn refuses() {
    let folder = tempfile::tempdir().unwrap();
    let (model, corpus, hybrid) = (model(), corpus(folder.path()), hybrid(folder.path()));
    let output = folder.path().join("prepared.gguf");
    let output = output.to_str().unwrap();
    let prepare = |model: &str, corpus: &str, output: &str| {
        run(&["prepare", "-m", model, "--corpus", corpus, "-o", output, "--tokens", "20"])
    };
    let nowhere = folder.path().join("nowhere/prepared.gguf");
    prepare(&model, &corpus, nowhere.to_str().unwrap()).fails_with(&["nowhere", "no folder"]);
    assert!(!folder.path().join("nowhere").exists());
    prepare(&model, "absent.txt", output).fails_with(&["absent.txt"]);
    let empty = folder.path().join("empty.txt");
    std::fs::write(&empty, "").unwrap();
    prepare(&model, empty.to_str().unwrap(), output).fails_with(&["no tokens"]);
    let lines = folder.path().join("lines.jsonl");
    std::fs::write(&lines, "{\"text\": \"a\"}\n{\"kind\": 1}\n").unwrap();
    prepare(&model, lines.to_str().unwrap(), output).fails_with(&["line 2", "`text`"]);
    prepare(&model, &corpus, &model).fails_with(&[&model]);
    assert!(!Path::new(output).exists());
    assert_eq!(prepare(&model, &corpus, output).code, 0);
    prepare(&model, &corpus, output).fails_with(&["--force"]);
    let again = folder.path().join("again.gguf");
    prepare(output, &corpus, again.to_str().unwrap()).fails_with(&["prepared already"]);
    let planes =
        ["prepare", "-m", &model, "--corpus", &corpus, "-o", again.to_str().unwrap(), "--source", &corpus];
    run(&planes).fails_with(&["stories.txt"]);

    let policy = |more: &[&str]| {
        let base = ["prepare", "-m", &model, "--corpus", &corpus, "-o", again.to_str().unwrap(), "--policy"];
        run(&[&base[..], more].concat())
    };
    policy(&["bitplane", "--planes", "none"])
        .fails_with(&["--policy bitplane", "nothing is stored in planes"]);
    policy(&["predictor", "--predictors", "none"]).fails_with(&["--policy predictor", "no predictors"]);

    // What needs a model on one device leaves nothing behind.
    run(&["prepare", "-m", &model, "--corpus", &corpus, "-o", again.to_str().unwrap(), "--config", &hybrid])
        .fails_with(&["observing neurons", "reference, cpu", "--device"]);
    assert!(!folder.path().join("again.gguf.profile").exists());

    // Nothing that preparing did not make is overwritten or removed.
    let forced = ["prepare", "-m", &model, "--corpus", &corpus, "-o", &corpus, "--force"];
    run(&forced).fails_with(&["stories.txt", "is the file that is read"]);
    let beside = folder.path().join("again.gguf.profile");
    std::fs::create_dir_all(beside.join("sub")).unwrap();
    std::fs::write(beside.join("sub/notes.txt"), "precious").unwrap();
    let again = again.to_str().unwrap();
    prepare(&model, &corpus, again).fails_with(&["again.gguf.profile", "did not make", "--output"]);
    assert_eq!(std::fs::read_to_string(beside.join("sub/notes.txt")).unwrap(), "precious");
    std::fs::remove_dir_all(&beside).unwrap();
    std::os::unix::fs::symlink(folder.path(), &beside).unwrap();
    prepare(&model, &corpus, again).fails_with(&["again.gguf.profile", "no folder"]);
    std::fs::remove_file(&beside).unwrap();
}

/// Planes, margins and thresholds are in the file; a recording that is there is used, another one is not.
fn goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (model, corpus) = (model(), corpus(folder.path()));
    let output = folder.path().join("prepared.gguf");
    let output = output.to_str().unwrap();
    let prepare = |more: &[&str]| {
        let base = ["prepare", "-m", &model, "--corpus", &corpus, "-o", output, "--json", "--force"];
        run(&[&base[..], more].concat())
    };
    let first = prepare(&["--planes", "gate", "--policy", "bitplane", "--keep-profile"]);
    let chosen = run(&["run", "-m", output, "-p", "Once", "-n", "2", "--temp", "0", "--json"]).json();
    assert!(chosen["plan"].to_string().contains("bitplane"), "{}", chosen["plan"]);
    let recorded = folder.path().join("prepared.gguf.profile/recording.json");
    assert!(recorded.exists(), "{}", first.stderr);
    let report = first.json();
    let planes = &report["layers"][3]["bitplane"];
    let level = &planes["levels"][0];
    assert!(planes["margin"].as_f64().unwrap() >= 0.0 && level["threshold"] == 0.0, "{planes}");
    assert!(level["missed_when_tuned"].as_f64().unwrap() <= 0.002, "{planes}");
    let (kept, recall) = (level["kept"].as_f64().unwrap(), level["recall"].as_f64().unwrap());
    assert!(kept < 0.5 && recall > 0.8 && level["cosine"].as_f64().unwrap() > 0.99, "{planes}");
    let cats = report["layers"][3]["cats"].as_array().unwrap();
    let thresholds: Vec<f64> = cats.iter().map(|level| level["threshold"].as_f64().unwrap()).collect();
    assert!(thresholds.len() == 9 && thresholds.is_sorted(), "{thresholds:?}");
    let file = GgufFile::open(output).unwrap();
    assert!(
        file.tensor("blk.0.ffn_gate_high.weight").is_some() && file.tensor("blk.0.ffn_up.weight").is_some()
    );
    let floats = |key: &str| file.metadata().floats(key).unwrap().unwrap().len();
    assert_eq!((floats("thermocline.bitplane.deviations"), floats("thermocline.cats.threshold")), (8, 72));

    // What is in planes stays there, and it is told; a share beyond what was calibrated is told, too.
    let again = folder.path().join("again.gguf");
    let quantized = run(&["quantize", output, again.to_str().unwrap(), "q4_0"]);
    assert_eq!(quantized.code, 0, "{}", quantized.stderr);
    assert!(quantized.stderr.contains("8 matrices in bit planes"), "{}", quantized.stderr);
    let answer = run(&["run", "-m", again.to_str().unwrap(), "-p", "Once", "-n", "2", "--temp", "0"]);
    assert_eq!(answer.code, 0, "{}", answer.stderr);
    let short = ["-p", "Once", "-n", "1", "--temp", "0"];
    let beyond =
        run(&[&["run", "-m", output, "--sparsity", "threshold", "--skip", "0.93"][..], &short].concat());
    assert!(beyond.stderr.contains("from 0.1 to 0.9; 0.9 is used"), "{}", beyond.stderr);
    // Labelled by what ran, not by what was asked for.
    let measured =
        ["perplexity", "--separate", "--against", "auto", "--json", "--file", &corpus, "-m", output];
    assert_eq!(run(&measured).json()["against"]["policy"], "bitplane");

    // Other options, the same recording; the same options, the same results.
    let second = prepare(&["--planes", "none", "--keep-profile"]);
    assert!(second.stderr.contains("goes on behind"), "{}", second.stderr);
    assert_eq!(second.json()["layers"][3]["bitplane"], serde_json::Value::Null);
    assert!(GgufFile::open(output).unwrap().tensor("blk.0.ffn_gate.weight").is_some());
    let third = prepare(&["--tokens", "50"]);
    assert!(third.stderr.contains("made anew"), "{}", third.stderr);
    assert_eq!(third.json()["tokens"], 50);
    assert!(!recorded.exists(), "removed when all is written");
}

fn trains() {
    let folder = tempfile::tempdir().unwrap();
    let (model, corpus) = (model(), corpus(folder.path()));
    let output = folder.path().join("prepared.gguf");
    let output = output.to_str().unwrap();
    let flags =
        ["--predictors", "train", "--predictor-epochs", "2", "--predictor-rank", "32", "--planes", "none"];
    let base = ["prepare", "-m", &model, "--corpus", &corpus, "-o", output, "--json"];
    let report = run(&[&base[..], &flags].concat()).json();
    let predictor = &report["layers"][0]["predictor"];
    assert_eq!(predictor["rank"], 32, "{predictor}");
    let file = GgufFile::open(output).unwrap();
    let prepared = ModelDescription::describe(&file).unwrap();
    for layer in &prepared.layers {
        assert_eq!(layer.ffn.predictor.as_ref().unwrap().rank, 32);
    }
    assert_eq!(file.metadata().floats("thermocline.predictor.threshold").unwrap().unwrap().len(), 8);
    let none = ["--predictors", "none", "--planes", "none", "--force", "--quiet"];
    run(&[&base[..], &none].concat()).json();
    assert!(ModelDescription::describe(&GgufFile::open(output).unwrap()).unwrap().prediction.is_none());
}

/// The mean of what `score` says of a chunk's second half.
fn perplexity() {
    let folder = tempfile::tempdir().unwrap();
    let (model, corpus) = (model(), corpus(folder.path()));
    let flags = ["-m", &model, "--context", "32"];
    let measured =
        run(&[&["perplexity", "--file", &corpus, "--json", "--ids", "--chunks", "2"][..], &flags].concat())
            .json();
    let chunks = measured["ids"].as_array().unwrap();
    assert_eq!((chunks.len(), measured["chunk"].as_u64()), (2, Some(32)));
    let (mut sum, mut count) = (0.0, 0);
    for chunk in chunks {
        let ids: Vec<String> = chunk.as_array().unwrap().iter().map(ToString::to_string).collect();
        let scored = run(&[&["score", "--ids", &ids.join(",")][..], &flags].concat()).json();
        for position in &scored["positions"].as_array().unwrap()[16..31] {
            sum -= position["next_log_probability"].as_f64().unwrap();
            count += 1;
        }
    }
    let mean = measured["mean_negative_log_likelihood"].as_f64().unwrap();
    assert!((mean - sum / f64::from(count)).abs() < 1e-6, "{mean} is not {}", sum / f64::from(count));
    assert_eq!(measured["tokens"], count);
    let text = run(&[&["perplexity", "--file", &corpus][..], &flags].concat());
    assert!(text.stdout.starts_with("perplexity "), "{}", text.stdout);
    run(&["perplexity", "--file", &corpus, "-m", &model, "--context", "250"]).fails_with(&["250"]);
}
