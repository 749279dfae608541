"""Serves transformers in bfloat16: a step is one forward call with logits of the last position only.

The cache is cut back after each step.

python -m bench.engine.peers.transformers_server DIRECTORY THREADS
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from bench.engine.peers.cases import Case, mean_s
from bench.engine.peers.protocol import Timer, serve


def start() -> tuple[str, Timer]:
    """Load the model; see `serve`."""
    directory, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()

    def timer(case: Case) -> float:
        with torch.inference_mode():
            step = _step(case, model)
            step()
            return mean_s(step)

    return f"transformers {transformers.__version__}", timer


def _step(case: Case, model: Any) -> Callable[[], Any]:
    ids = torch.full((case.batch, case.tokens), 7)
    if not case.cached:
        return lambda: model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1).logits.argmax(-1)
    cache = DynamicCache(config=model.config)
    model(torch.full((1, case.cached), 7), past_key_values=cache, logits_to_keep=1)
    cache.batch_repeat_interleave(case.batch)  # all rows are alike, since a step takes as long for any tokens

    def step() -> Any:
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        cache.crop(-case.tokens)
        return logits.argmax(-1)

    return step


if __name__ == "__main__":
    serve(start)
