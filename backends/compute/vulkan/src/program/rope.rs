//! Angles of rotary position embeddings, computed on the host in f64: every device then rotates by the same numbers.

use engine_core::operation::{OperationKind, OperationList, RopeScaling};
use engine_core::{Error, Result};

use super::Shared;
use super::transfer::download;
use crate::memory::Place;

/// Frequencies that ropes share.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Table {
    frequencies: Vec<f64>,
    magnitude: f64,
}

impl Table {
    pub(crate) fn pairs(&self) -> usize {
        self.frequencies.len()
    }

    /// Cosine and sine of each pair at a position, as bits of f32.
    pub(crate) fn angles(&self, position: u32) -> Vec<u32> {
        let both = |theta: &f64| {
            let (sine, cosine) = (f64::from(position) * theta).sin_cos();
            [(cosine * self.magnitude) as f32, (sine * self.magnitude) as f32].map(f32::to_bits)
        };
        self.frequencies.iter().flat_map(both).collect()
    }
}

/// `theta_j` and the factor on rotated elements, as [`RopeScaling`] defines them.
fn frequencies(rotary_dim: u32, base: f32, scaling: RopeScaling, factors: &[f32]) -> Option<Table> {
    let (dim, base) = (f64::from(rotary_dim), f64::from(base));
    let plain =
        |j: usize| base.powf(-2.0 * j as f64 / dim) / factors.get(j).map_or(1.0, |factor| f64::from(*factor));
    let pairs = 0..rotary_dim as usize / 2;
    Some(match scaling {
        RopeScaling::None => Table { frequencies: pairs.map(plain).collect(), magnitude: 1.0 },
        RopeScaling::Linear { factor } => {
            Table { frequencies: pairs.map(|j| plain(j) / f64::from(factor)).collect(), magnitude: 1.0 }
        }
        RopeScaling::Yarn { factor, original_context, attention_factor, beta_fast, beta_slow } => {
            let factor = f64::from(factor);
            let turns = |beta: f32| {
                let wave = f64::from(original_context) / (f64::from(beta) * 2.0 * std::f64::consts::PI);
                dim * wave.ln() / (2.0 * base.ln())
            };
            let low = turns(beta_fast).floor().max(0.0);
            let high = turns(beta_slow).ceil().min(dim - 1.0);
            let blended = |j: usize| {
                let ramp = ((j as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                plain(j) / factor * ramp + plain(j) * (1.0 - ramp)
            };
            let magnitude = f64::from(attention_factor) * (1.0 + 0.1 * factor.ln());
            Table { frequencies: pairs.map(blended).collect(), magnitude }
        }
        _ => return None,
    })
}

/// The tables of a list's ropes, each once, and which one each operation uses.
pub(super) fn tables(
    shared: &Shared,
    list: &OperationList,
    fixed: &[Option<Place>],
) -> Result<(Vec<Table>, Vec<Option<usize>>)> {
    let (mut tables, mut used) = (Vec::<Table>::new(), Vec::new());
    let mut read: Vec<(u32, Vec<f32>)> = Vec::new();
    for operation in &list.operations {
        let OperationKind::Rope(rope) = &operation.kind else {
            used.push(None);
            continue;
        };
        let factors = match rope.factors {
            None => Vec::new(),
            Some(id) => match read.iter().find(|(known, _)| *known == id.0) {
                Some((_, values)) => values.clone(),
                None => {
                    let place = fixed.get(id.0 as usize).and_then(Option::as_ref);
                    let place = place.ok_or_else(|| Error::internal("factors of rope lie nowhere"))?;
                    let bytes = download(shared, place)?;
                    let number = |b: &[u8]| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]);
                    let values: Vec<f32> = bytes.chunks_exact(4).map(number).collect();
                    read.push((id.0, values.clone()));
                    values
                }
            },
        };
        let table = frequencies(rope.rotary_dim, rope.base, rope.scaling, &factors)
            .ok_or_else(|| Error::unsupported(format!("{}: an unknown rope scaling", operation.label)))?;
        let at = tables.iter().position(|known| *known == table).unwrap_or_else(|| {
            tables.push(table);
            tables.len() - 1
        });
        used.push(Some(at));
    }
    Ok((tables, used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalings_follow_their_formulas() {
        let plain = frequencies(8, 10_000.0, RopeScaling::None, &[]).unwrap();
        assert_eq!(plain.pairs(), 4);
        assert!((plain.frequencies[1] - 0.1).abs() < 1e-12);
        let linear =
            frequencies(8, 10_000.0, RopeScaling::Linear { factor: 4.0 }, &[1.0, 2.0, 1.0, 1.0]).unwrap();
        assert!((linear.frequencies[1] - 0.1 / 8.0).abs() < 1e-12);
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            original_context: 32,
            attention_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
        };
        let yarn = frequencies(8, 10_000.0, yarn, &[]).unwrap();
        assert!((yarn.magnitude - (1.0 + 0.1 * 4f64.ln())).abs() < 1e-12);
        assert!(
            (yarn.frequencies[0] - 1.0).abs() < 1e-12 && yarn.frequencies[3] < plain.frequencies[3] / 3.0
        );
        assert_eq!(plain.angles(0)[..2], [1f32.to_bits(), 0]);
    }
}
