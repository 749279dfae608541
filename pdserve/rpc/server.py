"""The start and the end of a gRPC server on a port of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any, Final

import grpc.aio

from pdserve.core.errors import ConfigError

_KEEPALIVE: Final = (
    # A client that vanished without closing its connection is noticed within half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
STOP_GRACE_S: Final = 0.5
BACKLOG: Final = 128  # connections that wait to be accepted


CALLS_PER_CONNECTION: Final = 4
"""The number of calls that a connection may have on average over all connections. A busy client has many calls on one
connection, and most clients have one. Further calls are refused before their message is read."""
MAX_STREAMS: Final = 1024  # the calls that one connection may have, as many as the router's queue holds by default
MAX_METADATA_BYTES: Final = 16 << 10  # twice gRPC's default; our metadata has 200 bytes
IDLE_MS: Final = 300_000  # a connection without a call is closed after this; clients connect again by themselves


def client_options(max_connections: int) -> list[tuple[str, int]]:
    """Return the options of a gRPC server whose callers are not trusted, at least not before they have shown a token."""
    return [
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.server_handshake_timeout_ms", 20_000),
    ]


def make_server(
    *,
    max_receive_bytes: int,
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    options: Sequence[tuple[str, int]] = (),
    max_calls: int | None = None,
) -> grpc.aio.Server:
    """Make a server.

    Messages that it receives have at most `max_receive_bytes`; messages that it sends have no limit, since they are ours.
    It runs at most `max_calls` calls at a time; None: any number.
    """
    all_options = [
        ("grpc.so_reuseport", 0),  # otherwise two routers would share a port, and each would get half of the calls
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", -1),
        *_KEEPALIVE,
        *options,
    ]
    return grpc.aio.server(options=all_options, interceptors=list(interceptors), maximum_concurrent_rpcs=max_calls)


def bind_port(server: grpc.aio.Server, host: str, port: int, flag: str) -> int:
    """Bind the server and return the port. `port` 0 takes any free one. Raises `ConfigError` that names the flag."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return int(server.add_insecure_port(address))
    except RuntimeError as exc:
        raise _not_bound(host, port, flag) from exc


def listen(host: str, port: int, flag: str) -> socket.socket:
    """Return a listening socket. `port` 0 takes any free one. Raises `ConfigError` that names the flag."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise ConfigError(f"--host: cannot listen on {host!r}: {exc.strerror or exc}") from exc
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        raise _not_bound(host, port, flag) from exc
    return sock


def _not_bound(host: str, port: int, flag: str) -> ConfigError:
    if why := _refused_host(host):
        return ConfigError(f"--host: cannot listen on {host!r}: {why}")
    return ConfigError(f"{flag}: port {port} of {host} is in use or not allowed; choose another, or 0 for any free one")


def _refused_host(host: str) -> str | None:
    """Return why no port of this host can be bound; None when one can. gRPC's error does not tell whether host or port
    is wrong."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError as exc:  # it includes socket.gaierror
        return exc.strerror or str(exc)
    return None


async def stop_server(server: grpc.aio.Server) -> None:
    """Stop the server. Running calls get `STOP_GRACE_S`, then they are cancelled. Raises TimeoutError if that takes long."""
    async with asyncio.timeout(STOP_GRACE_S + 2.0):
        await server.stop(STOP_GRACE_S)
