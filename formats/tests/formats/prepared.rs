//! What prepared models hold: neurons in order, bit planes that lose nothing, the best source's weights, predictors.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use engine_core::DType;
use formats::convert::{
    Neurons, Options, Planes, Predictor, Types, WriteOptions, plan, plan_from, predictor_type,
};
use formats::gguf::{Array, GgufFile, Value};
use formats::model::{Down, ModelDescription};
use formats::quantise::planes::join_q8_0;
use formats::quantise::{dequantise, quantise};

use crate::sample::says;

const LAYERS: usize = 8;
const NEURONS: u32 = 1024;
const WIDTH: usize = 256;

fn story() -> GgufFile {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny-story-9m-q8_0.gguf");
    GgufFile::open(path).unwrap()
}

/// Another order for each layer.
fn order(layer: usize) -> Vec<u32> {
    (0..NEURONS).map(|i| (i * 7 + 3 * layer as u32) % NEURONS).collect()
}

fn neurons(up: bool) -> Vec<Neurons> {
    let layer = |layer| Neurons {
        experts: 0,
        order: order(layer),
        frequency: vec![0.5; NEURONS as usize],
        planes: Some(Planes {
            gate_deviation: vec![0.25; NEURONS as usize],
            up_deviation: up.then(|| vec![0.125; NEURONS as usize]),
            down_norm: vec![2.0; NEURONS as usize],
        }),
        predictor: None,
    };
    (0..LAYERS).map(layer).collect()
}

fn written(file: &GgufFile, original: Option<&GgufFile>, options: &Options) -> GgufFile {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("out.gguf");
    let how = WriteOptions { threads: 3, force: false };
    let output = plan_from(file, original, options).unwrap();
    output.write(&target, &how, &mut |_, _| {}, &AtomicBool::new(false)).unwrap();
    GgufFile::parse("out.gguf", fs::read(&target).unwrap()).unwrap()
}

fn bytes<'a>(file: &'a GgufFile, name: &str) -> &'a [u8] {
    file.tensor_bytes(file.tensor(name).unwrap_or_else(|| panic!("{name}")))
}

/// Rows of a tensor in another order.
fn permuted(bytes: &[u8], order: &[u32]) -> Vec<u8> {
    let row = bytes.len() / order.len();
    order.iter().flat_map(|&i| bytes[i as usize * row..(i as usize + 1) * row].to_vec()).collect()
}

#[test]
fn planes_hold_every_bit_of_the_rows_in_order() {
    let file = story();
    let options = Options { neurons: Some(neurons(true)), ..Options::default() };
    let prepared = written(&file, None, &options);
    let model = ModelDescription::describe(&prepared).unwrap();
    for layer in 0..LAYERS {
        for part in ["gate", "up"] {
            let name = |what: &str| format!("blk.{layer}.ffn_{part}{what}");
            let high = prepared.tensor(&name("_high.weight")).unwrap();
            assert_eq!((high.dtype, &high.dims[..]), (DType::Q4_0, &[WIDTH as u64, NEURONS.into()][..]));
            let low = prepared.tensor(&name("_low.weight")).unwrap();
            assert_eq!((low.dtype, &low.dims[..]), (DType::I8, &[WIDTH as u64 / 2, NEURONS.into()][..]));
            assert!(prepared.tensor(&name(".weight")).is_none());
            let whole = join_q8_0(prepared.tensor_bytes(high), prepared.tensor_bytes(low)).unwrap();
            assert!(whole == permuted(bytes(&file, &name(".weight")), &order(layer)), "layer {layer} {part}");
            let deviation = if part == "gate" { 0.25f32 } else { 0.125 };
            assert_eq!(
                bytes(&prepared, &name("_deviation")),
                deviation.to_le_bytes().repeat(NEURONS as usize)
            );
        }
        let norms = bytes(&prepared, &format!("blk.{layer}.ffn_down_norm"));
        assert_eq!(norms, 2.0f32.to_le_bytes().repeat(NEURONS as usize));
        let predictor = format!("blk.{layer}.fc2.weight");
        assert!(bytes(&prepared, &predictor) == permuted(bytes(&file, &predictor), &order(layer)));
        let ffn = &model.layers[layer].ffn;
        assert!(matches!(ffn.down, Down::Transposed(_)) && ffn.frequency.is_some());
    }
}

