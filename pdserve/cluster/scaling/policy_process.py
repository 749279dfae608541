"""The process of a scaling policy as its parent uses it. No call waits, except `close`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Final

import msgspec

from pdserve.cluster.router_process import environment
from pdserve.cluster.scaling.policy_child import Answer
from pdserve.observe.log_files import empty_if_large, open_log
from pdserve.planner.limits import MOST_WORKERS

MODULE: Final = "pdserve.cluster.scaling.policy_child"
LINE_BYTES: Final = 16 << 10  # an answer has less than 3 KiB
REAP_S: Final = 5.0  # the kernel ends a process at once, unless a disk or a driver holds it


class Ended(Exception):
    """The process has ended, or says what no policy's process says. The message tells which."""


class PolicyProcess:
    """One process, from its start to its end. It starts when it is made, and whoever makes it calls `kill` and `close`."""

    def __init__(self, setting: str, name: str, log: Path) -> None:
        """`setting` and `name`: the setting and its value, `module:function`. Raises `OSError` if no process can be made."""
        self._log = log
        with open_log(log) as file:
            self._child = subprocess.Popen(
                [sys.executable, "-m", MODULE, setting, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                env=environment(),
            )
        self._pipes: list[IO[bytes]] = [pipe for pipe in (self._child.stdin, self._child.stdout) if pipe is not None]
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        self._rest = b""

    @property
    def pid(self) -> int:
        """The pid."""
        return self._child.pid

    def ask(self, line: bytes) -> None:
        """Send a question. Raises `Ended`."""
        empty_if_large(self._log)
        questions = self._pipes[0]
        try:
            sent = os.write(questions.fileno(), line + b"\n")
        except OSError as exc:  # full: a process that reads nothing, though each question waits for the last answer
            raise Ended(self._how()) from exc
        if sent <= len(line):
            raise Ended("it reads no questions")

    def answer(self) -> Answer | None:
        """Return the next answer. None: there is none yet. Raises `Ended`."""
        if b"\n" not in self._rest:
            try:
                came = os.read(self._pipes[1].fileno(), LINE_BYTES)
            except BlockingIOError:
                return None
            if not came:
                raise Ended(self._how())
            self._rest += came
        line, newline, rest = self._rest.partition(b"\n")
        if not newline and len(line) < LINE_BYTES:
            return None
        self._rest = rest
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise Ended("it wrote to the pipe of the answers") from exc
        if answer.workers is not None and not 0 <= answer.workers <= MOST_WORKERS:
            raise Ended("it wrote to the pipe of the answers")
        return answer

    def kill(self) -> None:
        """End the process and all that it started in its session. Idempotent."""
        if self._child.returncode is None:  # so the kernel gives its number to nobody else
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()

    def gone(self) -> bool:
        """Tell whether the process has ended, and take its status."""
        return self._child.poll() is not None

    def close(self) -> None:
        """End the process and wait until it is gone, for at most `REAP_S`. Idempotent."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(REAP_S)

    def _how(self) -> str:
        """Return how the process ended. Its status is not taken, so that `kill` still finds what it started."""
        ended = os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return "its process closed its pipes"
        how = "ended with status" if ended.si_code == os.CLD_EXITED else "was ended by signal"
        return f"its process {how} {ended.si_status}"
