"""The ports of a server."""

from __future__ import annotations

import socket

import pytest

from pdserve.core.errors import ConfigError
from pdserve.worker.vllm import server


def test_a_port_that_is_taken_at_any_address_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers of KV come to the address of the node. A stranger who listens there would pass for our server."""
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(server.random.SystemRandom, "sample", lambda *_: [port])
        with pytest.raises(ConfigError, match="are free"):
            server._free_ports(1)


def test_free_ports_are_distinct_and_below_those_that_the_system_gives() -> None:
    ports = server._free_ports(50)
    assert len(set(ports)) == 50
    assert min(ports) >= server.LOWEST_PORT
