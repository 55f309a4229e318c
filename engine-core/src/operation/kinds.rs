//! The operations, each with its formula.

use super::SlotId;

/// What an operation computes. Shapes are written `[rows x columns]`; `T` is the number of tokens.
///
/// Adding a kind breaks no plug-in: it answers `supports` with No for codes that it does not know.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum OperationKind {
    /// `to = from`, converting nothing: equal types. One of the two may lie in host memory. Copies `T` rows where the
    /// slots are per token, everything otherwise.
    Copy {
        /// Source.
        from: SlotId,
        /// Target.
        to: SlotId,
    },
    /// `output[t] = scale * table[ids[t]]`. An id outside the table fails the submission.
    Embed {
        /// I32 `[T x 1]`.
        ids: SlotId,
        /// `[vocabulary x n]`, any weight dtype.
        table: SlotId,
        /// F32 `[T x n]`.
        output: SlotId,
        /// Factor (1 where the architecture has none).
        scale: f32,
    },
    /// Normalises groups of `weight`'s length within each row: `y = (x - m) / sqrt(v + epsilon) * weight + bias` with
    /// `m = 0, v = mean(x^2)` (RMS) or mean and variance (layer). A row of `k` groups is normalised per group.
    Norm {
        /// Which.
        norm: NormKind,
        /// Added to the variance.
        epsilon: f32,
        /// F32 `[T x k*n]`.
        input: SlotId,
        /// F32 `[1 x n]`.
        weight: SlotId,
        /// F32 `[1 x n]`.
        bias: Option<SlotId>,
        /// F32 `[T x k*n]`; may be `input`.
        output: SlotId,
    },
    /// `output[t][r] = sum_c weight[r][c] * input[t][c] + bias[r] (+ output[t][r] where accumulate)`.
    Linear {
        /// F32 `[T x c]`.
        input: SlotId,
        /// `[r x c]`, any weight dtype.
        weight: SlotId,
        /// F32 `[1 x r]`.
        bias: Option<SlotId>,
        /// F32 `[T x r]`.
        output: SlotId,
        /// Whether the result is added to what `output` holds.
        accumulate: bool,
    },
    /// Rotary position embedding of every head of each row, in place or not. The position of a token comes from the
    /// sequence spans of the submission.
    Rope(Rope),
    /// Appends each token's key and value at its position in the KV cache (round to nearest even into f16).
    KvAppend {
        /// F32 `[T x kv_heads*head_dim]`.
        key: SlotId,
        /// F32 `[T x kv_heads*head_dim]`.
        value: SlotId,
        /// KV cache: State, F16 `[positions x 2*kv_heads*head_dim]`, laid out as the backend likes.
        cache: SlotId,
        /// Key/value heads.
        kv_heads: u32,
        /// Elements of a head.
        head_dim: u32,
    },
    /// Causal attention of each token over the positions `first..=own` of its sequence in the KV cache, where `first`
    /// is 0 or, with a window `w`, the `w`-th last: `softmax(scale * q.k) . v` per head, head `h` reading KV head
    /// `h / (heads / kv_heads)`. With a soft cap `c` scores become `c * tanh(score / c)` before the softmax.
    Attention {
        /// F32 `[T x heads*head_dim]`.
        query: SlotId,
        /// KV cache, as in `KvAppend`; read only.
        cache: SlotId,
        /// F32 `[T x heads*head_dim]`.
        output: SlotId,
        /// Query heads; a multiple of `kv_heads`.
        heads: u32,
        /// Key/value heads.
        kv_heads: u32,
        /// Elements of a head.
        head_dim: u32,
        /// Factor on the scores, usually `1 / sqrt(head_dim)`.
        scale: f32,
        /// Sliding window in positions, own position included.
        window: Option<u32>,
        /// Soft cap on the scores.
        soft_cap: Option<f32>,
    },
    /// A feed-forward layer, dense or sparse.
    Ffn(Ffn),
    /// The `k` best experts of each token, `k` being the columns of `chosen`: those with the largest scores, of equal ones
    /// the lower index, NaN counting as the largest. `chosen[t]` has them ascending by index, and `weights[t]` has
    /// `scale * p_e` with `p = gating(scores[t])`, divided by the sum of the chosen `p` first where `normalise`.
    Route {
        /// F32 `[T x experts]`.
        scores: SlotId,
        /// I32 `[T x k]`.
        chosen: SlotId,
        /// F32 `[T x k]`.
        weights: SlotId,
        /// From scores to shares.
        gating: Gating,
        /// Whether the chosen shares sum to 1.
        normalise: bool,
        /// Factor on the shares, usually 1.
        scale: f32,
    },
    /// A mixture of experts.
    Experts(Experts),
    /// A low-rank predictor: `mask[t][i] = 1` where `(fc2 . relu(fc1 . input[t]))[i] >= threshold`, else 0.
    Predict {
        /// F32 `[T x n]`: whatever the model feeds its predictor, usually the residual before the norm.
        input: SlotId,
        /// `[rank x n]`.
        fc1: SlotId,
        /// `[n_ff x rank]`.
        fc2: SlotId,
        /// U8 `[T x n_ff]`.
        mask: SlotId,
        /// Compared with the score.
        threshold: f32,
    },
    /// `output = function(input)`, element by element.
    Activate {
        /// Which.
        function: Activation,
        /// F32 `[T x n]`.
        input: SlotId,
        /// F32 `[T x n]`; may be `input`.
        output: SlotId,
    },
    /// `output = left + right`: the residual, the merge of partial sums from several devices, a bias.
    Add {
        /// F32 `[T x n]`.
        left: SlotId,
        /// F32 `[T x n]`, or `[1 x n]` (not per token) added to every row.
        right: SlotId,
        /// F32 `[T x n]`; may be an input.
        output: SlotId,
    },
    /// `output = left * right`, element by element.
    Multiply {
        /// F32 `[T x n]`.
        left: SlotId,
        /// F32 `[T x n]`, or `[1 x n]` (not per token).
        right: SlotId,
        /// F32 `[T x n]`; may be an input.
        output: SlotId,
    },
    /// Writes the first `past + tokens` positions of the submission's one sequence in the canonical layout:
    /// `key[p][h*head_dim + d]`, and `value` alike.
    KvExport {
        /// KV cache; read only.
        cache: SlotId,
        /// F16 `[positions x kv_heads*head_dim]`.
        key: SlotId,
        /// F16 `[positions x kv_heads*head_dim]`.
        value: SlotId,
        /// Key/value heads.
        kv_heads: u32,
        /// Elements of a head.
        head_dim: u32,
    },
    /// The reverse of `KvExport`: fills the first `past + tokens` positions of the submission's one sequence.
    KvImport {
        /// F16 `[positions x kv_heads*head_dim]`.
        key: SlotId,
        /// F16 `[positions x kv_heads*head_dim]`.
        value: SlotId,
        /// KV cache.
        cache: SlotId,
        /// Key/value heads.
        kv_heads: u32,
        /// Elements of a head.
        head_dim: u32,
    },
}

