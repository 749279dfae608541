"""Starting a gRPC server on a port of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any, Final

import grpc.aio

from pdserve.core.errors import ConfigError

_KEEPALIVE: Final = (
    # A client that vanished without a word is noticed within half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
STOP_GRACE_S: Final = 0.5


CALLS_PER_CONNECTION: Final = 4
"""Calls of one connection, on average over all: a busy client multiplexes, many hold one stream. Calls beyond that are
refused before their message is read."""
MAX_STREAMS: Final = 1024  # of one connection: as many as the queue holds by default
MAX_METADATA_BYTES: Final = 16 << 10  # twice gRPC's default; ours take 200 bytes
IDLE_MS: Final = 300_000  # a connection without a call; clients connect again by themselves


def client_options(max_connections: int) -> list[tuple[str, int]]:
    """Options of a gRPC server whose callers are not trusted, at least not before they have shown a token."""
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
    """Messages that are sent have no limit: they are ours. `max_calls` at a time; None: any number."""
    all_options = [
        ("grpc.so_reuseport", 0),  # else two routers would share a port and each get half of the calls
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", -1),
        *_KEEPALIVE,
        *options,
    ]
    return grpc.aio.server(options=all_options, interceptors=list(interceptors), maximum_concurrent_rpcs=max_calls)


def bind_port(server: grpc.aio.Server, host: str, port: int, flag: str) -> int:
    """The bound port; `port` 0 takes any free one. Raises `ConfigError` naming the flag."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return int(server.add_insecure_port(address))
    except RuntimeError as exc:
        if why := _refused_host(host):
            raise ConfigError(f"--host: cannot listen on {host!r}: {why}") from exc
        raise ConfigError(
            f"{flag}: port {port} of {host} is in use or not allowed; choose another, or 0 for any free one"
        ) from exc


def _refused_host(host: str) -> str | None:
    """Why no port of this host can be listened on; gRPC's own error names neither host nor port as the culprit."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError as exc:  # gaierror too
        return exc.strerror or str(exc)
    return None


async def stop_server(server: grpc.aio.Server) -> None:
    """Running calls get a short grace, then are cancelled. Bounded."""
    async with asyncio.timeout(STOP_GRACE_S + 2.0):
        await server.stop(STOP_GRACE_S)
