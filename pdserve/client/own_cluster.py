"""A cluster of `pdserve up` in a child process, for one measurement or one program. It is stopped on every path.

The child is a process of its own so that the program shares no interpreter with the supervision of workers.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from pdserve.core.errors import ConfigError, Unavailable

START_S: Final = 600.0
"""The longest time until the cluster is ready: a model may have to be loaded and its kernels compiled."""
STOP_S: Final = 60.0
"""The longest time for a clean end. After it the child is told to stop at once."""
POLL_S: Final = 0.1
BAD_SETTING: Final = 2
"""The exit status by which `pdserve up` tells that a setting is wrong."""
READY: Final = re.compile(r"^ready;", re.MULTILINE)
MOST_CHARS: Final = 400
"""The end of the child's output that an error quotes."""
FREE_PORTS: Final = ("--http-port", "0", "--grpc-port", "0", "--admin-port", "0")
_MAIN: Final = """
import ctypes, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for a program in the background
ctypes.CDLL(None).prctl(1, signal.SIGINT)  # PR_SET_PDEATHSIG
from pdserve.cli import main
main(prog_name="pdserve")
"""
UP: Final = (sys.executable, "-c", _MAIN, "up", "--bound")
"""The child stops by itself when its parent is killed: the kernel signals it at the end of the thread that started it."""


class OwnCluster:
    """A running `pdserve up` inside `with`. `address` and `admin_address` are those of its router.

    prefill, decode: the workers at the start. config: the file of settings for `--config`. flags: further flags of `pdserve
    up`. Raises `ConfigError` for a wrong setting, and `Unavailable` when the cluster does not become ready.
    """

    def __init__(
        self, prefill: int, decode: int, config: Path | None, *, flags: Sequence[str] = (), program: Sequence[str] = UP
    ) -> None:
        sizes = ("--prefill", str(prefill), "--decode", str(decode))
        settings = () if config is None else ("--config", str(config))
        self._arguments = [*program, *settings, *sizes, *FREE_PORTS, *flags]
        self._child: subprocess.Popen[bytes] | None = None
        self._failed: OSError | None = None
        self._started, self._over = threading.Event(), threading.Event()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed by __exit__, after the child has ended
        self.address = self.admin_address = ""

    def __enter__(self) -> OwnCluster:
        try:
            threading.Thread(target=self._keep, name="own-cluster", daemon=True).start()
            self._started.wait()
            if self._failed is not None:
                raise Unavailable(f"`pdserve up` cannot be started: {self._failed}")
            self._wait_ready(time.monotonic() + START_S)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def check(self) -> None:
        """Raises `Unavailable` if the cluster has ended by itself."""
        if self._child is not None and (status := self._child.poll()) is not None:
            raise Unavailable(f"`pdserve up` ended by itself with status {status}: {self._end()}")

    def _keep(self) -> None:
        """Start the child, and live as long as it may run. The thread that made this object may end before."""
        try:
            self._child = subprocess.Popen(
                self._arguments, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as exc:
            self._failed = exc
        finally:
            self._started.set()
        self._over.wait()

    def _wait_ready(self, deadline_s: float) -> None:
        assert self._child is not None
        while not READY.search(self._text()):
            if (status := self._child.poll()) is not None:
                kind = ConfigError if status == BAD_SETTING else Unavailable
                raise kind(f"`pdserve up` ended with status {status} before it was ready: {self._end()}")
            if time.monotonic() > deadline_s:
                raise Unavailable(f"`pdserve up` was not ready after {START_S:g} s: {self._end()}")
            time.sleep(POLL_S)
        self.address, self.admin_address = self._said("gRPC"), self._said("admin")

    def _said(self, name: str) -> str:
        found = re.search(rf"^{name} +(\S+)", self._text(), re.MULTILINE)
        if found is None:
            raise Unavailable(f"`pdserve up` printed no address of {name}: {self._end()}")
        return found[1]

    def _text(self) -> str:
        return os.pread(self._output.fileno(), 1 << 20, 0).decode("utf-8", "replace")

    def _end(self) -> str:
        return " ".join(self._text().split())[-MOST_CHARS:] or "it printed nothing"

    def _stop(self) -> None:
        """End the child: first by a signal, then by a second signal that ends it at once, then by force."""
        child, self._child = self._child, None
        try:
            if child is None:
                return
            steps: tuple[Callable[[], None], ...] = (
                lambda: child.send_signal(signal.SIGINT),
                lambda: child.send_signal(signal.SIGINT),
                lambda: os.killpg(child.pid, signal.SIGKILL),
            )
            for step in steps:
                if child.poll() is not None:
                    return
                step()
                try:
                    child.wait(STOP_S)
                    return
                except subprocess.TimeoutExpired:
                    continue
        finally:
            self._over.set()
            self._output.close()
