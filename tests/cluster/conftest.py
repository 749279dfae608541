"""The command line as a child process over the stand-ins, and ways to see what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.cluster import processes, record

HERE = Path(__file__).resolve().parent
STANDINS = (str(HERE / "run_cli.py"),)
READ_TIMEOUT_S = 120.0
GONE_TIMEOUT_S = 30.0  # for what ends within a moment on an idle machine


class Command:
    """One run of the command line, with a temporary folder of its own so that what it leaves can be seen.

    `program` is what Python runs: the command line over the stand-ins unless a test wants everything real.
    """

    def __init__(self, temporary: Path, *arguments: str, program: tuple[str, ...] = STANDINS, **environment: str) -> None:
        self.temporary = temporary
        self.output = temporary.with_suffix(".out")
        self.seen: set[psutil.Process] = set()
        with self.output.open("wb") as file:
            self.child = subprocess.Popen(
                [sys.executable, *program, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", **environment},
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the output matches; notes every process that was started meanwhile."""
        deadline = time.monotonic() + READ_TIMEOUT_S
        while time.monotonic() < deadline:
            ended = self.child.poll() is not None
            self.seen |= set(processes.descendants(self.child.pid))
            if match := re.search(pattern, self.text):
                return match
            assert not ended, f"it ended with {self.child.returncode} before {pattern!r}:\n{self.text}"
            time.sleep(0.02)
        raise AssertionError(f"{pattern!r} did not come:\n{self.text}")

    def signal(self, number: int) -> None:
        """To the whole group, as a terminal does."""
        self.seen |= set(processes.descendants(self.child.pid))
        os.killpg(self.child.pid, number)

    def end(self) -> int:
        return self.child.wait(READ_TIMEOUT_S)

    def lasting(self) -> list[record.ProcessId]:
        """Every process that it has started, whoever their parents are: all inherit its temporary folder."""
        return record.carrying("TMPDIR", str(self.temporary))

    def assert_nothing_left(self) -> None:
        assert not processes.wait_gone(self.seen, GONE_TIMEOUT_S), self.text
        deadline = time.monotonic() + GONE_TIMEOUT_S
        while (left := self.lasting()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == [], self.text
        assert list(self.temporary.iterdir()) == [], self.text

    def close(self) -> None:
        """After a failed test: leave nothing to the next one."""
        if self.child.poll() is None:
            self.seen |= set(processes.descendants(self.child.pid))
            self.child.send_signal(signal.SIGKILL)
            self.child.wait(READ_TIMEOUT_S)
        processes.kill(self.seen)
        for process in self.lasting():  # the workers of a killed `up` serve on
            process.send(signal.SIGKILL)


@pytest.fixture(scope="session")
def command_type() -> type[Command]:
    """For a cluster that several tests share."""
    return Command


@pytest.fixture
def run_command(short_tmp: Path) -> Iterator[type[Command]]:
    """Start commands; their rests are ended with the test."""
    started: list[Command] = []

    class Run(Command):
        def __init__(self, *arguments: str, program: tuple[str, ...] = STANDINS, **environment: str) -> None:
            folder = short_tmp / str(len(started))
            folder.mkdir()
            super().__init__(folder, *arguments, program=program, **environment)
            started.append(self)

    yield Run
    for command in started:
        command.close()


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A temporary folder short enough for Ray's sockets; pytest's own is not."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)
