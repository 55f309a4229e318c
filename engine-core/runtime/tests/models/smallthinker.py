"""Makes `tests/fixtures/smallthinker`: as fixtures.py does, for an architecture that Hugging Face's library does not have.

usage: python3 smallthinker.py     (what fixtures.py needs)

The model is written out here, from the published description: the router sees what enters the layer, before any norm;
shares are sigmoids of the best scores, divided by their sum; experts are relu(gate) * up; the first of four layers sees
all and turns nothing, the others have a window and a rope.
"""
import json
import shutil
import zlib

import torch
from safetensors.torch import save_file

import fixtures

NAME = "smallthinker"
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, NEURONS, EXPERTS, USED, WINDOW = 4, 64, 4, 2, 24, 32, 4, 2, 7
LAYOUT = [0, 1, 1, 1]
CONFIG = dict(
    model_type="smallthinker", architectures=["SmallThinkerForCausalLM"], hidden_size=WIDTH, num_hidden_layers=LAYERS,
    num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD, moe_ffn_hidden_size=NEURONS,
    moe_num_primary_experts=EXPERTS, moe_num_active_primary_experts=USED, moe_enable_secondary_experts=False,
    moe_primary_router_apply_softmax=False, norm_topk_prob=True, moe_layer_layout=[1] * LAYERS, rope_layout=LAYOUT,
    sliding_window_layout=LAYOUT, sliding_window_size=WINDOW, rope_theta=10000.0, rope_scaling=None,
    rms_norm_eps=1e-5, max_position_embeddings=128, vocab_size=fixtures.VOCABULARY, tie_word_embeddings=False,
    bos_token_id=256, eos_token_id=257, pad_token_id=None, torch_dtype="bfloat16",
)


def shapes():
    yield "model.embed_tokens.weight", (fixtures.VOCABULARY, WIDTH)
    yield "model.norm.weight", (WIDTH,)
    yield "lm_head.weight", (fixtures.VOCABULARY, WIDTH)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (WIDTH,)
        yield f"{at}.post_attention_layernorm.weight", (WIDTH,)
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield f"{at}.self_attn.{part}_proj.weight", (heads * HEAD, WIDTH)
        yield f"{at}.self_attn.o_proj.weight", (WIDTH, HEADS * HEAD)
        yield f"{at}.block_sparse_moe.primary_router.weight", (EXPERTS, WIDTH)
        for expert in range(EXPERTS):
            of = f"{at}.block_sparse_moe.experts.{expert}"
            yield f"{of}.gate.weight", (NEURONS, WIDTH)
            yield f"{of}.up.weight", (NEURONS, WIDTH)
            yield f"{of}.down.weight", (WIDTH, NEURONS)


def parameters():
    seed = zlib.crc32(NAME.encode())
    result = {}
    for name, shape in shapes():
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            values = values * 0.3 + 1.0
        elif "embed_tokens" in name:
            values = values * 0.7
        else:
            values = values * 1.3 / shape[-1] ** 0.5
        result[name] = values.to(torch.bfloat16)
    return result


def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * weight


def rope(x):
    positions = torch.arange(x.shape[0], dtype=x.dtype)
    frequencies = CONFIG["rope_theta"] ** (-torch.arange(0, HEAD, 2, dtype=x.dtype) / HEAD)
    angles = torch.outer(positions, frequencies)[:, None, :]
    a, b = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def attention(x, weights, at, turned, window):
    def heads(part, count):
        return (x @ weights[f"{at}.self_attn.{part}_proj.weight"].T).view(-1, count, HEAD)

    q, k, v = heads("q", HEADS), heads("k", KV_HEADS), heads("v", KV_HEADS)
    if turned:
        q, k = rope(q), rope(k)
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD ** 0.5
    back = torch.arange(x.shape[0])[:, None] - torch.arange(x.shape[0])[None, :]
    seen = (back >= 0) & (back < (window or x.shape[0]))
    shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, v).flatten(1) @ weights[f"{at}.self_attn.o_proj.weight"].T


def experts(x, scores, weights, at, used):
    best, chosen = scores.topk(used, -1)
    shares = best.sigmoid()
    shares = shares / shares.sum(-1, keepdim=True)
    rows = []
    for token in range(x.shape[0]):
        row = torch.zeros(WIDTH, dtype=x.dtype)
        for share, expert in zip(shares[token], chosen[token].tolist()):
            of = f"{at}.block_sparse_moe.experts.{expert}"
            h = torch.relu(weights[f"{of}.gate.weight"] @ x[token]) * (weights[f"{of}.up.weight"] @ x[token])
            row = row + share * (weights[f"{of}.down.weight"] @ h)
        rows.append(row)
    return torch.stack(rows)


def logits(weights, window=WINDOW, used=USED, layout=LAYOUT, early=True):
    x = weights["model.embed_tokens.weight"][torch.tensor(fixtures.IDS)]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        router = weights[f"{at}.block_sparse_moe.primary_router.weight"].T
        scores = x @ router
        normed = norm(x, weights[f"{at}.input_layernorm.weight"])
        x = x + attention(normed, weights, at, layout[layer], window if LAYOUT[layer] else None)
        normed = norm(x, weights[f"{at}.post_attention_layernorm.weight"])
        x = x + experts(normed, scores if early else normed @ router, weights, at, used)
    return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def main():
    stored = parameters()
    weights = {name: tensor.double() for name, tensor in stored.items()}
    wanted = logits(weights)
    assert wanted.isfinite().all()
    for change in (dict(window=6), dict(window=None), dict(used=1), dict(layout=[1] * 4), dict(early=False)):
        moved = fixtures.distance(logits(weights, **change), wanted)
        assert moved > fixtures.MOVES, f"{change} moves the logits by {moved:.1e} only"
        print(f"  {change}: {moved:.1e}")
    folder = fixtures.FOLDER / NAME
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors",
              {"format": "pt"})
    fixtures.tokenizer().save(str(folder / "tokenizer.json"), pretty=False)
    rows = ",\n".join("[" + ",".join(f"{value:.6g}" for value in row) + "]" for row in wanted.tolist())
    (folder / "reference.json").write_text(
        f'{{"ids": {json.dumps(fixtures.IDS)},\n"vocabulary": {fixtures.VOCABULARY},\n"logits": [\n{rows}\n]}}\n')
    for file in folder.iterdir():
        file.chmod(0o644)
        print(f"  {file.name} {file.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
