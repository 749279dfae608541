"""Workers that drive stand-ins of vLLM's servers instead of real ones. The stand-ins are processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from pdserve.checkpoint.resolve import resolve
from pdserve.config import EngineConfig, VllmConfig
from testkit.vllm_stand_in import BLOCK_SIZE, EOS, outputs

__all__ = ["BLOCK_SIZE", "EOS", "VOCAB", "attached", "engine", "expected", "prompt_of"]

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


@contextlib.contextmanager
def attached(**faults: Any) -> Iterator[EngineConfig]:
    """Start a stand-in that belongs to no worker, and yield the settings of an engine that uses it."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, side_port = one.getsockname()[1], other.getsockname()[1]
    transfer = {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"kv_lease_duration": 30}}
    command = [sys.executable, "-m", "testkit.vllm_stand_in", "--model", str(resolve("tiny")), "--port", str(port)]
    command += ["--kv-transfer-config", json.dumps(transfer), "--faults", json.dumps(faults)]
    sides = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
    with subprocess.Popen(command, env={**os.environ, **sides}) as server:
        try:
            yield EngineConfig(model="tiny", backend="vllm", device="cpu", vllm=VllmConfig(url=f"http://127.0.0.1:{port}"))
        finally:
            server.kill()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Return a prompt of this length. Equal seeds give prompts that begin alike."""
    return [3 + (31 * seed + 7 * i) % (VOCAB - 3) for i in range(length)]


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    """Return what one server would give for it, greedily and without the model's end token."""
    return outputs(prompt, max_tokens, VOCAB)
