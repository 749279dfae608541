"""Held ports: the router gets them, nobody else does by accident, and a second router is refused as ever."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import struct
from collections.abc import Iterator

import pytest

from pdserve.cluster.router.ports import HeldPorts, ports_of
from pdserve.config import RouterConfig
from pdserve.core.errors import ConfigError
from pdserve.rpc.server import bind_port, make_server
from router.http.protocol import _listen

ANY = RouterConfig(http_port=0, grpc_port=0)
IP_LOCAL_PORT_RANGE = 51  # Linux 6.3: the range from which one socket takes a port for an outgoing connection


@pytest.fixture
def held() -> Iterator[HeldPorts]:
    ports = HeldPorts(ANY)
    ports.hold()
    yield ports
    ports.close()


def test_any_free_port_becomes_one_port_for_good(held: HeldPorts) -> None:
    before = ports_of(held.router)
    assert 0 not in before.values()
    assert len(set(before.values())) == 5
    assert ports_of(held.hold()) == before


def test_the_default_port_of_metrics_is_a_wish_until_the_router_has_one() -> None:
    """(1) The router may take any port for metrics. (2) The one that it took is held from its end on."""
    ports = HeldPorts(RouterConfig(http_port=0, link_port=0, admin_port=0))
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        number = chosen.getsockname()[1]
    assert "metrics" not in ports_of(ports.router)
    ports.learn(dataclasses.replace(ports.router, grpc_port=0, metrics_port=number))
    assert ports.hold().metrics_port == number
    assert "metrics" in ports._sockets
    ports.close()


def outgoing(port: int, target: socket.socket) -> bool:
    """Whether an outgoing connection can get the port, when it may have no other one."""
    with socket.socket() as client:
        client.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port))
        try:
            client.connect(target.getsockname())
        except OSError:
            return False
        return client.getsockname()[1] == port


def test_no_outgoing_connection_gets_a_held_port(held: HeldPorts) -> None:
    port = ports_of(held.router)["link"]
    with socket.create_server(("127.0.0.1", 0)) as target:
        try:
            assert not outgoing(port, target)
            held.close()
            assert outgoing(port, target), "the check itself finds a port that is not held"
        except OSError as exc:
            pytest.skip(f"this kernel cannot narrow the range of ports: {exc}")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_the_servers_of_a_router_bind_beside_and_a_second_router_does_not(host: str) -> None:
    """(1) Both kinds of server get their held port. (2) Every connection reaches them. (3) A second of each is refused."""

    async def check() -> None:
        ports = HeldPorts(RouterConfig(host=host, http_port=0, grpc_port=0, link_port=0))
        numbers = ports_of(ports.hold())
        first, second = make_server(max_receive_bytes=1 << 20), make_server(max_receive_bytes=1 << 20)
        http = await _listen(host, numbers["http"], 60.0, "--http-port")
        try:
            assert bind_port(first, host, numbers["grpc"], "--grpc-port") == numbers["grpc"]
            await first.start()
            for _ in range(100):
                for name in ("grpc", "http"):
                    socket.create_connection(("127.0.0.1", numbers[name]), 10.0).close()
            with pytest.raises(ConfigError, match=r"--grpc-port: port .* is in use"):
                bind_port(second, host, numbers["grpc"], "--grpc-port")
            with pytest.raises(ConfigError, match=r"--http-port: port .* is in use"):
                await _listen(host, numbers["http"], 60.0, "--http-port")
        finally:
            await first.stop(None)
            await second.stop(None)
            http.close()
            ports.close()

    asyncio.run(check())


def test_a_port_with_a_listener_is_left_to_the_router_and_held_once_it_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        ports = HeldPorts(RouterConfig(http_port=number, grpc_port=0))
        assert ports.hold().http_port == number
        assert "http" not in ports._sockets
    ports.hold()
    assert "http" in ports._sockets
    ports.close()
    ports.close()


def test_a_host_that_is_not_ours_is_left_to_the_router() -> None:
    ports = HeldPorts(RouterConfig(host="192.0.2.77", http_port=0, grpc_port=0))
    router = ports.hold()
    assert (router.http_port, router.grpc_port) == (0, 0)
    assert router.admin_port_or_default > 0
    ports.close()
