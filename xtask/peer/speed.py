"""One measurement of llama.cpp: speed.py MODEL THREADS PROMPT_TOKENS GENERATED_TOKENS prints one JSON object.

The low-level calls are used because the package's high-level evaluation copies logits through Python, which would make
the peer look slower than it is.
"""

import ctypes
import json
import sys
import time

import llama_cpp

LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
SILENT = LOG(lambda level, text, data: None)


class Session:
    """A model with one context, fed token by token or in one batch."""

    def __init__(self, path, threads, positions, batch):
        llama_cpp.llama_log_set(SILENT, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}")
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = positions
        parameters.n_batch = parameters.n_ubatch = batch
        parameters.n_threads = parameters.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        if not self.context:
            sys.exit("llama.cpp cannot make a context")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.tokens = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def forget(self):
        memory = llama_cpp.llama_get_memory(self.context)
        llama_cpp.llama_memory_clear(memory, True)

    def feed(self, ids):
        array = (llama_cpp.llama_token * len(ids))(*ids)
        batch = llama_cpp.llama_batch_get_one(array, len(ids))
        if llama_cpp.llama_decode(self.context, batch):
            sys.exit("llama_decode failed")
        llama_cpp.llama_synchronize(self.context)


def seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main():
    path, threads, prompt, generated = sys.argv[1], *map(int, sys.argv[2:5])
    batch = min(max(prompt, 512), 2048)
    session = Session(path, threads, prompt + generated + 8, batch)
    ids = [(31 * i * i + 17 * i + 5) % session.tokens for i in range(max(prompt, generated) + 1)]
    session.feed(ids[:8])  # touches every weight once
    session.forget()
    took = seconds(lambda: session.feed(ids[:prompt]))
    session.forget()
    session.feed(ids[:1])
    each = seconds(lambda: [session.feed(ids[i : i + 1]) for i in range(1, generated + 1)])
    print(
        json.dumps(
            {"version": llama_cpp.__version__, "pp": prompt / took, "tg": generated / each}
        )
    )


main()