#[test]
fn a_quantised_model_is_prepared_from_its_original() {
    let folder = tempfile::tempdir().unwrap();
    let (file, small) = (story(), folder.path().join("q4.gguf"));
    let types = Types { matrices: Some(DType::Q4_0), ..Types::default() };
    let how = WriteOptions { threads: 2, force: false };
    let quantised = plan(&file, &Options { types, ..Options::default() }).unwrap();
    quantised.write(&small, &how, &mut |_, _| {}, &AtomicBool::new(false)).unwrap();
    let small = GgufFile::open(&small).unwrap();
    let options = Options { neurons: Some(neurons(false)), ..Options::default() };
    let prepared = written(&small, Some(&file), &options);
    let high = bytes(&prepared, "blk.3.ffn_gate_high.weight");
    let whole = join_q8_0(high, bytes(&prepared, "blk.3.ffn_gate_low.weight")).unwrap();
    assert!(whole == permuted(bytes(&file, "blk.3.ffn_gate.weight"), &order(3)));
    // Rows of up are rounded once, from the original: as they were when the model was quantised.
    assert!(
        bytes(&prepared, "blk.3.ffn_up.weight") == permuted(bytes(&small, "blk.3.ffn_up.weight"), &order(3))
    );
    // So is down, whose blocks are along the other side now.
    let stored = prepared.tensor("blk.3.ffn_down_t.weight").unwrap();
    assert_eq!(stored.dtype, DType::Q4_0);
    let mut down = vec![0.0; WIDTH * NEURONS as usize];
    dequantise(DType::Q8_0, bytes(&file, "blk.3.ffn_down.weight"), &mut down).unwrap();
    let column =
        |i: u32| (0..WIDTH).map(|row| down[row * NEURONS as usize + i as usize]).collect::<Vec<f32>>();
    let first = quantise(DType::Q4_0, &column(order(3)[0])).unwrap();
    assert!(prepared.tensor_bytes(stored)[..first.len()] == first);
    // Without the original the planes hold what four bits left.
    let worse = written(&small, None, &options);
    assert!(bytes(&worse, "blk.3.ffn_gate_high.weight") != high);
    // Nor is down rounded to four bits a second time, unless that is asked for.
    assert_eq!(worse.tensor("blk.3.ffn_down_t.weight").unwrap().dtype, DType::Q8_0);
    assert!(plan(&small, &options).unwrap().lines.iter().any(|line| line.contains("second time")));
    let kept = written(&small, None, &Options { keep_down_type: true, ..options });
    assert_eq!(kept.tensor("blk.3.ffn_down_t.weight").unwrap().dtype, DType::Q4_0);
}

#[test]
fn another_model_is_no_source() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.gguf");
    let mut stored = fs::read(story().path()).unwrap();
    let range = story().tensor("blk.2.ffn_up.weight").unwrap().file_range.clone();
    // The same shapes; codes of one matrix have the other sign.
    let blocks = stored[range.start as usize..range.end as usize].chunks_exact_mut(34);
    blocks.for_each(|block| block[2..].iter_mut().for_each(|code| *code = code.wrapping_neg()));
    fs::write(&other, stored).unwrap();
    let (file, other) = (story(), GgufFile::open(&other).unwrap());
    let error = plan_from(&file, Some(&other), &Options::default()).unwrap_err();
    says(&error, &["other.gguf", "blk.2.ffn_up.weight", "another model"]);
}

#[test]
fn trained_predictors_take_the_place_of_others() {
    let file = story();
    let (rank, neurons_) = (32, NEURONS as usize);
    let fc1 = quantise(predictor_type(WIDTH as u64), &vec![0.5; rank * WIDTH]).unwrap();
    let rows: Vec<f32> = (0..neurons_ * rank).map(|at| (at / rank) as f32).collect();
    let fc2 = quantise(DType::Q8_0, &rows).unwrap();
    let mut layers = neurons(false);
    layers[1].predictor = Some(Predictor { rank: rank as u64, fc1: fc1.clone(), fc2: fc2.clone() });
    let keys = vec![("thermocline.test".to_owned(), Value::Array(Array::F32(vec![1.5])))];
    let options = Options { neurons: Some(layers.clone()), keys, ..Options::default() };
    let prepared = written(&file, None, &options);
    assert_eq!(prepared.tensor("blk.1.fc1.weight").unwrap().dims, [WIDTH as u64, 32]);
    assert!(bytes(&prepared, "blk.1.fc1.weight") == fc1);
    assert!(bytes(&prepared, "blk.1.fc2.weight") == permuted(&fc2, &order(1)));
    let own = prepared.tensor("blk.2.fc1.weight").unwrap();
    assert_eq!((&own.dims[..], own.dtype), (&[WIDTH as u64, 96][..], DType::Q8_0), "the model's own");
    assert_eq!(prepared.metadata().floats("thermocline.test").unwrap().unwrap(), [1.5]);
    layers[1].predictor = Some(Predictor { rank: 64, fc1, fc2 });
    let options = Options { neurons: Some(layers), ..Options::default() };
    says(&plan(&file, &options).unwrap_err(), &["predictor", "blk.1."]);
}

#[test]
fn what_does_not_fit_the_layer_is_refused() {
    let file = story();
    let refused = |change: fn(&mut Neurons), parts: &[&str]| {
        let mut layers = neurons(true);
        change(&mut layers[5]);
        let options = Options { neurons: Some(layers), ..Options::default() };
        says(&plan(&file, &options).unwrap_err(), parts);
    };
    refused(|layer| layer.order[0] = layer.order[1], &["layer 5", "permutation"]);
    refused(
        |layer| layer.planes.as_mut().unwrap().gate_deviation.truncate(9),
        &["blk.5.ffn_gate", "deviation"],
    );
    refused(|layer| layer.planes.as_mut().unwrap().down_norm.push(1.0), &["layer 5", "down"]);
}
