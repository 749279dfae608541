"""Serves llama.cpp through its Python binding: a step is one `llama_decode` and the largest logit of each sequence.

    python -m bench.engine.peers.llama_cpp_server FILE.gguf THREADS

Each turn has its own context, with room for exactly its sequences: attention looks at the whole room of a context, and the
longest case takes 1.5 GB.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import llama_cpp as lib
import numpy as np

from bench.engine.peers.cases import Case, mean_s
from bench.engine.peers.protocol import Timer, serve

QUIET = lib.llama_log_callback(lambda level, text, data: None)


def start() -> tuple[str, Timer]:
    """Load the model; see `serve`."""
    path, threads = sys.argv[1:]
    lib.llama_log_set(QUIET, ctypes.c_void_p())
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}")

    def timer(case: Case) -> float:
        context = _context(case, model, int(threads))
        try:
            step = _step(case, model, context)
            step()
            return mean_s(step)
        finally:
            lib.llama_free(context)

    return f"llama-cpp-python {lib.__version__}", timer


def _step(case: Case, model: int, context: int) -> Callable[[], None]:
    memory = lib.llama_get_memory(context)
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    if case.cached:
        _compute(context, _batch([(0, place) for place in range(case.cached)]))
        for other in range(1, case.batch):
            lib.llama_memory_seq_cp(memory, 0, other, -1, -1)
        batch = _batch([(number, case.cached) for number in range(case.batch)])
    else:
        batch = _batch([(0, place) for place in range(case.tokens)])

    def step() -> None:
        _compute(context, batch)
        for number in range(case.batch):
            row = number if case.cached else case.tokens - 1
            logits = lib.llama_get_logits_ith(context, row)
            np.ctypeslib.as_array(logits, shape=(vocab,)).argmax()
            lib.llama_memory_seq_rm(memory, number, case.cached, -1)

    return step


def _context(case: Case, model: int, threads: int) -> int:
    params = lib.llama_context_default_params()
    params.n_seq_max = case.batch
    params.n_ctx = case.batch * ((case.cached + case.tokens + 255) // 256 * 256)
    params.n_batch = max(case.cached, case.step_tokens)
    params.n_threads = params.n_threads_batch = threads
    params.no_perf = True
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp made no context of {params.n_ctx} tokens")
    return int(context)


def _batch(rows: list[tuple[int, int]]) -> lib.llama_batch:
    """Return a batch of rows (sequence, position). It asks for logits of the last row of each sequence."""
    batch = lib.llama_batch_init(len(rows), 0, 1)
    last = {number: row for row, (number, _) in enumerate(rows)}
    batch.n_tokens = len(rows)
    for row, (number, place) in enumerate(rows):
        batch.token[row], batch.pos[row] = 100 + place % 9000, place
        batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, number, last[number] == row
    return batch


def _compute(context: int, batch: lib.llama_batch) -> None:
    status = lib.llama_decode(context, batch)
    if status != 0:
        raise RuntimeError(f"llama_decode answered {status}")


if __name__ == "__main__":
    serve(start)
