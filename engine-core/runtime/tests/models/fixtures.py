"""Makes `tests/fixtures`: for each architecture a tiny random model as Hugging Face publishes them, and its logits.

usage: python3 fixtures.py [NAME ...]     (torch, transformers, safetensors, tokenizers; made with the versions in
                                           tests/fixtures/VERSIONS)

A folder holds config.json, model.safetensors, tokenizer.json and reference.json: `ids`, and under `logits` a list of
`vocabulary` numbers for each of them, from the library's own model in f32. A folder without weights has those of the
fixture that `weights` names below. Weights, biases and norms are random, with a seed made from the name. Before a folder
is written, each of its `matters` (a change of the configuration that an engine could make by forgetting something) must
move the logits by more than `MOVES`: a fixture proves nothing otherwise.
"""
import copy
import json
import pathlib
import shutil
import sys
import zlib

import torch
import transformers
from safetensors.torch import save_file

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "fixtures"
VOCABULARY = 264
IDS = [256, 72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100, 33, 258, 10, 84, 104, 259, 32, 115, 117, 110, 263]
MOVES = 2e-2

LLAMA = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, rms_norm_eps=1e-5, rope_theta=10000.0, hidden_act="silu", vocab_size=VOCABULARY,
    tie_word_embeddings=False, bos_token_id=256, eos_token_id=257, pad_token_id=None,
)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
OPT = dict(
    model_type="opt", architectures=["OPTForCausalLM"], hidden_size=64, word_embed_proj_dim=64, ffn_dim=96,
    num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, activation_function="relu",
    do_layer_norm_before=True, vocab_size=VOCABULARY, bos_token_id=256, eos_token_id=257, pad_token_id=1,
)
FALCON = dict(
    model_type="falcon", architectures=["FalconForCausalLM"], hidden_size=64, num_hidden_layers=2,
    num_attention_heads=4, ffn_hidden_size=96, max_position_embeddings=128, layer_norm_epsilon=1e-5, alibi=False,
    bias=False, parallel_attn=True, activation="gelu", rope_theta=10000.0, vocab_size=VOCABULARY, bos_token_id=256,
    eos_token_id=257,
)
EXPERTS = dict(intermediate_size=32, num_experts_per_tok=2)


def model(kind, name, base, **changes):
    return {**base, "model_type": kind, "architectures": [name], **changes}


def drelu(net):
    """Bamboo: both halves of the feed-forward network go through a ReLU."""
    def forward(self, x):
        return self.down_proj(torch.relu(self.gate_proj(x)) * torch.relu(self.up_proj(x)))

    for layer in net.model.layers:
        layer.mlp.forward = forward.__get__(layer.mlp)