/// Kind of normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NormKind {
    /// Root mean square.
    Rms,
    /// Mean and variance.
    Layer,
}

/// How a router's scores become shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Gating {
    /// `exp(s_e) / sum exp(s)`, over all experts.
    Softmax,
    /// `1 / (1 + exp(-s_e))`.
    Sigmoid,
}

/// A scalar function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// `x`.
    Identity,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    ReluSquared,
    /// `x / (1 + exp(-x))`.
    Silu,
    /// `x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))`.
    GeluTanh,
    /// `x/2 * (1 + erf(x / sqrt(2)))`.
    GeluErf,
}

impl Activation {
    /// Whether it is exactly zero for every input that is not positive, so that gate-first skipping is exact.
    pub fn is_zero_below(self) -> bool {
        matches!(self, Activation::Relu | Activation::ReluSquared)
    }

    /// Name, as in config and reports.
    pub fn name(self) -> &'static str {
        match self {
            Activation::Identity => "identity",
            Activation::Relu => "relu",
            Activation::ReluSquared => "relu-squared",
            Activation::Silu => "silu",
            Activation::GeluTanh => "gelu-tanh",
            Activation::GeluErf => "gelu-erf",
        }
    }
}

/// Rotary position embedding.
///
/// For pair `j` of a head's first `rotary_dim` elements the angle is `position * theta_j`,
/// `theta_j = base^(-2j / rotary_dim) / factors[j]`, changed by `scaling`; the other elements are copied.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// F32 `[T x k*head_dim]`.
    pub input: SlotId,
    /// F32 `[T x k*head_dim]`; may be `input`.
    pub output: SlotId,
    /// F32 `[1 x rotary_dim/2]`, divisors of the frequencies (llama 3.1); none means 1.
    pub factors: Option<SlotId>,
    /// Which elements form a pair.
    pub style: RopeStyle,
    /// Elements of a head.
    pub head_dim: u32,
    /// How many of them are rotated; even.
    pub rotary_dim: u32,
    /// Base of the frequencies.
    pub base: f32,
    /// Context extension.
    pub scaling: RopeScaling,
}

