"""Calls between a worker's process and its keeper, over a Unix socket of the machine on which both run.

The socket's name is abstract: it leaves no file behind, needs no folder, and ends with the process. Everybody on the machine
can dial such a name, so each side looks who the other one is. The worker's process serves its own user only. The keeper reads
nothing but from the very process that it means: messages are pickled, and reading one can run code.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Final

from pdserve.cluster.errors import StartFailed, WorkerDied
from pdserve.core.errors import ConfigError

MOST_CALLS: Final = 16
"""The calls that a worker's process serves at once. A keeper has at most four open, and two may overlap for a moment."""
CREDENTIALS: Final = struct.Struct("3i")  # pid, uid and gid of SO_PEERCRED
RETRY_S: Final = 0.1
log = logging.getLogger(__name__)


class ControlServer:
    """The calls of one process. Each connection carries one call and its answer, in a thread of its own."""

    def __init__(self, calls: Mapping[str, Callable[..., object]]) -> None:
        """Listen, and serve `calls` from now on."""
        self.name = f"pdserve-{secrets.token_hex(16)}"
        self._calls = calls
        self._free = threading.BoundedSemaphore(MOST_CALLS)
        self._listener = Listener(f"\0{self.name}", family="AF_UNIX", backlog=MOST_CALLS)
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError as exc:  # the caller went away meanwhile, or this process has no descriptor free
                log.warning("a keeper's call was not accepted: %s", exc)
                time.sleep(RETRY_S)
                continue
            if _peer(connection)[1] != os.getuid() or not self._free.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="call", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            with connection, contextlib.suppress(OSError, EOFError):  # the keeper is gone, and wants no answer any more
                name, arguments = connection.recv()
                try:
                    answer: tuple[str, Any] = ("", self._calls[name](*arguments))
                except Exception as exc:  # noqa: BLE001  the caller gets every error
                    answer = (type(exc).__name__, getattr(exc, "message", None) or str(exc))
                connection.send(answer)
        finally:
            self._free.release()


def call(name: str, pid: int, method: str, *arguments: object, timeout_s: float | None = None) -> Any:
    """Make one call to the process `pid` that listens at `name`, and return its answer.

    `timeout_s` None waits as long as the process lives. Raises `WorkerDied` when the process does not answer, or no more,
    `ConfigError` when it raised one, and `StartFailed` for any other error of the process.
    """
    try:
        with Client(f"\0{name}", family="AF_UNIX") as connection:
            if _peer(connection)[:2] != (pid, os.getuid()):
                raise WorkerDied(f"process {pid} has ended, and another one listens in its place")
            connection.send((method, arguments))
            if not connection.poll(timeout_s):
                raise WorkerDied(f"process {pid} did not answer {method} within {timeout_s} s")
            error, answer = connection.recv()
    except (OSError, EOFError) as exc:
        raise WorkerDied(f"process {pid} has ended") from exc
    if error == ConfigError.__name__:
        raise ConfigError(answer)
    if error:
        raise StartFailed(f"{error}: {answer}")
    return answer


def _peer(connection: Connection) -> tuple[int, int, int]:
    """Return pid, uid and gid of the process that opened the other end, or that listened there first."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        pid, uid, gid = CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return pid, uid, gid
