"""The ports of a server."""

from __future__ import annotations

import socket

import pytest

from pdserve.config import EngineConfig, VllmConfig
from pdserve.core.errors import ConfigError
from pdserve.worker.vllm import server


def test_a_port_that_is_taken_at_any_address_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers of KV come to the address of the node. A stranger who listens there would pass for our server."""
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(server.random.SystemRandom, "sample", lambda *_: [port])
        with pytest.raises(ConfigError, match="are free"):
            server._free_ports(1)


@pytest.mark.parametrize(
    "argument", ["--port=1", "--host", "--served_model_name", "--kv-transfer", "--data-parallel-size", "--data_parallel_size=2"]
)
def test_flags_that_the_worker_chooses_cannot_be_given(argument: str) -> None:
    config = EngineConfig(backend="vllm", vllm=VllmConfig(args=("--seed", "1", argument)))
    with pytest.raises(ConfigError, match=f"engine.vllm.args: {argument}"):
        server.check_settings(config)


def test_free_ports_are_distinct_and_below_those_that_the_system_gives() -> None:
    ports = server._free_ports(50)
    assert len(set(ports)) == 50
    assert min(ports) >= server.LOWEST_PORT