/// Which elements of a head form a rotated pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RopeStyle {
    /// `(2j, 2j + 1)`: neighbours.
    Interleaved,
    /// `(j, j + rotary_dim/2)`: NEOX, qwen2, gemma.
    Halves,
}

/// How rope frequencies are changed for contexts longer than trained.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// `theta_j / factor`.
    Linear {
        /// How many times longer the context is.
        factor: f32,
    },
    /// YaRN (Peng et al. 2023, section 3): with `dim(b) = rotary_dim * ln(original_context / (2 pi b)) / (2 ln base)`,
    /// `low = max(floor(dim(beta_fast)), 0)`, `high = min(ceil(dim(beta_slow)), rotary_dim - 1)` and
    /// `ramp_j = clamp((j - low) / max(high - low, 0.001), 0, 1)`, the angle frequency is
    /// `theta_j / factor * ramp_j + theta_j * (1 - ramp_j)`, and rotated elements are multiplied by
    /// `attention_factor * (1 + 0.1 ln(factor))`.
    Yarn {
        /// How many times longer the context is.
        factor: f32,
        /// The context that the model was trained with.
        original_context: u32,
        /// Extra factor on the magnitude, usually 1.
        attention_factor: f32,
        /// Usually 32.
        beta_fast: f32,
        /// Usually 1.
        beta_slow: f32,
    },
}

/// How `down` is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DownLayout {
    /// `[n_embd x n_ff]`: a row per output element.
    OutputRows,
    /// `[n_ff x n_embd]`: a row per neuron.
    NeuronRows,
}

/// Which neurons of the active ranges take part.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Selection {
    /// All of them.
    All,
    /// Those whose byte in `mask` is not 0. U8 `[T x n_ff]`. Of these, where the function is zero below zero, up is read
    /// only where the gate's activation is not zero, and down only where the product is not, as with gate-first.
    Mask(SlotId),
    /// Exact skipping for functions that are zero below zero: gate first, up only where the gate's activation is not
    /// zero, down only where the product is not zero. Equals `All` bit for bit, given finite weights and unquantised
    /// hidden activations (-0 equals +0).
    GateFirst,
    /// CATS: as gate-first, but a neuron is dropped where `|function(gate)| <= threshold`.
    Threshold(f32),
    /// Those that the high halves of the codes cannot rule out.
    Bitplane(Bitplane),
}

/// A selection by the high halves of weights in planes (see [`Ffn::gate_low`]).
///
/// With `e` the product of a row's high halves (`16 d (q - 7.53125)` per element, the middle of what the low half may be)
/// and the input, bias included, and `|x|` the Euclidean norm of the token's input, neuron `i` is kept where
/// `|function(e_gate + deviations * gate_deviation_i * |x|)| * |up_function(e_up + deviations * up_deviation_i * |x|)| *
/// down_norm_i > threshold`, or where that is NaN. The factors of up and of down are left out where their slots are.
/// What is kept is computed from both halves, and then skipped where it is zero, as by [`Selection::GateFirst`], where
/// `function` is zero below zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bitplane {
    /// F32 `[1 x n_ff]`: standard deviation of what the estimate of the gate leaves out, per unit of `|x|`.
    pub gate_deviation: SlotId,
    /// F32 `[1 x n_ff]`: the same for up, whose estimate then counts; needs [`Ffn::up_low`].
    pub up_deviation: Option<SlotId>,
    /// F32 `[1 x n_ff]`: the Euclidean norm of each neuron's row of down, or any other weight.
    pub down_norm: Option<SlotId>,
    /// How many standard deviations are allowed for; infinite is gate-first.
    pub deviations: f32,
    /// Neurons at or below are skipped.
    pub threshold: f32,
}