# Per fixture: the configuration, the type that weights are stored in, what must matter, and what is done to the model.
FIXTURES = {
    "llama": dict(
        config=model("llama", "LlamaForCausalLM", LLAMA, rope_theta=500000.0, rope_scaling=LLAMA3,
                     attention_bias=True, mlp_bias=True),
        dtype=torch.float32,
        matters=[dict(rope_scaling=None), dict(rope_theta=10000.0), dict(rms_norm_eps=0.5)],
        biases=["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
    ),
    "mistral": dict(
        config=model("mistral", "MistralForCausalLM", LLAMA, sliding_window=9, head_dim=24),
        matters=[dict(sliding_window=None), dict(sliding_window=8)],
    ),
    "qwen2": dict(
        config=model("qwen2", "Qwen2ForCausalLM", LLAMA, use_sliding_window=False, sliding_window=4,
                     tie_word_embeddings=True, rope_theta=1000000.0),
        matters=[dict(rope_theta=10000.0)],
        biases=["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ),
    # The weights of `qwen2`: only configuration and logits are its own.
    "qwen2-yarn": dict(
        weights="qwen2",
        config=model("qwen2", "Qwen2ForCausalLM", LLAMA, use_sliding_window=False, sliding_window=4,
                     tie_word_embeddings=True, rope_theta=1000.0,
                     rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)),
        matters=[dict(rope_scaling=None), dict(rope_scaling=dict(rope_type="linear", factor=4.0))],
    ),
    "qwen3": dict(
        config=model("qwen3", "Qwen3ForCausalLM", LLAMA, head_dim=32, use_sliding_window=False, sliding_window=None,
                     attention_bias=False, tie_word_embeddings=True, rope_theta=1000000.0),
        matters=[dict(rope_theta=10000.0)],
    ),
    "gemma3": dict(
        config=model("gemma3_text", "Gemma3ForCausalLM", LLAMA, num_hidden_layers=3, head_dim=32,
                     query_pre_attn_scalar=24, hidden_activation="gelu_pytorch_tanh", rope_theta=1000000.0,
                     rope_local_base_freq=10000.0, rope_scaling=dict(rope_type="linear", factor=8.0),
                     sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                     attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=True),
        matters=[dict(sliding_window=64), dict(sliding_window=7), dict(query_pre_attn_scalar=32),
                 dict(rope_local_base_freq=1000000.0), dict(rope_theta=10000.0), dict(rope_scaling=None),
                 dict(layer_types=["full_attention", "sliding_attention", "full_attention"])],
        dropped=["hidden_act"],
    ),
    "opt": dict(config=OPT, dtype=torch.float32, matters=[dict(activation_function="gelu")]),
    "falcon": dict(
        config={**FALCON, "multi_query": True, "new_decoder_architecture": False},
        matters=[dict(rope_theta=1000000.0), dict(activation="relu"), dict(activation="gelu_pytorch_tanh", moves=1e-5)],
    ),
    "falcon-new": dict(
        config={**FALCON, "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2,
                "tie_word_embeddings": False},
        dtype=torch.float32,
        matters=[dict(rope_theta=1000000.0), dict(activation="relu")],
    ),
    "bamboo": dict(
        config=model("bamboo", "BambooForCausalLM", LLAMA, hidden_act="relu"),
        library=dict(model_type="llama", architectures=["LlamaForCausalLM"]),
        change=drelu,
        matters=[dict(rope_theta=1000000.0)],
    ),
    "mixtral": dict(
        config=model("mixtral", "MixtralForCausalLM", LLAMA, **EXPERTS, num_local_experts=4, sliding_window=None),
        matters=[dict(num_experts_per_tok=1), dict(num_experts_per_tok=3)],
        dropped=["hidden_dim"],
    ),
    "qwen3moe": dict(
        config=model("qwen3_moe", "Qwen3MoeForCausalLM", LLAMA, intermediate_size=96, moe_intermediate_size=32,
                     num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1,
                     mlp_only_layers=[], head_dim=32, use_sliding_window=False, sliding_window=None,
                     attention_bias=False, rope_theta=1000000.0),
        matters=[dict(num_experts_per_tok=1), dict(norm_topk_prob=False)],
    ),
}


def build(config, fixture):
    """The library's model of a configuration, every parameter drawn anew."""
    config = {**copy.deepcopy(config), **fixture.get("library", {})}
    kind = config.pop("model_type")
    # Older spellings of the keys are what files on disk have; the library reads them.
    config = transformers.AutoConfig.for_model(kind, **config)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    net = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    fixture.get("change", lambda net: None)(net)
    return net


def randomise(net, seed, dtype, gemma):
    """Parameters in the order of their names, as the stored type has them."""
    for name, parameter in sorted(net.named_parameters()):
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            values = values * 0.2
        elif parameter.dim() == 1:
            values = values * 0.3 + (0.0 if gemma else 1.0)
        elif "embed_tokens" in name or "word_embeddings" in name:
            values = values * (0.4 if gemma else 0.7)
        elif "position" in name:
            values = values * 0.7
        else:
            # Enough for scores that tell positions apart, without a softmax that takes one and forgets the others.
            values = values * 1.3 / parameter.shape[-1] ** 0.5
        parameter.data = values.to(dtype).float()


@torch.no_grad()
def logits(net):
    return net(input_ids=torch.tensor([IDS]), use_cache=False).logits[0].double()


def stored(net, dtype):
    """Tensors by the names that published files have; with tied embeddings only one of the two."""
    state = {}
    for name, tensor in net.state_dict().items():
        if name == "lm_head.weight" and net.config.tie_word_embeddings:
            continue
        if ".mlp.experts." in name or ".mlp.gate.weight" in name:
            state.update(experts(name, tensor, net.config.model_type))
        else:
            state[name] = tensor
    return {name: tensor.to(dtype).contiguous().clone() for name, tensor in state.items()}


def experts(name, tensor, kind):
    """The library keeps experts as one tensor (since version 5); files have one per expert."""
    layer, part = name.split(".mlp.")
    if kind == "mixtral":
        names = dict(gate="w1", up="w3", down="w2")
        prefix, router = f"{layer}.block_sparse_moe", f"{layer}.block_sparse_moe.gate.weight"
    else:
        names = dict(gate="gate_proj", up="up_proj", down="down_proj")
        prefix, router = f"{layer}.mlp", f"{layer}.mlp.gate.weight"
    if part == "gate.weight":
        return {router: tensor}
    assert tensor.dim() == 3, name
    result = {}
    for index, matrix in enumerate(tensor):
        at = f"{prefix}.experts.{index}"
        if part == "experts.gate_up_proj":
            gate, up = matrix.chunk(2)
            result[f"{at}.{names['gate']}.weight"], result[f"{at}.{names['up']}.weight"] = gate, up
        elif part == "experts.down_proj":
            result[f"{at}.{names['down']}.weight"] = matrix
        else:
            raise SystemExit(f"an unknown tensor of experts: {name}")
    return result


def tokenizer():
    """Bytes, a few merges, and two special tokens: 264 ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=byte_of)
    vocabulary = {token: at for at, token in enumerate(alphabet)}
    vocabulary["<s>"], vocabulary["</s>"] = 256, 257
    merges = [("l", "l"), ("t", "h"), ("th", "e"), ("Ġ", "t"), ("Ġ", "a"), ("i", "n")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    assert made.get_vocab_size() == VOCABULARY
    return made


def byte_of(character):
    """The byte that a character of the byte-level alphabet stands for (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if ord(character) in plain:
        return ord(character)
    others = [byte for byte in range(256) if byte not in plain]
    return others[ord(character) - 256]


def distance(a, b):
    return float((a - b).norm() / b.norm())


def check(name, fixture, seed, dtype, wanted):
    """What must matter, does."""
    for change in fixture.get("matters", []):
        change = dict(change)
        moves = change.pop("moves", MOVES)
        other = build({**fixture["config"], **change}, fixture)
        randomise(other, seed, dtype, name.startswith("gemma"))
        moved = distance(logits(other), wanted)
        assert moved > moves, f"{name}: {change} moves the logits by {moved:.1e} only"
        print(f"  {change}: {moved:.1e}")
    for part in fixture.get("biases", []):
        net = build(fixture["config"], fixture)
        randomise(net, seed, dtype, False)
        for key, parameter in net.named_parameters():
            if key.endswith(f"{part}.bias"):
                parameter.data.zero_()
        moved = distance(logits(net), wanted)
        # A bias of keys alone changes every score of a query alike, but for the rope.
        assert moved > MOVES / 10, f"{name}: the biases of {part} move the logits by {moved:.1e} only"
        print(f"  without biases of {part}: {moved:.1e}")


def reload(folder, fixture):
    """The folder as the library reads it back: names and configuration are what it publishes."""
    config = json.loads((folder / "config.json").read_text())
    config = {**config, **fixture.get("library", {})}
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    config._attn_implementation = "eager"
    net, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, output_loading_info=True)
    wrong = {key: value for key, value in found.items() if value}
    assert not wrong, wrong
    fixture.get("change", lambda net: None)(net)
    return net.eval()


def make(name):
    fixture = FIXTURES[name]
    dtype = fixture.get("dtype", torch.bfloat16)
    seed = zlib.crc32(fixture.get("weights", name).encode())
    net = build(fixture["config"], fixture)
    randomise(net, seed, dtype, name.startswith("gemma"))
    wanted = logits(net)
    assert wanted.isfinite().all() and wanted.shape == (len(IDS), VOCABULARY)
    print(f"{name}: logits of size {float(wanted.std()):.2f}")
    check(name, fixture, seed, dtype, wanted)

    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = {key: value for key, value in fixture["config"].items() if key not in fixture.get("dropped", [])}
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(stored(net, dtype), folder / "model.safetensors", {"format": "pt"})
    assert (folder / "model.safetensors").stat().st_size < 400 << 10, f"{name}: larger than a fixture should be"
    tokenizer().save(str(folder / "tokenizer.json"), pretty=False)
    assert distance(logits(reload(folder, fixture)), wanted) < 1e-6, f"{name}: reads back as another model"
    if "weights" in fixture:
        (folder / "model.safetensors").unlink()
        (folder / "tokenizer.json").unlink()
    rows = ",\n".join("[" + ",".join(f"{value:.6g}" for value in row) + "]" for row in wanted.tolist())
    reference = f'{{"ids": {json.dumps(IDS)},\n"vocabulary": {VOCABULARY},\n"logits": [\n{rows}\n]}}\n'
    json.loads(reference)
    (folder / "reference.json").write_text(reference)
    for file in folder.iterdir():
        file.chmod(0o644)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"  {size >> 10} KiB")


if __name__ == "__main__":
    for name in sys.argv[1:] or FIXTURES:
        make(name)
    versions = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}\n"
    (FOLDER / "VERSIONS").write_text(versions)
