"""Calls between a worker's process and its keeper, over a Unix socket of the machine on which both run.

The socket's name is abstract: it leaves no file behind, needs no folder, and ends with the process. Everybody on the machine
can dial such a name, and so can other containers that share the network, where root has our user's id. So each side checks who
the other side is. The worker's process serves only those who know its key, which only its user can read. The keeper reads
nothing but from the very process that it means: messages are pickled, and reading one can run code.
"""

from __future__ import annotations

import contextlib
import hmac
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
KEY_BYTES: Final = 16  # nobody guesses 128 bits
KEY_TIMEOUT_S: Final = 10.0
"""A caller that has not sent the key by then gives its place back. It sends the key at once."""
RETRY_S: Final = 0.1
log = logging.getLogger(__name__)


class ControlServer:
    """The calls of one process. Each connection carries one call and its answer, in a thread of its own."""

    def __init__(self, calls: Mapping[str, Callable[..., object]]) -> None:
        """Listen, and serve `calls` from now on."""
        self.name = f"pdserve-{secrets.token_hex(16)}"
        self._key = secrets.token_hex(KEY_BYTES)
        self.address = f"{self.name}:{self._key}"
        self._calls = calls
        self._free = threading.BoundedSemaphore(MOST_CALLS)
        self._open = 0
        self._answered = threading.Condition()
        self._listener = Listener(f"\0{self.name}", family="AF_UNIX", backlog=MOST_CALLS)
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def finish(self, timeout_s: float) -> None:
        """Wait until every call that is open has its answer, for at most `timeout_s`. A process that ends before its answer is
        sent looks like one that died."""
        with self._answered:
            self._answered.wait_for(lambda: not self._open, timeout_s)

    def _accept(self) -> None:
        while True:
            try:
                self._take(self._listener.accept())
            except (OSError, RuntimeError) as exc:  # the caller went away, or no descriptor or no thread is free now
                log.warning("a keeper's call was not accepted: %s", exc)
                time.sleep(RETRY_S)

    def _take(self, connection: Connection) -> None:
        if not self._free.acquire(blocking=False):
            connection.close()
            return
        try:
            threading.Thread(target=self._serve, args=(connection,), name="call", daemon=True).start()
        except RuntimeError:
            self._free.release()
            connection.close()
            raise

    def _serve(self, connection: Connection) -> None:
        with self._answered:
            self._open += 1
        try:
            with connection, contextlib.suppress(OSError, EOFError):  # the keeper is gone, and wants no answer any more
                if not self._knows_key(connection):
                    return
                name, arguments = connection.recv()
                try:
                    answer: tuple[str, Any] = ("", self._calls[name](*arguments))
                except Exception as exc:  # noqa: BLE001  the caller gets every error
                    answer = (type(exc).__name__, getattr(exc, "message", None) or str(exc))
                connection.send(answer)
        finally:
            with self._answered:
                self._open -= 1
                self._answered.notify_all()
            self._free.release()

    def _knows_key(self, connection: Connection) -> bool:
        """Read the key, which is not pickled."""
        if _peer(connection)[1] != os.getuid() or not connection.poll(KEY_TIMEOUT_S):
            return False
        return hmac.compare_digest(connection.recv_bytes(len(self._key)), self._key.encode())


def call(address: str, pid: int, method: str, *arguments: object, timeout_s: float | None = None) -> Any:
    """Make one call to the process `pid` that listens at `address`, and return its answer.

    `timeout_s` None waits as long as the process lives. Raises `WorkerDied` when the process does not answer, or no more,
    `ConfigError` when it raised one, and `StartFailed` for any other error of the process.
    """
    name, _, key = address.partition(":")
    try:
        with Client(f"\0{name}", family="AF_UNIX") as connection:
            if _peer(connection)[:2] != (pid, os.getuid()):
                raise WorkerDied(f"process {pid} has ended, and another one listens in its place")
            connection.send_bytes(key.encode())
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
