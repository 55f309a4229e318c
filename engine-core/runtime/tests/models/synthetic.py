"""Golden logits of `synthetic.rs`, from the formulas in float64 with an f16 KV cache. usage: python3 synthetic.py (numpy)"""
import numpy as np

E, LAYERS, HEADS, KV, HD, FF, VOCAB, T = 64, 2, 4, 2, 32, 96, 50, 40


def values(seed, count):
    i = np.arange(count, dtype=np.uint64)
    mixed = (i * np.uint64(2654435761) + np.uint64(seed) * np.uint64(40503) + np.uint64(12345)) & np.uint64(0xFFFFFFFF)
    mixed = ((mixed ^ (mixed >> np.uint64(15))) * np.uint64(2246822519)) & np.uint64(0xFFFFFFFF)
    return (mixed.astype(np.float64) / 2**32 - 0.5).astype(np.float32).astype(np.float64)


def matrix(seed, rows, columns):
    return (values(seed, rows * columns) * 0.5).reshape(rows, columns)


def norm(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w


def run(base, kind, factor=1.0, original=64, factors=None):
    j = np.arange(HD // 2)
    theta = base ** (-2.0 * j / HD)
    if factors is not None:
        theta = theta / factors
    magnitude = 1.0
    if kind == "linear":
        theta = theta / factor
    if kind == "yarn":
        dim = lambda b: HD * np.log(original / (b * 2 * np.pi)) / (2 * np.log(base))
        low, high = max(0.0, np.floor(dim(32.0))), min(HD - 1.0, np.ceil(dim(1.0)))
        keep = 1 - np.clip((j - low) / max(0.001, high - low), 0, 1)
        theta = theta / factor * (1 - keep) + theta * keep
        magnitude = 1 + 0.1 * np.log(factor)

    def rope(x):
        x = x.reshape(T, -1, HD)
        angle = np.arange(T)[:, None] * theta[None]
        c, s = np.cos(angle)[:, None] * magnitude, np.sin(angle)[:, None] * magnitude
        out = np.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * c - x[..., 1::2] * s
        out[..., 1::2] = x[..., 0::2] * s + x[..., 1::2] * c
        return out

    ids = (np.arange(T) * 7) % VOCAB
    x = matrix(1, VOCAB, E)[ids]
    for layer in range(LAYERS):
        w = lambda part, rows, columns: matrix(100 * (layer + 1) + part, rows, columns)
        n = norm(x, 1 + values(100 * (layer + 1) + 10, E))
        q, k = rope(n @ w(0, HEADS * HD, E).T), rope(n @ w(1, KV * HD, E).T)
        v = (n @ w(2, KV * HD, E).T).reshape(T, KV, HD)
        k, v = k.astype(np.float16).astype(float), v.astype(np.float16).astype(float)
        attended = np.zeros((T, HEADS, HD))
        for h in range(HEADS):
            score = q[:, h] @ k[:, h // (HEADS // KV)].T / np.sqrt(HD)
            score = np.where(np.tril(np.ones((T, T))) > 0, score, -np.inf)
            p = np.exp(score - score.max(-1, keepdims=True))
            attended[:, h] = p / p.sum(-1, keepdims=True) @ v[:, h // (HEADS // KV)]
        x = x + attended.reshape(T, -1) @ w(3, E, HEADS * HD).T
        n = norm(x, 1 + values(100 * (layer + 1) + 11, E))
        gate, up = n @ w(4, FF, E).T, n @ w(5, FF, E).T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w(6, E, FF).T
    return norm(x, 1 + values(3, E))[-1] @ matrix(2, VOCAB, E).T


for name, logits in [
    ("plain", run(1e4, "none")),
    ("base", run(1e6, "none")),
    ("linear", run(1e4, "linear", 4.0)),
    ("yarn", run(1e4, "yarn", 4.0, 16)),
    ("factors", run(1e4, "none", factors=1 + np.arange(HD // 2) / 4)),
]:
    print(f'("{name}", [{", ".join(f"{value:.5f}" for value in logits[:6])}]),')