/// A mixture of experts: feed-forward layers of one shape, of which each token uses a few.
///
/// `output[t] = sum_j weights[t][j] * ffn_{chosen[t][j]}(input[t]) (+ output[t] where accumulate)`, summed in the order of
/// `j`, where `ffn_e` is [`Ffn`]'s formula over the expert's rows. The ids of a token ascend strictly; one that does not,
/// or that is no expert, fails the submission. Experts that no token chose are not read.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// F32 `[T x n_embd]`.
    pub input: SlotId,
    /// I32 `[T x k]`.
    pub chosen: SlotId,
    /// F32 `[T x k]`.
    pub weights: SlotId,
    /// `[experts*n_ff x n_embd]`, the rows of expert `e` starting at `e * n_ff`.
    pub gate: Option<SlotId>,
    /// `[experts*n_ff x n_embd]`.
    pub up: SlotId,
    /// `[experts*n_embd x n_ff]` or `[experts*n_ff x n_embd]`: see `down_layout`.
    pub down: SlotId,
    /// F32 `[T x n_embd]`.
    pub output: SlotId,
    /// Optional I32 `[T x 1]`: receives the number of neurons of the chosen experts whose `h` is not 0.
    pub active_count: Option<SlotId>,
    /// Number of experts.
    pub experts: u32,
    /// How each expert's `down` is stored.
    pub down_layout: DownLayout,
    /// Applied to the gate (or to up, where there is no gate).
    pub function: Activation,
    /// Applied to up where there is a gate: `Identity`, or `Relu` for dReLU.
    pub up_function: Activation,
    /// Which neurons of the chosen experts take part; not `Mask`.
    pub selection: Selection,
    /// Whether the result is added to what `output` holds.
    pub accumulate: bool,
}

/// A feed-forward layer over the active cluster ranges.
///
/// For each token and each neuron `i` that is in the active ranges and selected:
/// `h_i = function(gate_i . x + gate_bias_i) * up_function(up_i . x + up_bias_i)`, or without a gate
/// `h_i = function(up_i . x + up_bias_i)`; then `output[t] = sum_i h_i * down_i (+ output[t] where accumulate)`.
/// Neurons that are not active or not selected are not read and contribute nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Ffn {
    /// F32 `[T x n_embd]`.
    pub input: SlotId,
    /// `[n_ff x n_embd]`.
    pub gate: Option<SlotId>,
    /// `[n_ff x n_embd]`.
    pub up: SlotId,
    /// See `down_layout`.
    pub down: SlotId,
    /// I8 `[n_ff x n_embd/2]`: where it is given, `gate` is in planes. Then `gate` is Q4_0 and holds the high halves of
    /// codes of 8 bits, and this the low halves, packed as Q4_0 packs its codes: with `D` the scale of `gate`'s block,
    /// `q` its code and `l` the low half, the weight is `D/16 * (16 (q - 8) + l)`, which is a Q8_0 matrix's value, and
    /// that is also how it meets quantised activations.
    pub gate_low: Option<SlotId>,
    /// The same for `up`.
    pub up_low: Option<SlotId>,
    /// F32 `[1 x n_ff]`.
    pub gate_bias: Option<SlotId>,
    /// F32 `[1 x n_ff]`.
    pub up_bias: Option<SlotId>,
    /// F32 `[T x n_embd]`.
    pub output: SlotId,
    /// Optional F32 `[T x n_ff]`: receives `h`, 0 for neurons that took no part (profiling, audit).
    pub hidden: Option<SlotId>,
    /// Optional I32 `[T x 1]`: receives the number of neurons whose `h` is not 0.
    pub active_count: Option<SlotId>,
    /// How `down` is stored.
    pub down_layout: DownLayout,
    /// Applied to the gate (or to up, where there is no gate).
    pub function: Activation,
    /// Applied to up where there is a gate: `Identity`, or `Relu` for dReLU.
    pub up_function: Activation,
    /// Which neurons take part.
    pub selection: Selection,
    /// Whether the result is added to what `output` holds.
    pub accumulate: bool,
}
