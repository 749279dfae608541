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
print(ControlServer({"die": lambda: os._exit(1)}).name, flush=True)
sys.stdin.read()
"""


def raises(error: Exception) -> None:
    raise error


@pytest.fixture(scope="module")
def server() -> ControlServer:
    return ControlServer({"echo": lambda *arguments: arguments, "raises": raises, "hangs": threading.Event().wait})


def test_an_answer_is_what_the_process_returned(server: ControlServer) -> None:
    assert call(server.name, os.getpid(), "echo", 1, "two", None, timeout_s=BOUND_S) == (1, "two", None)


def test_a_wrong_setting_stays_one_and_any_other_error_is_named(server: ControlServer) -> None:
    with pytest.raises(ConfigError, match="model: nothing is called so"):
        call(server.name, os.getpid(), "raises", ConfigError("model: nothing is called so"), timeout_s=BOUND_S)
    with pytest.raises(StartFailed, match="OSError: no room"):
        call(server.name, os.getpid(), "raises", OSError("no room"), timeout_s=BOUND_S)
    with pytest.raises(StartFailed, match="KeyError: 'unknown'"):
        call(server.name, os.getpid(), "unknown", timeout_s=BOUND_S)


def test_another_process_behind_the_name_is_not_read(server: ControlServer) -> None:
    """A recycled name: whoever listens there now could send anything, and reading it could run code."""
    with pytest.raises(WorkerDied, match="another one listens in its place"):
        call(server.name, NOBODY, "echo", timeout_s=BOUND_S)


def test_a_process_that_is_not_there_or_says_nothing_counts_as_dead(server: ControlServer) -> None:
    with pytest.raises(WorkerDied, match="has ended"):
        call(f"{server.name}-gone", os.getpid(), "echo", timeout_s=BOUND_S)
    with pytest.raises(WorkerDied, match="did not answer hangs"):
        call(server.name, os.getpid(), "hangs", timeout_s=0.05)


def test_a_process_that_ends_within_a_call_is_told_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", DIES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        with pytest.raises(WorkerDied, match=f"process {child.pid} has ended"):
            call(name, child.pid, "die", timeout_s=None)


def test_too_many_calls_are_closed_and_later_ones_served() -> None:
    """(1) All places are taken by callers that say nothing. (2) One more is closed. (3) They leave: calls are answered."""
    server = ControlServer({"echo": lambda: "here"})
    waiting = [Client(f"\0{server.name}", family="AF_UNIX") for _ in range(MOST_CALLS)]
    with pytest.raises(WorkerDied):
        call(server.name, os.getpid(), "echo", timeout_s=BOUND_S)
    for each in waiting:
        each.close()
    for _ in range(1000):
        try:
            assert call(server.name, os.getpid(), "echo", timeout_s=BOUND_S) == "here"
            return
        except WorkerDied:  # their threads have not ended yet
            threading.Event().wait(0.01)
    pytest.fail("the places were not given back")
