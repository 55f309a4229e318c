"""llama.cpp's negative log-likelihoods of given ids, for `cargo xtask perplexity-peer`.

usage: perplexity.py MODEL THREADS < ids.json    (a list of chunks, each a list of ids)
Prints a JSON list: the mean over each chunk's second half.
"""
import ctypes
import json
import math
import sys

import llama_cpp

LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
SILENT = LOG(lambda level, text, data: None)


def main():
    model_path, threads = sys.argv[1], int(sys.argv[2])
    chunks = json.load(sys.stdin)
    length = max(len(chunk) for chunk in chunks)

    llama_cpp.llama_log_set(SILENT, None)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(model_path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {model_path}")
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = length
    parameters.n_threads = parameters.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise SystemExit("llama.cpp cannot make a context")
    width = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    memory = llama_cpp.llama_get_memory(context)
    means = []
    for ids in chunks:
        llama_cpp.llama_memory_clear(memory, True)
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at] = token, at
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
            batch.logits[at] = at >= len(ids) // 2
        if llama_cpp.llama_decode(context, batch) != 0:
            raise SystemExit("llama.cpp cannot decode a chunk")
        total, count = 0.0, 0
        for at in range(len(ids) // 2, len(ids) - 1):
            row = llama_cpp.llama_get_logits_ith(context, at)[:width]
            most = max(row)
            total += math.log(sum(math.exp(x - most) for x in row)) - (row[ids[at + 1]] - most)
            count += 1
        llama_cpp.llama_batch_free(batch)
        means.append(total / count)
    print(json.dumps(means))


main()
