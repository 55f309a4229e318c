"""Makes seeds/: small valid inputs of each target, and some of the forms that a mutation will not find by itself.

    python make_seeds.py
"""

import json
import os
import struct
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def put(target, name, data):
    folder = os.path.join(HERE, "seeds", target)
    os.makedirs(folder, exist_ok=True)
    open(os.path.join(folder, name), "wb").write(data if isinstance(data, bytes) else data.encode())


def string(text):
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(kind, item):
    if kind == STRING:
        return string(item)
    if kind == ARRAY:
        inner, items = item
        return struct.pack("<IQ", inner, len(items)) + b"".join(value(inner, one) for one in items)
    return struct.pack({U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q"}[kind], item)


def gguf(keys, tensors=(), magic=b"GGUF", version=3):
    """Tensors are (name, dims, type code, bytes)."""
    head = magic + struct.pack("<IQQ", version, len(tensors), len(keys))
    for key, (kind, item) in keys.items():
        head += string(key) + struct.pack("<I", kind) + value(kind, item)
    data = b""
    for name, dims, code, size in tensors:
        head += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, code, len(data))
        data += bytes(size) + bytes(-size % 32)
    return head + bytes(-len(head) % 32) + data


BYTES = [chr(b) if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE else None for b in range(256)]
SHIFTED = iter(range(256, 400))
BYTES = [c or chr(next(SHIFTED)) for c in BYTES]
KEEP = [BYTES[b] for b in b" abcdehlot12\n\xc3\xa9"]


def byte_level(pre="smollm"):
    tokens = ["<|endoftext|>", "<|im_end|>", *KEEP, "he", "ll"]
    return {
        "tokenizer.ggml.model": (STRING, "gpt2"), "tokenizer.ggml.pre": (STRING, pre),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [3, 3] + [1] * (len(tokens) - 2))),
        "tokenizer.ggml.merges": (ARRAY, (STRING, ["h e", "l l"])), "tokenizer.ggml.eos_token_id": (U32, 0),
    }


def sentence(kind, charsmap=None):
    tokens = ["<unk>", "<s>", "</s>", "<0x41>", "\u2581", "a", "b", "\u2581a", "ab", "::"]
    keys = {
        "tokenizer.ggml.model": (STRING, kind), "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.scores": (ARRAY, (F32, [0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -2.5, -3.0, -3.5, 0.0])),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [2, 3, 3, 6, 1, 1, 1, 1, 1, 4])),
        "tokenizer.ggml.remove_extra_whitespaces": (BOOL, True), "tokenizer.ggml.add_space_prefix": (BOOL, True),
    }
    if charsmap:
        keys["tokenizer.ggml.precompiled_charsmap"] = (ARRAY, (0, charsmap))
    return keys


def model(arch="llama"):
    keys = {"general.architecture": (STRING, arch)}
    for key, number in [("block_count", 1), ("context_length", 64), ("embedding_length", 8), ("feed_forward_length", 8),
                        ("attention.head_count", 2), ("attention.head_count_kv", 1), ("rope.dimension_count", 4)]:
        keys[f"{arch}.{key}"] = (U32, number)
    keys[f"{arch}.attention.layer_norm_rms_epsilon"] = (F32, 1e-5)
    return keys | byte_level()


def tensors(code=1, size=2):
    rows = len(byte_level()["tokenizer.ggml.tokens"][1][1])
    shapes = {"token_embd": [8, rows], "output_norm": [8]}
    for part, dims in [("attn_norm", [8]), ("attn_q", [8, 8]), ("attn_k", [8, 4]), ("attn_v", [8, 4]), ("attn_output", [8, 8]),
                       ("ffn_norm", [8]), ("ffn_gate", [8, 8]), ("ffn_up", [8, 8]), ("ffn_down", [8, 8])]:
        shapes[f"blk.0.{part}"] = dims
    product = lambda dims: dims[0] * (dims[1] if len(dims) > 1 else 1)
    return [(f"{name}.weight", dims, code, product(dims) * size) for name, dims in shapes.items()]


