//! A valid file cut anywhere, changed anywhere: an error or a model, never a panic and never a large allocation.

use proptest::prelude::*;

use crate::allocations;
use crate::sample::{self, SIZES};

fn valid() -> (Vec<u8>, usize) {
    let bytes = sample::model(SIZES).to_bytes();
    let (file, ..) = sample::load(bytes.clone()).unwrap();
    let header = file.data_start() as usize;
    (bytes, header)
}

#[test]
fn cut_anywhere() {
    let (bytes, header) = valid();
    // Every length within the header; in the data, which is not looked at, some lengths are as good as all.
    for length in (0..header).chain((header..bytes.len()).step_by(997)).chain([bytes.len() - 1]) {
        let error = sample::load(bytes[..length].to_vec()).map(drop).unwrap_err().to_string();
        assert!(
            ["cut short", "damaged", "fetch it again"].iter().any(|words| error.contains(words)),
            "{length}: {error}"
        );
    }
    allocations::assert_small();
}

#[test]
fn any_byte_of_the_header_changed() {
    let (bytes, header) = valid();
    let (mut errors, mut tried) = (0, 0);
    // Every byte where numbers are; in the vocabulary, which is most of the header, every seventh.
    let vocabulary = bytes.windows(7).position(|window| window == b"<|endof").unwrap();
    let merges = bytes.windows(6).position(|window| window == b"merges").unwrap();
    for at in (0..header).filter(|at| !(vocabulary..merges).contains(at) || at % 7 == 0) {
        tried += 1;
        for value in [0, 0x80, 0xff, bytes[at] ^ 1] {
            let mut changed = bytes.clone();
            changed[at] = value;
            errors += usize::from(sample::load(changed).is_err());
        }
    }
    assert!(errors > tried, "only {errors} of 4 x {tried} changes were noticed");
    allocations::assert_small();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn numbers_of_the_header_changed(
        places in prop::collection::vec((any::<prop::sample::Index>(), prop::sample::select(vec![
            0_u64, 1, 2, 4, 8, 9, 12, 13, 255, 1 << 16, 1 << 31, u64::from(u32::MAX), 1 << 32, 1 << 40, 1 << 60,
            1 << 63, u64::MAX - 31, u64::MAX,
        ]), prop::sample::select(vec![1_usize, 4, 8])), 1..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let (mut bytes, header) = valid();
        for (index, value, width) in places {
            let at = index.index(header - 8);
            bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok((_, model, tokenizer)) = sample::load(bytes) {
            // What was accepted can be used.
            let ids = tokenizer.encode("hello <|im_end|> 12\n", tokenizer.adds_bos(), true).unwrap();
            prop_assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
            tokenizer.decode(&ids);
            prop_assert!(model.sampleable_vocab <= model.vocab_size);
        }
        allocations::assert_small();
    }

    #[test]
    fn any_bytes_behind_the_magic(bytes in prop::collection::vec(any::<u8>(), 0..400), version in 2_u32..4) {
        let mut file = b"PWRI".to_vec();
        file.extend(version.to_le_bytes());
        file.extend(bytes);
        let _ = sample::load(file);
        allocations::assert_small();
    }
}
