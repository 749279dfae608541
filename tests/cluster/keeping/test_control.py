"""Calls between a keeper and its worker's process: every answer or one of three errors, and nothing from anybody else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from multiprocessing.connection import Client

import pytest

from pdserve.cluster.errors import StartFailed, WorkerDied
from pdserve.cluster.keeping.control import MOST_CALLS, ControlServer, call
from pdserve.core.errors import ConfigError

BOUND_S = 60.0
NOBODY = 2**22 + 1  # above the largest pid of Linux
DIES = """
import os, sys
from pdserve.cluster.keeping.control import ControlServer
print(ControlServer({"die": lambda: os._exit(1)}).address, flush=True)
sys.stdin.read()
"""


def raises(error: Exception) -> None:
    raise error


@pytest.fixture(scope="module")
def server() -> ControlServer:
    return ControlServer({"echo": lambda *arguments: arguments, "raises": raises, "hangs": threading.Event().wait})


def test_an_answer_is_what_the_process_returned(server: ControlServer) -> None:
    assert call(server.address, os.getpid(), "echo", 1, "two", None, timeout_s=BOUND_S) == (1, "two", None)


def test_a_wrong_setting_stays_one_and_any_other_error_is_named(server: ControlServer) -> None:
    with pytest.raises(ConfigError, match="model: nothing is called so"):
        call(server.address, os.getpid(), "raises", ConfigError("model: nothing is called so"), timeout_s=BOUND_S)
    with pytest.raises(StartFailed, match="OSError: no room"):
        call(server.address, os.getpid(), "raises", OSError("no room"), timeout_s=BOUND_S)
    with pytest.raises(StartFailed, match="KeyError: 'unknown'"):
        call(server.address, os.getpid(), "unknown", timeout_s=BOUND_S)


def test_another_process_behind_the_name_is_not_read(server: ControlServer) -> None:
    """A recycled name: whoever listens there now could send anything, and reading it could run code."""
    with pytest.raises(WorkerDied, match="another one listens in its place"):
        call(server.address, NOBODY, "echo", timeout_s=BOUND_S)


def test_a_process_that_is_not_there_or_says_nothing_counts_as_dead(server: ControlServer) -> None:
    with pytest.raises(WorkerDied, match="has ended"):
        call(f"gone-{server.address}", os.getpid(), "echo", timeout_s=BOUND_S)
    with pytest.raises(WorkerDied, match="did not answer hangs"):
        call(server.address, os.getpid(), "hangs", timeout_s=0.05)


def test_a_process_that_ends_within_a_call_is_told_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", DIES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        with pytest.raises(WorkerDied, match=f"process {child.pid} has ended"):
            call(address, child.pid, "die", timeout_s=None)


def test_too_many_calls_are_closed_and_later_ones_served() -> None:
    """(1) All places are taken by callers that say nothing. (2) One more is closed. (3) They leave: calls are answered."""
    server = ControlServer({"echo": lambda: "here"})
    waiting = [Client(f"\0{server.name}", family="AF_UNIX") for _ in range(MOST_CALLS)]
    with pytest.raises(WorkerDied):
        call(server.address, os.getpid(), "echo", timeout_s=BOUND_S)
    for each in waiting:
        each.close()
    for _ in range(1000):
        try:
            assert call(server.address, os.getpid(), "echo", timeout_s=BOUND_S) == "here"
            return
        except WorkerDied:  # their threads have not ended yet
            threading.Event().wait(0.01)
    pytest.fail("the places were not given back")


def test_whoever_does_not_know_the_key_is_not_read() -> None:
    """Root of another container that shares the network has our user's id, and reading what it sends runs its code."""
    ran = threading.Event()
    server = ControlServer({"run": ran.set})
    for key in ("", "0" * 32, "0" * 1000):
        with pytest.raises(WorkerDied):
            call(f"{server.name}:{key}", os.getpid(), "run", timeout_s=BOUND_S)
    with Client(f"\0{server.name}", family="AF_UNIX") as connection:
        connection.send(("run", ()))
        with pytest.raises((EOFError, ConnectionError)):
            connection.recv()
    assert not ran.is_set()


@pytest.mark.parametrize("broken", ["threading.Thread.start", "pdserve.cluster.keeping.control._peer"])
def test_a_lack_of_threads_or_descriptors_ends_no_control(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop that accepts calls ended, and whoever watched the worker waited for ever."""
    server = ControlServer({"echo": lambda: "here"})
    error = RuntimeError("can't start new thread") if "Thread" in broken else OSError("too many open files")
    with monkeypatch.context() as patch:
        patch.setattr(broken, lambda *_: raises(error))
        with Client(f"\0{server.name}", family="AF_UNIX") as connection:
            assert connection.poll(BOUND_S)
            with pytest.raises((EOFError, ConnectionError)):
                connection.recv()
    assert call(server.address, os.getpid(), "echo", timeout_s=BOUND_S) == "here"
