"""Workers that drive stand-ins of vLLM's servers instead of real ones. The stand-ins are processes of their own."""

from __future__ import annotations

import json
import sys
from typing import Any

from pdserve.config import EngineConfig, VllmConfig
from testkit.vllm_stand_in import BLOCK_SIZE, EOS, outputs

__all__ = ["BLOCK_SIZE", "EOS", "VOCAB", "engine", "expected", "prompt_of"]

VOCAB = 512
"""The number of token ids of the tiny model."""


def engine(*, prefix_caching: bool = False, step_timeout_s: float = 60.0, **faults: Any) -> EngineConfig:
    """Return the settings of an engine whose server is a stand-in with these `Faults`."""
    command = (sys.executable, "-m", "testkit.vllm_stand_in")
    named = ("--faults", json.dumps(faults)) if faults else ()
    return EngineConfig(
        model="tiny",
        backend="vllm",
        device="cpu",
        max_model_len=512,
        max_num_seqs=16,
        enable_prefix_caching=prefix_caching,
        step_timeout_s=step_timeout_s,
        vllm=VllmConfig(command=command, args=named),
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Return a prompt of this length. Equal seeds give prompts that begin alike."""
    return [3 + (31 * seed + 7 * i) % (VOCAB - 3) for i in range(length)]


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    """Return what one server would give for it, greedily and without the model's end token."""
    return outputs(prompt, max_tokens, VOCAB)
