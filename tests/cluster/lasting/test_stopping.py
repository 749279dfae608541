"""Signals as they come in practice: many within a few milliseconds, at any moment, and while nothing else answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

BURST = 10
PROGRAM = """
import os, sys, threading
from pdserve.commands.stopping import StopSignals
with StopSignals() as stop:
    stop.at_once = lambda: os.write(1, b"at once\\n")
    def work():
        os.write(1, b"up\\n")
        stop.event.wait(60)
        {after}
        return "clean"
    os.write(1, stop.run(work).encode() + b"\\n")
"""


def start(after: str = "pass") -> subprocess.Popen[bytes]:
    program = [sys.executable, "-c", PROGRAM.format(after=after)]
    child = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    return child


def end(child: subprocess.Popen[bytes]) -> tuple[int, list[bytes]]:
    try:
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert b"Traceback" not in err, err
    return child.returncode, out.split()


def test_one_signal_is_a_clean_end() -> None:
    child = start()
    child.send_signal(signal.SIGTERM)
    assert end(child) == (0, [b"clean"])


def test_a_second_signal_ends_what_does_not_end() -> None:
    """(1) The work waits long after the first signal. (2) The second ends everything."""
    child = start("os.write(1, b'stopping\\n'); threading.Event().wait(60)")
    child.send_signal(signal.SIGINT)
    assert child.stdout is not None
    assert child.stdout.readline() == b"stopping\n"
    child.send_signal(signal.SIGINT)
    assert end(child) == (130, [b"at", b"once"])


@pytest.mark.parametrize("numbers", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGINT)], ids=["one kind", "two kinds"])
def test_a_burst_of_signals_never_hangs(numbers: tuple[int, ...]) -> None:
    """Of one kind, the kernel may make one of all ten, which is a clean end. Two kinds are at least two signals. The work ends
    after the burst, or the last signals would come to a process that has restored its handlers."""
    children = [start("threading.Event().wait(60)" if len(numbers) > 1 else "sys.stdin.read()") for _ in range(4)]
    for child in children:
        for index in range(BURST):
            os.kill(child.pid, numbers[index % len(numbers)])
    ends = [end(child) for child in children]
    assert {status for status, _ in ends} <= ({130} if len(numbers) > 1 else {0, 130})


def test_a_signal_within_the_event_of_the_one_before_does_not_hang() -> None:
    """(1) The event of the first signal is being set, with its lock held. (2) Just then the second signal comes."""
    hold = """
import os, signal, sys, threading
from pdserve.commands.stopping import StopSignals
with StopSignals() as stop:
    class Held(threading.Event):
        def set(self):
            with self._cond:
                for number in (signal.SIGTERM, signal.SIGINT):
                    os.kill(os.getpid(), number)
                    for _ in range(1000): pass  # a handler of Python's would run here
                self._flag = True
                self._cond.notify_all()
    stop.event = Held()
    def work():
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(60)
    stop.run(work)
"""
    done = subprocess.run([sys.executable, "-c", hold], timeout=60, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"stopped at once\n")
