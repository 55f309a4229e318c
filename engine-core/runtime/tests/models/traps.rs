//! Files that other engines stumbled over, where the right behaviour needs a whole run (facts/traps.md, rows 1, 2, 22).

use crate::stack::{Outcome, Setup, ensure, story};
use engine_runtime::{Activations, RuntimeError, SparsityChoice};
use formats::gguf::GgufWriter;
use formats::gguf::{Array, StringArray, Value};
use formats::{GgufFile, TensorInfo};
use libtest_mimic::Trial;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("traps::ids_past_the_token_list_are_never_sampled", ids_past_the_list),
        Trial::test("traps::a_separate_head_is_used_where_there_is_one", separate_head),
        Trial::test("traps::nan_ends_with_an_error", nan),
    ]
}

fn ids_past_the_list() -> Outcome {
    let file = GgufFile::open(story())?;
    let tokens = file.metadata().strings("tokenizer.ggml.tokens")?.ok_or("no tokens")?;
    let mut fewer = StringArray::default();
    for token in tokens.iter().take(tokens.len() - 4) {
        fewer.push(token);
    }
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("fewer.gguf");
    GgufWriter::copy_of(&file)
        .set("tokenizer.ggml.tokens", Value::Array(Array::Strings(fewer)))
        .write(&path)?;
    let mut session = Setup::on("cpu").load(&path)?.session()?;
    session.prefill(&[1, 2, 3])?;
    let (all, sampleable) = (session.logits().len(), session.sampleable_logits().len());
    ensure((all, sampleable) == (4096, 4092), || format!("{sampleable} of {all} ids may be sampled"))
}

fn separate_head() -> Outcome {
    let file = GgufFile::open(story())?;
    let table = file.tensor("token_embd.weight").ok_or("no embedding")?;
    // Every scale with its sign changed: the head's logits are the tied ones' negatives.
    let mut negative = file.tensor_bytes(table).to_vec();
    for block in negative.chunks_exact_mut(34) {
        block[1] ^= 0x80;
    }
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("untied.gguf");
    let mut writer = GgufWriter::copy_of(&file);
    writer.tensor("output.weight", table.dtype, &table.dims, negative)?;
    writer.write(&path)?;
    let (tied, untied) = (Setup::on("cpu").load(&story())?, Setup::on("cpu").load(&path)?);
    let bytes = untied.weight_bytes() - tied.weight_bytes();
    ensure(bytes == TensorInfo::byte_len(table), || format!("a head of its own adds {bytes} bytes"))?;
    ensure(untied.weight_bytes_per_token() == tied.weight_bytes_per_token(), || {
        "bytes per token differ".into()
    })?;
    let wanted: Vec<f32> = tied.session()?.prefill(&[1, 2, 3])?.iter().map(|logit| -logit).collect();
    ensure(untied.session()?.prefill(&[1, 2, 3])? == wanted, || "output.weight is not used".into())
}

fn nan() -> Outcome {
    let file = GgufFile::open(story())?;
    let down = file.tensor("blk.0.ffn_down.weight").ok_or("no down")?;
    let mut bytes = std::fs::read(story())?;
    let at = usize::try_from(down.file_range.start)?;
    bytes[at..at + 2].copy_from_slice(&[0x01, 0x7e]);
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("nan.gguf");
    std::fs::write(&path, bytes)?;
    let report = engine_runtime::check::check_tensors(&path)?;
    let lines: Vec<String> = report.faults.iter().map(ToString::to_string).collect();
    let wanted = "tensor `blk.0.ffn_down.weight` (Q8_0): block 0 has NaN";
    ensure(lines == [wanted], || format!("the check finds {lines:?}"))?;
    for activations in [Activations::F32, Activations::Int8] {
        let setup = Setup { activations, sparsity: SparsityChoice::Dense, ..Setup::on("cpu") };
        let mut session = setup.load(&path)?.session()?;
        let error = session.prefill(&[1, 2, 3]).err();
        ensure(matches!(error, Some(RuntimeError::NonFinite { .. })), || format!("prefill gives {error:?}"))?;
        let error = session.decode(4).err();
        ensure(matches!(error, Some(RuntimeError::NonFinite { .. })), || format!("decode gives {error:?}"))?;
    }
    Ok(())
}
