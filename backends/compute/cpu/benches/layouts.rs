//! Layouts of weights for a first pass that decides which neurons take part, beside reading them whole: `cargo bench -p
//! compute-cpu --bench layouts`.
//!
//! A layer is gate and up, of which a first pass reads a part for every neuron and a second one the rest for half of them,
//! drawn at random; `down` is the same in all. What counts is the time of the processor, on weights that come from memory
//! (as many layers as fill 256 MiB for each layout), in turns, by the shortest of seven rounds: so it can be measured while
//! others use the machine.
//! Loops are written for AVX-512, as the kernels are; elsewhere the bench says that it has none.
#![allow(clippy::print_stdout, reason = "a bench reports on standard output")]

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    println!("the loops of this bench are AVX-512's; this processor is of another kind");
}

#[cfg(target_arch = "x86_64")]
fn main() {
    if !avx512::detected() {
        println!("the loops of this bench are AVX-512's, which this processor lacks");
        return;
    }
    println!("columns  layout                       bytes/block  ns/neuron   GB/s");
    for (columns, neurons) in [(576, 1536), (1536, 8960)] {
        avx512::measure(columns, neurons);
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;
    use std::time::Duration;

    /// Bytes of weights of a layout, of all layers together.
    const WEIGHTS: usize = 256 << 20;
    /// Rounds, of which the shortest counts.
    const ROUNDS: usize = 7;
    /// Passes of a round: the system counts time by its ticks, which are some milliseconds.
    const PASSES: u32 = 10;
    /// Neurons between first and second pass.
    const CHUNK: usize = 128;
    /// How far ahead memory is asked for.
    const AHEAD: usize = 4096;

    /// Codes of some bits that are read for every neuron, and what is left for the others.
    #[derive(Clone, Copy)]
    pub(super) struct Layout {
        name: &'static str,
        /// Bytes of a block of 32 in the first pass: two of scale, then planes of two bits and of one.
        first: usize,
        /// Bytes of a block in the second pass.
        second: usize,
        /// What the first pass unpacks.
        bits: u32,
        /// Rows of 16 that lie interleaved, four bytes of each in turn, instead of one after the other.
        interleaved: bool,
    }

    /// What is compared.
    pub(super) const LAYOUTS: [Layout; 5] = [
        Layout { name: "4 bits, whole", first: 18, second: 0, bits: 4, interleaved: false },
        Layout { name: "4 bits, 16 rows interleaved", first: 18, second: 0, bits: 4, interleaved: true },
        Layout { name: "4 bits as 3 + 1", first: 14, second: 4, bits: 3, interleaved: false },
        Layout { name: "4 bits as 2 + 2", first: 10, second: 8, bits: 2, interleaved: false },
        Layout { name: "8 bits as 4 + 4", first: 18, second: 16, bits: 4, interleaved: false },
    ];

    pub(super) fn detected() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("f16c")
    }

    /// The processor time that this thread has taken (the first number of `schedstat`, in nanoseconds).
    fn spent() -> Duration {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
        Duration::from_nanos(text.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or_default())
    }

    /// Activations of 128 elements: four blocks.
    struct Group {
        codes: [__m512i; 2],
        scales: [f32; 4],
    }

    /// # Safety
    /// The processor has AVX-512 with VNNI.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
    unsafe fn groups(count: usize) -> Vec<Group> {
        let codes = |k: usize| _mm512_set1_epi8(1 + k as i8);
        (0..count).map(|g| Group { codes: [codes(g % 5), codes(g % 3)], scales: [0.01; 4] }).collect()
    }

    /// Four blocks of a row times activations: scales `step` bytes apart at `scales`, codes apart from them or beside them.
    ///
    /// # Safety
    /// As for [`groups`]; the blocks exist.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
    #[inline]
    unsafe fn add(q: __m512i, scales: *const u8, step: usize, x: &Group, sum: __m512) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe {
            let bits = |j: usize| i64::from(scales.add(j * step).cast::<u16>().read_unaligned());
            let four = _mm_cvtsi64_si128(bits(0) | bits(1) << 16 | bits(2) << 32 | bits(3) << 48);
            let four = _mm_mul_ps(_mm_cvtph_ps(four), _mm_loadu_ps(x.scales.as_ptr()));
            let order = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            let mask = _mm512_set1_epi8(15);
            let dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_and_si512(q, mask), x.codes[0]);
            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(q), mask);
            let dot = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(dot, high, x.codes[1]));
            _mm512_fmadd_ps(dot, _mm512_permutexvar_ps(order, _mm512_castps128_ps512(four)), sum)
        }
    }

    /// Sixteen bytes of each of four blocks.
    ///
    /// # Safety
    /// As for [`add`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
    #[inline]
    unsafe fn four(p: *const u8, step: usize) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe {
            let q = _mm512_castsi128_si512(_mm_loadu_si128(p.cast()));
            let q = _mm512_inserti32x4::<1>(q, _mm_loadu_si128(p.add(step).cast()));
            let q = _mm512_inserti32x4::<2>(q, _mm_loadu_si128(p.add(2 * step).cast()));
            _mm512_inserti32x4::<3>(q, _mm_loadu_si128(p.add(3 * step).cast()))
        }
    }

    /// Four blocks whose first `bits` bits lie in planes: two bits of each code in 32 bytes, one in 16, after four scales.
    ///
    /// # Safety
    /// As for [`add`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
    #[inline]
    unsafe fn add_planes(p: *const u8, bits: u32, x: &Group, sum: __m512) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe {
            let three = _mm512_set1_epi8(3);
            let two = _mm512_broadcast_i64x4(_mm256_loadu_si256(p.add(8).cast()));
            let shift = _mm512_setr_epi64(0, 0, 0, 0, TWO, TWO, TWO, TWO);
            let two = _mm512_srlv_epi16(two, shift);
            let mut low = _mm512_and_si512(two, three);
            let mut high = _mm512_and_si512(_mm512_srli_epi16::<4>(two), three);
            if bits == 3 {
                let one = p.add(40).cast::<[u64; 2]>().read_unaligned();
                let four = _mm512_set1_epi8(4);
                low = _mm512_mask_add_epi8(low, one[0], low, four);
                high = _mm512_mask_add_epi8(high, one[1], high, four);
            }
            let dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), low, x.codes[0]);
            let dot = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(dot, high, x.codes[1]));
            let scales = _mm_cvtph_ps(_mm_loadl_epi64(p.cast()));
            let scales = _mm_mul_ps(scales, _mm_loadu_ps(x.scales.as_ptr()));
            let order = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            _mm512_fmadd_ps(dot, _mm512_permutexvar_ps(order, _mm512_castps128_ps512(scales)), sum)
        }
    }
    const TWO: i64 = 0x0002_0002_0002_0002;

    /// The first pass over rows that follow each other.
    ///
    /// # Safety
    /// As for [`groups`]; `data` has the rows, and [`AHEAD`] bytes and two rows beyond them.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
    unsafe fn first(layout: Layout, data: *const u8, rows: usize, blocks: usize, x: &[Group]) -> f32 {
        let stride = blocks * layout.first;
        let mut all = 0.0;
        // SAFETY: the caller's promise.
        unsafe {
            if layout.interleaved {
                // Sixteen scales, then of each eighth of a block four bytes of every row.
                for tile in 0..rows / 16 {
                    let mut sum = _mm512_setzero_ps();
                    let mask = _mm512_set1_epi8(15);
                    for block in 0..blocks {
                        let p = data.add(tile * 16 * stride + block * 288);
                        for line in 0..5 {
                            _mm_prefetch::<_MM_HINT_T0>(p.add(AHEAD + 64 * line).cast());
                        }
                        let (mut a, mut b) = (_mm512_setzero_si512(), _mm512_setzero_si512());
                        for part in 0..4 {
                            let q = _mm512_loadu_si512(p.add(32 + 64 * part).cast());
                            let x = _mm512_set1_epi32(0x0101_0101 * (1 + part as i32 % 2));
                            a = _mm512_dpbusd_epi32(a, _mm512_and_si512(q, mask), x);
                            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(q), mask);
                            b = _mm512_dpbusd_epi32(b, high, x);
                        }
                        let scale = _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()));
                        let scale = _mm512_mul_ps(scale, _mm512_set1_ps(x[block / 4].scales[0]));
                        sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(a, b)), scale, sum);
                    }
                    all += _mm512_reduce_add_ps(sum);
                }
                return all;
            }
            for row in 0..rows {
                let p = data.add(row * stride);
                let mut sum = _mm512_setzero_ps();
                for line in (0..stride).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(p.add(AHEAD + line).cast());
                }
                for (g, x) in x.iter().enumerate() {
                    let p = p.add(g * 4 * layout.first);
                    sum = if layout.bits == 4 {
                        add(four(p.add(2), 18), p, 18, x, sum)
                    } else {
                        add_planes(p, layout.bits, x, sum)
                    };
                }
                all += _mm512_reduce_add_ps(sum);
            }
        }
        all
    }

    /// The second pass over some rows, whose scales are in the first part. Each is asked for eight rows ahead.
    ///
    /// # Safety
    /// As for [`first`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
    unsafe fn second(
        layout: Layout,
        (data, rest): (*const u8, *const u8),
        rows: &[usize],
        blocks: usize,
        x: &[Group],
    ) -> f32 {
        let (stride, rest_stride) = (blocks * layout.first, blocks * layout.second);
        let mut all = 0.0;
        // SAFETY: the caller's promise.
        unsafe {
            for (i, &row) in rows.iter().enumerate() {
                let soon = rest.add(rows[(i + 8).min(rows.len() - 1)] * rest_stride);
                for line in (0..rest_stride).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(soon.add(line).cast());
                }
                let (p, r) = (data.add(row * stride), rest.add(row * rest_stride));
                let mut sum = _mm512_setzero_ps();
                for (g, x) in x.iter().enumerate() {
                    let p = p.add(g * 4 * layout.first);
                    let r = r.add(g * 4 * layout.second);
                    sum = match layout.second {
                        16 => add(_mm512_loadu_si512(r.cast()), p, layout.first, x, sum),
                        8 => {
                            let two = _mm512_broadcast_i64x4(_mm256_loadu_si256(r.cast()));
                            let shift = _mm512_setr_epi64(0, 0, 0, 0, TWO, TWO, TWO, TWO);
                            let two = _mm512_srlv_epi16(two, shift);
                            let two = _mm512_and_si512(two, _mm512_set1_epi8(0x33));
                            add(two, p, 2, x, sum)
                        }
                        _ => {
                            let one = r.cast::<[u64; 2]>().read_unaligned();
                            let low = _mm512_maskz_set1_epi8(one[0], 1);
                            let both = _mm512_mask_add_epi8(low, one[1], low, _mm512_set1_epi8(16));
                            add(both, p, 2, x, sum)
                        }
                    };
                }
                all += _mm512_reduce_add_ps(sum);
            }
        }
        all
    }

    /// A layout's weights and its best round.
    struct Case {
        layout: Layout,
        weights: Vec<u8>,
        layers: usize,
        best: Duration,
    }

    /// Measures all layouts for a shape and prints a row of the table for each.
    pub(super) fn measure(columns: usize, neurons: usize) {
        // Whole groups only: what is left of a row costs the same in all.
        let blocks = columns / 128 * 4;
        let matrix = |layout: Layout| blocks * neurons * (layout.first + layout.second);
        let mut cases = LAYOUTS.map(|layout| {
            let layers = WEIGHTS / (2 * matrix(layout));
            let bytes = layers * 2 * matrix(layout) + 2 * AHEAD;
            let byte = |i: usize| (i as u32).wrapping_mul(0x9e37_79b9).to_be_bytes()[1] & 0x3f;
            Case { layout, weights: (0..bytes).map(byte).collect(), layers, best: Duration::MAX }
        });
        let mut state = 1u64;
        let mut drawn = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 63 == 1
        };
        let survivors: Vec<usize> = (0..neurons).filter(|_| drawn()).collect();
        for _ in 0..ROUNDS {
            for case in &mut cases {
                let begun = spent();
                // SAFETY: the features were detected, and the weights are of this shape.
                (0..PASSES).for_each(|_| unsafe { round(case, &survivors, neurons, blocks) });
                case.best = case.best.min((spent() - begun) / PASSES);
            }
        }
        for Case { layout, layers, best, .. } in cases {
            let ns = best.as_secs_f64() * 1e9 / (layers * neurons) as f64;
            let bytes = format!("{} + {}/2", layout.first, layout.second);
            let read = 2.0 * blocks as f64 * (layout.first as f64 + layout.second as f64 / 2.0);
            println!("{columns:7}  {:28} {bytes:11} {ns:10.1} {:6.1}", layout.name, read / ns);
        }
    }

    /// Both passes over all layers of a case.
    ///
    /// # Safety
    /// As for [`groups`]; the case's weights have so many neurons and blocks.
    unsafe fn round(case: &Case, survivors: &[usize], neurons: usize, blocks: usize) {
        let layout = case.layout;
        let bytes = blocks * layout.first * neurons;
        let matrix = bytes + blocks * layout.second * neurons;
        // SAFETY: the caller's promise; there are bytes beyond the last row for what is asked for ahead.
        unsafe {
            let x = groups(blocks / 4);
            for layer in 0..case.layers {
                let at = |m: usize| case.weights.as_ptr().add((2 * layer + m) * matrix);
                for start in (0..neurons).step_by(CHUNK) {
                    let rows = CHUNK.min(neurons - start);
                    for m in 0..2 {
                        let p = at(m).add(start * blocks * layout.first);
                        std::hint::black_box(first(layout, p, rows, blocks, &x));
                    }
                    if layout.second > 0 {
                        let from = survivors.partition_point(|&s| s < start);
                        let to = survivors.partition_point(|&s| s < start + rows);
                        for m in 0..2 {
                            let planes = (at(m), at(m).add(bytes));
                            std::hint::black_box(second(layout, planes, &survivors[from..to], blocks, &x));
                        }
                    }
                }
            }
        }
    }
}
