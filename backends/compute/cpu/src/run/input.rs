//! Rows of activations in the form that an operation's arithmetic and its weights ask for.

use engine_core::operation::Quantization;

use super::Run;
use crate::kernels::matmul::Input;
use crate::kernels::simd::BLOCK;
use crate::pool::Stopped;

/// What the weights need of quantised activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Whether activations are quantised at all.
    pub(crate) quantised: bool,
    /// Some weight multiplies codes.
    pub(crate) codes: bool,
    /// Some weight multiplies values.
    pub(crate) values: bool,
}

impl Needs {
    /// For these weight types.
    pub(crate) fn of(quantization: Quantization, formats: &[crate::kernels::format::WeightType]) -> Needs {
        let quantised = quantization == Quantization::Int8Blocks;
        Needs {
            quantised,
            codes: quantised && formats.iter().any(|f| f.has_integer_dot()),
            values: quantised && formats.iter().any(|f| !f.has_integer_dot()),
        }
    }
}

/// Where quantised rows lie in the shared memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Area {
    /// Codes.
    pub(crate) codes: usize,
    /// Scales.
    pub(crate) scales: usize,
    /// Values.
    pub(crate) values: usize,
    /// Elements between rows, a multiple of 32.
    pub(crate) stride: usize,
}

/// One quantised row of a thread's own.
#[derive(Default)]
pub(crate) struct Row {
    codes: Vec<i8>,
    scales: Vec<f32>,
    values: Vec<f32>,
}

/// Activations ready to be multiplied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ready {
    values: (*const f32, usize),
    codes: Option<(*const i8, *const f32, usize)>,
}

impl Ready {
    /// The form for a weight type.
    pub(crate) fn for_format(&self, format: crate::kernels::format::WeightType) -> Input {
        match self.codes {
            Some((codes, scales, stride)) if format.has_integer_dot() => {
                Input::Int8 { codes, scales, stride }
            }
            _ => self.values(),
        }
    }

    /// The values, quantised and back where the arithmetic says so.
    pub(crate) fn values(&self) -> Input {
        Input::F32 { data: self.values.0, stride: self.values.1 }
    }

    /// The values of a token.
    pub(crate) fn row(&self, token: usize) -> *const f32 {
        self.values.0.wrapping_add(token * self.values.1)
    }
}

/// Rows of f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    /// Token 0.
    pub(crate) data: *const f32,
    /// Elements between tokens.
    pub(crate) stride: usize,
    /// Elements of a row.
    pub(crate) n: usize,
    /// Number of tokens.
    pub(crate) tokens: usize,
}

/// Makes activations ready. One token is quantised by every thread for itself, several are shared out and followed by
/// a barrier. With `reuse`, what the last call left in `row` and `area` still stands.
///
/// The caller has had a barrier since the source was written and since the area was last read.
pub(crate) fn ready(
    run: &Run<'_>,
    source: Source,
    needs: Needs,
    row: &mut Row,
    area: Area,
    reuse: bool,
) -> Result<Ready, Stopped> {
    let plain = Ready { values: (source.data, source.stride), codes: None };
    if !needs.quantised {
        return Ok(plain);
    }
    let n = source.n;
    let padded = n.next_multiple_of(BLOCK);
    if source.tokens == 1 {
        if !reuse {
            row.codes.resize(padded.max(row.codes.len()), 0);
            row.scales.resize((padded / BLOCK).max(row.scales.len()), 0.0);
            row.values.resize(padded.max(row.values.len()), 0.0);
            // SAFETY: the source has `n` elements, the row's vectors were sized for them.
            unsafe {
                (run.kernels.quantise)(source.data, n, row.codes.as_mut_ptr(), row.scales.as_mut_ptr());
                if needs.values {
                    let (codes, scales) = (row.codes.as_ptr(), row.scales.as_ptr());
                    (run.kernels.dequantise)(codes, scales, n, row.values.as_mut_ptr());
                }
            }
        }
        return Ok(Ready {
            values: (row.values.as_ptr(), padded),
            codes: needs.codes.then_some((row.codes.as_ptr(), row.scales.as_ptr(), padded)),
        });
    }
    let codes = run.shared.at::<i8>(area.codes);
    let scales = run.shared.at::<f32>(area.scales);
    let values = run.shared.at::<f32>(area.values);
    if !reuse {
        let (start, end) = run.worker.share(source.tokens, 1);
        for t in start..end {
            // SAFETY: prepare sized the area for the list's capacity and widest row; each token has one thread.
            unsafe {
                let codes = codes.add(t * area.stride);
                let scales = scales.add(t * (area.stride / BLOCK));
                (run.kernels.quantise)(source.data.add(t * source.stride), n, codes, scales);
                if needs.values {
                    (run.kernels.dequantise)(codes, scales, n, values.add(t * area.stride));
                }
            }
        }
        run.worker.barrier()?;
    }
    Ok(Ready {
        values: (values, area.stride),
        codes: needs.codes.then_some((codes.cast_const(), scales.cast_const(), area.stride)),
    })
}
