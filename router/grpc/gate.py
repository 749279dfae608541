"""The gate of the admin port. gRPC bounds only the number of all connections, so 32 idle ones would lock operators out.

The gate accepts connections and passes their bytes on to the gRPC server, which listens on a socket in a folder of this process
alone. Each connection has a name there, by which the server says which one has proved itself: made a call that was allowed.
Connections that have not are few and short, and the oldest of them gives way to a new one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from typing import Final, cast

PROVE_S: Final = 5.0
"""A connection must have made an allowed call after so long. A client makes its call as soon as it is connected."""
MAX_UNPROVED: Final = 32
"""At most so many connections have made no allowed call: more than operators open at once in `PROVE_S`."""
PAUSED_BYTES: Final = 256 << 10  # one direction of a connection waits for its reader with at most about so many bytes
FULL: Final = b"HTTP/1.1 503 admin port full\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
"""The answer to a connection too many. gRPC clients show its status, so that a full port does not look like an absent one."""
_PEER: Final = "unix-abstract:"


class Gate:
    """The listening socket and its connections. `start` it on the loop of the server, and `close` it."""

    def __init__(self, path: str, max_connections: int, *, prove_s: float = PROVE_S, max_unproved: int = MAX_UNPROVED) -> None:
        """`path`: the socket of the server."""
        self._path = path
        self._max_connections = max_connections
        self._prove_s = prove_s
        self._max_unproved = max_unproved
        self._prefix = f"pdserve-admin-{os.getpid()}-{os.urandom(8).hex()}-"
        self._numbers = itertools.count()
        self._connections: dict[str, _Outside] = {}
        self._unproved: dict[str, _Outside] = {}  # the oldest comes first
        self._server: asyncio.Server | None = None
        self.refused = 0
        """The number of connections that were refused because all places belonged to connections that had proved themselves."""

    async def start(self, sock: socket.socket) -> None:
        """Accept connections from a listening socket, which the gate owns from now on."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Outside(self), sock=sock)

    async def close(self) -> None:
        """Close the socket and all connections. Idempotent."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections.values()):
            connection.end()

    def proved(self, peer: str) -> None:
        """Note that the connection of this peer, as the server names it, has made an allowed call."""
        connection = self._unproved.pop(peer.removeprefix(_PEER), None)
        if connection is not None:
            connection.disarm()

    def admit(self, connection: _Outside) -> socket.socket | None:
        """Give a connection a place and return its socket to the server. None: there is no place, or the server is gone."""
        if len(self._unproved) >= self._max_unproved:
            next(iter(self._unproved.values())).end()
        if len(self._connections) >= self._max_connections:
            if not self._unproved:
                self.refused += 1
                return None
            next(iter(self._unproved.values())).end()
        connection.name = f"{self._prefix}{next(self._numbers)}"
        inner = socket.socket(socket.AF_UNIX)
        try:
            inner.setblocking(False)
            inner.bind(f"\0{connection.name}")
            inner.connect(self._path)
        except OSError:  # also when connections come faster than the server takes them
            inner.close()
            return None
        self._connections[connection.name] = self._unproved[connection.name] = connection
        connection.arm(self._prove_s)
        return inner

    def forget(self, name: str) -> None:
        """Free the place of a connection."""
        self._connections.pop(name, None)
        self._unproved.pop(name, None)


class _Side(asyncio.Protocol):
    """One side of a connection. What it reads goes to the other one, and waits there at most until it is read."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by their type
        self.transport.set_write_buffer_limits(PAUSED_BYTES)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class _Outside(_Side):
    """The side of a client."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.name = ""
        self._gate = gate
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._early: list[bytes] = []
        """What came before the other side was there. uvloop reads on after a `pause_reading` in `connection_made`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        inner = self._gate.admit(self)
        if inner is None:
            self.transport.write(FULL)
            self.transport.close()
            return
        self._task = asyncio.get_running_loop().create_task(self._join(inner))

    def data_received(self, data: bytes) -> None:
        """Pass bytes on, or keep them until the other side is there. No client has a reason to say much so early."""
        if self.other is not None:
            super().data_received(data)
            return
        self._early.append(data)
        if sum(map(len, self._early)) > PAUSED_BYTES:
            self.end()

    async def _join(self, inner: socket.socket) -> None:
        side = _Side()
        side.other = self
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: side, sock=inner)
        except OSError:
            inner.close()
            self.end()
            return
        self.other = side
        early, self._early = self._early, []
        if self.transport is None or self.transport.is_closing():  # the client left meanwhile
            self.end()
        else:
            for data in early:
                super().data_received(data)

    def arm(self, delay_s: float) -> None:
        """End the connection after a time."""
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.end)

    def disarm(self) -> None:
        """Let the connection stay."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """End the connection on both sides. Idempotent."""
        self.disarm()
        self._gate.forget(self.name)
        for side in (self, self.other):
            if side is not None and side.transport is not None:
                side.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.disarm()
        self._gate.forget(self.name)
        super().connection_lost(exc)
