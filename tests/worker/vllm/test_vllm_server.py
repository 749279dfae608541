"""The ports of a server."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pdserve.config import EngineConfig, VllmConfig
from pdserve.core.errors import ConfigError
from pdserve.worker.vllm import server
from pdserve.worker.vllm.kv_events import EventSocket


def test_a_port_that_is_taken_at_any_address_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers of KV come to the address of the node. A stranger who listens there would pass for our server."""
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(server.random.SystemRandom, "sample", lambda *_: [port])
        with pytest.raises(ConfigError, match="are free"):
            server._hold_ports(1)


@pytest.mark.parametrize(
    "argument", ["--port=1", "--host", "--served_model_name", "--kv-transfer", "--data-parallel-size", "--data_parallel_size=2"]
)
def test_flags_that_the_worker_chooses_cannot_be_given(argument: str) -> None:
    config = EngineConfig(backend="vllm", vllm=VllmConfig(args=("--seed", "1", argument)))
    with pytest.raises(ConfigError, match=f"engine.vllm.args: {argument}"):
        server.check_settings(config)


@pytest.mark.parametrize("argument", ["--tensor-parallel-size=2", "--pipeline_parallel_size", "-tp"])
def test_degrees_are_named_once(argument: str) -> None:
    args = VllmConfig(args=(argument, "2"))
    server.check_settings(EngineConfig(backend="vllm", vllm=args))
    with pytest.raises(ConfigError, match=f"engine.vllm.args: {argument}: .* are 2 ranks"):
        server.check_settings(EngineConfig(backend="vllm", vllm=args, pipeline_parallel_size=2))


def test_a_server_gets_the_degrees_that_are_not_its_defaults() -> None:
    def flags(**engine: int) -> list[str]:
        return server._flags(EngineConfig(backend="vllm", device="cpu", **engine), "decode", Path("model"), 1)

    given = flags(tensor_parallel_size=2, pipeline_parallel_size=4, enable_expert_parallel=True)
    assert given[given.index("--tensor-parallel-size") + 1] == "2"
    assert given[given.index("--pipeline-parallel-size") + 1] == "4"
    assert "--enable-expert-parallel" in given
    assert not [flag for flag in flags() if "parallel" in flag]


def test_held_ports_are_distinct_and_below_those_that_the_system_gives() -> None:
    held = server._hold_ports(50)
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    assert len(set(ports)) == 50
    assert min(ports) >= server.LOWEST_PORT


def test_a_held_port_is_given_to_no_other_worker_and_can_be_bound_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers that start at once chose the same port now and then, and the later one to bind it did not start."""
    (held,) = server._hold_ports(1)
    port = held.getsockname()[1]
    with held:
        monkeypatch.setattr(server.random.SystemRandom, "sample", lambda *_: [port])
        with pytest.raises(ConfigError, match="are free"):
            server._hold_ports(1)
        with socket.create_server(("127.0.0.1", port)):  # as HTTP servers do, with SO_REUSEADDR
            pass
        events = EventSocket(f"tcp://127.0.0.1:{port}")
        events.close()
    server._hold_ports(1)[0].close()
