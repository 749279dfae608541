"""The listening socket of the HTTP front end and its life. The server runs in the router's own loop, without signal
handlers."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from pdserve.config import RouterConfig
from pdserve.core.errors import ConfigError
from router.http.door import Door
from router.http.protocol import ConnectionTable, GuardedProtocol
from router.http.reply import RunningCalls

BACKLOG: Final = 1024
KEEP_ALIVE_S: Final = 75  # above the usual 60 s of proxies, so that the client side closes first
CLOSE_GRACE_S: Final = 1.0  # running answers may take this long to finish
CLOSE_STEP_S: Final = 1.0  # cancelled answers may take this long to tell their clients


class HttpServer:
    """The running HTTP server that `router.http.serve_http` returns. Its owner must `close` it."""

    def __init__(self, server: asyncio.Server, state: ServerState, running: RunningCalls, port: int) -> None:
        self._server = server
        self._state = state
        self._running = running
        self.port = port

    async def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """Accept nothing more, let answers finish for `grace_s`, then cancel them. Bounded and idempotent."""
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        await self._wait(grace_s)
        self._running.cancel_all()
        await self._wait(CLOSE_STEP_S)
        for connection in list(self._state.connections):
            connection.transport.abort()
        for task in self._state.tasks:
            task.cancel()
        await self._wait(CLOSE_STEP_S)

    async def _wait(self, timeout_s: float) -> None:
        """Wait for the tasks of all requests. A task ends by itself or by an error, or stays for the next step."""
        tasks = set(self._state.tasks)
        if tasks and timeout_s > 0:
            await asyncio.wait(tasks, timeout=timeout_s)


async def start_server(
    app: ASGIApp,
    running: RunningCalls,
    host: str,
    port: int,
    limits: RouterConfig,
    table: ConnectionTable,
    flag: str = "--http-port",
) -> HttpServer:
    """Listen and serve. Raises `ConfigError` naming the flag when the address is not available."""
    sock = await _listen(host, port, limits.stalled_client_s, flag)
    try:
        config = uvicorn.Config(
            Door(app, limits, host), http=HttpToolsProtocol, ws="none", lifespan="off", interface="asgi3", log_config=None,
            access_log=False, proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_S,
        )  # fmt: skip
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            return GuardedProtocol(table, limits.stalled_client_s, config=config, server_state=state, app_state={}, _loop=loop)

        server = await loop.create_server(protocol, sock=sock, backlog=BACKLOG)
    except BaseException:
        sock.close()
        raise
    return HttpServer(server, state, running, sock.getsockname()[1])


async def _listen(host: str, port: int, stalled_client_s: float, flag: str) -> socket.socket:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as exc:
        raise ConfigError(f"{_host_flag(flag)}: {host!r} is not an address of this machine: {exc.strerror}") from exc
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        _set_options(sock, stalled_client_s)
        sock.bind(address)
        sock.listen(BACKLOG)  # finds a second listener now, which listen(2) would otherwise refuse later
    except OSError as exc:
        sock.close()
        raise _cannot_bind(exc, host, port, flag) from exc
    return sock


def _set_options(sock: socket.socket, stalled_client_s: float) -> None:
    """Set socket options. Accepted connections inherit them."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a token is far smaller than a segment
    user_timeout: Any = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux only
    if user_timeout is not None:
        # The kernel ends a connection whose client takes nothing, or is unreachable, for so long. A write that waits
        # for the client then ends too, without a timer of our own for each token.
        sock.setsockopt(socket.IPPROTO_TCP, user_timeout, int(stalled_client_s * 1000))


def _cannot_bind(exc: OSError, host: str, port: int, flag: str) -> ConfigError:
    if exc.errno == errno.EADDRINUSE:
        return ConfigError(f"{flag}: port {port} of {host} is in use; choose another, or 0 for any free one")
    if exc.errno == errno.EACCES:
        return ConfigError(f"{flag}: port {port} needs privileges that this process lacks; choose one from 1024")
    return ConfigError(f"{_host_flag(flag)}: cannot listen on {host}, port {port}: {exc.strerror}")


def _host_flag(flag: str) -> str:
    """Return the name of the host that belongs to the port of a flag."""
    return "--host" if flag.startswith("--") else flag.replace("_port", "_host")