def archive(**parts):
    """Parts by name; two underscores stand for a full stop."""
    items = [(name.replace("__", "."), data) for name, data in parts.items()]
    return b"\n".join(b"--- " + name.encode() + b"\n" + (data if isinstance(data, bytes) else data.encode()) for name, data in items)


def safetensors(shapes):
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2
        for dim in shape:
            size *= dim
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def main():
    put("gguf", "model", gguf(model(), tensors()))
    put("gguf", "f32", gguf(model(), tensors(0, 4)))
    put("gguf", "version2", gguf(model(), tensors(), version=2))
    for code, elements, size in [(2, 32, 18), (3, 32, 20), (6, 32, 22), (7, 32, 24), (8, 32, 34), (10, 256, 84), (11, 256, 110),
                                 (12, 256, 144), (13, 256, 176), (14, 256, 210), (20, 32, 18), (23, 256, 136), (30, 1, 2),
                                 (39, 32, 17)]:
        put("gguf", f"type{code}", gguf({"general.architecture": (STRING, "x")}, [("t", [elements, 2], code, size * 2)]))
    for arch in ["qwen2", "qwen3", "gemma3", "falcon", "opt", "bamboo", "qwen3moe", "smallthinker"]:
        put("gguf", arch, gguf(model(arch), tensors()))
    put("gguf", "alignment", gguf(model() | {"general.alignment": (U32, 64)}))
    put("gguf", "split", gguf(model() | {"split.count": (U32, 1), "split.no": (U32, 0), "split.tensors.count": (I32, 11)}, tensors()))
    put("gguf", "nested", gguf({"a": (ARRAY, (ARRAY, [(U32, [1, 2]), (STRING, ["b"])]))}))
    put("gguf", "html", b"<!DOCTYPE html><html>")
    predictors = [("blk.0.fc1.weight", [8, 4], 1, 64), ("blk.0.fc2.weight", [4, 8], 1, 64)]
    down = [("blk.0.ffn_down_t.weight" if "ffn_down" in name else name, *rest) for name, *rest in tensors()]
    put("pwri", "plain", gguf(model(), down, b"PWRI"))
    put("pwri", "predictors", gguf(model("bamboo") | {"powerinfer.sparse_threshold": (F32, 0.0)}, down + predictors, b"PWRI"))
    config = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 4,
              "num_attention_heads": 2, "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    shapes = {"model.embed_tokens.weight": [4, 8], "model.norm.weight": [8]}
    for part, shape in [("input_layernorm", [8]), ("post_attention_layernorm", [8]), ("self_attn.q_proj", [8, 8]),
                        ("self_attn.k_proj", [8, 8]), ("self_attn.v_proj", [8, 8]), ("self_attn.o_proj", [8, 8]),
                        ("mlp.gate_proj", [8, 8]), ("mlp.up_proj", [8, 8]), ("mlp.down_proj", [8, 8])]:
        shapes[f"model.layers.0.{part}.weight"] = shape
    one = safetensors(shapes)
    put("safetensors", "single", archive(config__json=json.dumps(config), model__safetensors=one))
    scaled = config | {"model_type": "qwen3_moe", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "num_experts": 2}
    put("safetensors", "experts", archive(config__json=json.dumps(scaled), model__safetensors=one))
    index = {"metadata": {}, "weight_map": {name: "b.safetensors" for name in shapes}}
    put("safetensors", "index", archive(config__json=json.dumps(config), b__safetensors=one,
                                        **{"model__safetensors__index__json": json.dumps(index)}))
    put("safetensors", "pointer", archive(config__json=json.dumps(config),
                                          model__safetensors="version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"))
    text = "a  ab::</s>\u00e9 he<|im_end|>ll\n12"
    for pre in ["default", "gpt-2", "smollm", "llama-bpe", "qwen2", "falcon", "deepseek-coder"]:
        put("tokenizer", "gguf-" + pre, archive(text=text, gguf=gguf(byte_level(pre))))
    for kind in ["llama", "t5"]:
        put("tokenizer", "gguf-" + kind, archive(text=text, gguf=gguf(sentence(kind))))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": id, "content": text, "special": id == first, **flags} for first in [6, 7] for id, text in
             [(first, "</s>"), (first + 1, "::")]]
    bpe = {"type": "BPE", "vocab": {"a": 0, "b": 1, "\u0120": 2, "ab": 3, "\u0120ab": 4, "1": 5}, "merges": [["a", "b"], ["\u0120", "ab"]]}
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    put("tokenizer", "json-bpe", archive(text=text, **{
        "tokenizer__json": json.dumps({"added_tokens": added[:2], "normalizer": {"type": "NFC"}, "pre_tokenizer": level, "model": bpe}),
        "tokenizer_config__json": json.dumps({"bos_token": "</s>", "eos_token": {"content": "</s>"}, "add_bos_token": True})}))
    spm = {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "merges": [["\u2581", "a"], ["a", "b"]],
           "vocab": {"<unk>": 0, "<0x41>": 1, "\u2581": 2, "a": 3, "b": 4, "\u2581a": 5, "ab": 6}}
    steps = [{"type": "Prepend", "prepend": "\u2581"}, {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
    put("tokenizer", "json-sentencepiece", archive(text=text, **{"tokenizer__json": json.dumps(
        {"added_tokens": added[2:], "normalizer": {"type": "Sequence", "normalizers": steps}, "model": spm})}))
    steps = [{"type": kind} for kind in ["NFKC", "Lowercase", "StripAccents"]]
    steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
    steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    pairs = [["<unk>", 0.0], ["\u2581", -1.0], ["a", -2.0], ["\u2581a", -2.5], ["b", -3.0]]
    put("tokenizer", "json-unigram", archive(text=text, **{"tokenizer__json": json.dumps(
        {"added_tokens": [], "normalizer": {"type": "Sequence", "normalizers": steps},
         "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True},
         "model": {"type": "Unigram", "unk_id": 0, "vocab": pairs}})}))
    messages = json.dumps({"tools": [{"type": "function", "function": {"name": "f"}}], "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                           {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}]})
    for name, template in {
        "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
                  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "python": "{%- set ns = namespace(n=0) -%}{%- for k, v in messages[0].items() -%}{% set ns.n = ns.n + 1 %}{{ k.upper() }}"
                  "{{ v | tojson(indent=2) }}{% if loop.last %}{% break %}{% endif %}{%- endfor -%}{{ ns.n }}{{ messages[::-1][0] }}",
        "raise": "{{ bos_token }}{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}{{ strftime_now('%d %b %Y') }}",
        "generation": "{% for m in messages %}{% generation %}{{ m.content.strip().split('e')[-1] }}{% endgeneration %}{% endfor %}",
        "open": "{%}{{ 1 }}{% generation %}{%- endgeneration",
        "macro": "{% macro f(x, y=1) %}[{{ x }}{{ y }}]{% endmacro %}{{ f('a') }}{{ f(eos_token, y=2) }}{{ 'a' ~ 1 // 2 ** 3 % 4 }}",
    }.items():
        put("template", name, archive(template=template, conversation=messages))
    fixtures = os.path.join(HERE, "..", "tests", "fixtures")
    for name in ["activation", "predictor"]:
        path = os.path.join(fixtures, name + ".pt")
        put("pickle", name + ".pt", open(path, "rb").read())
        with zipfile.ZipFile(path) as file:
            inside = {entry.split("/", 1)[1]: file.read(entry) for entry in file.namelist()}
        kept = {entry: inside[entry] for entry in inside if not entry.startswith(".")}
        put("pickle", name, archive(**kept))


main()
