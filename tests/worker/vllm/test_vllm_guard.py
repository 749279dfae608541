"""The guard of a server: nothing of a server outlives the worker, however the worker or the server ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

from pdserve.worker.vllm import guard

SERVER = """
import subprocess, sys, signal, time
if {deaf}: signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep({ends_s})
sys.exit(7)
"""


def start(*, deaf: bool = False, ends_s: float = 600.0) -> tuple[subprocess.Popen[bytes], psutil.Process]:
    """Return the guard, and the child of its server."""
    code = SERVER.format(deaf=deaf, ends_s=ends_s)
    command = [sys.executable, "-I", guard.__file__, sys.executable, "-c", code]
    guarded = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert guarded.stdout is not None
    return guarded, psutil.Process(int(guarded.stdout.readline()))


def finish(guarded: subprocess.Popen[bytes]) -> int:
    assert guarded.stdin is not None
    assert guarded.stdout is not None
    guarded.stdin.close()
    guarded.stdout.close()
    return guarded.wait(30)


@pytest.mark.parametrize("deaf", [False, True])
def test_all_of_a_server_ends_with_its_worker(deaf: bool):
    guarded, child = start(deaf=deaf)
    finish(guarded)
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running()


def test_what_a_server_leaves_behind_ends_with_it():
    guarded, child = start(ends_s=0.2)
    assert guarded.wait(30) == 7
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running()
    finish(guarded)


def test_signals_of_a_terminal_do_not_end_the_guard():
    guarded, child = start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        guarded.send_signal(number)
    time.sleep(0.3)
    assert guarded.poll() is None
    assert child.is_running()
    finish(guarded)
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running()


def test_a_server_is_asked_to_end_before_it_is_killed():
    """What the guard ignores would be ignored in the server as well: then it would hear of no end until it is killed."""
    command = [sys.executable, "-I", guard.__file__, "cat", "/proc/self/status"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as guarded:
        assert guarded.stdout is not None
        (line,) = [line for line in guarded.stdout if line.startswith("SigIgn")]
    ignored = int(line.split()[1], 16)
    assert not ignored & (1 << (signal.SIGTERM - 1)), "SIGTERM is ignored"
    assert not ignored & (1 << (signal.SIGINT - 1)), "SIGINT is ignored"
