"""A server of vLLM over two machines: what each node is started with. The program is a script that writes its arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pdserve.checkpoint.resolve import resolve
from pdserve.config import EngineConfig, VllmConfig, WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.worker.vllm.server import VllmServer


def engine_with(folder: Path) -> EngineConfig:
    """An engine of two ranks on two nodes, whose program writes its arguments and some variables, and ends."""
    program = folder / "vllm"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/said\necho "$VLLM_HOST_IP" >> {folder}/said\n')
    program.chmod(0o755)
    vllm = VllmConfig(command=(str(program),), nodes=2)
    return EngineConfig(backend="vllm", model="tiny", device="cpu", tensor_parallel_size=2, vllm=vllm)


def test_the_worker_starts_the_first_node(tmp_path: Path) -> None:
    engine = engine_with(tmp_path)
    assert (engine.ranks, engine.degrees.ranks) == (1, 2)
    server = VllmServer(WorkerConfig("w", "127.0.0.1:1", engine=engine), "decode", tmp_path)
    try:
        with pytest.raises(ConfigError, match="ended with status 0"):
            server.wait_ready(60.0, lambda *_: None)
    finally:
        server.stop()
    said = (tmp_path / "said").read_text().splitlines()
    first = said.index("--nnodes")
    assert said[first:-1] == ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", "29501"]
    assert said[said.index("--tensor-parallel-size") + 1] == "2"
    assert "--headless" not in said


def test_the_command_of_a_follower_becomes_vllm_with_the_same_flags(tmp_path: Path) -> None:
    engine = engine_with(tmp_path)
    settings = {"backend": "vllm", "model": "tiny", "device": "cpu", "tensor_parallel_size": 2}
    config = tmp_path / "cluster.yaml"
    config.write_text(yaml.safe_dump({"engine": {**settings, "vllm": {"command": list(engine.vllm.command), "nodes": 2}}}))
    command = [sys.executable, "-m", "pdserve.worker.vllm.follower", "--config", str(config), "--role", "prefill"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = ["--node-rank", "1", "--first", "10.0.0.1", "--host", "127.0.0.1"]
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    said = (tmp_path / "said").read_text().splitlines()
    assert said[0] == "--headless"
    assert said[said.index("--model") + 1] == str(resolve("tiny"))
    assert said[-9:] == [
        *("--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29501"),
        "127.0.0.1",
    ]
