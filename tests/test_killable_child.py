"""The child that is asked with a deadline: whatever it does costs one question, and neither it nor its parent leaves anything.

Each of its three users has cases of its own: `test_parser.py`, `test_grammar_checker.py` and `test_policy.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.cluster import processes
from pdserve.killable_child import ChildEnded, ChildProcess, KillableChild

COMMAND = (sys.executable, str(Path(__file__).with_name("odd_child.py")))
WAIT_S = 60.0
SOON_S = 0.3
MOST_BYTES = 1 << 21


@pytest.fixture
def child() -> Iterator[KillableChild]:
    made = KillableChild(COMMAND, start_timeout_s=WAIT_S, most_bytes=MOST_BYTES, stderr=subprocess.PIPE)
    yield made
    made.close()
    made.close()
    assert made.pid is None
    assert [each for each in processes.descendants(os.getpid()) if "odd" in processes.command(each)] == []


def ask(child: KillableChild, question: bytes, timeout_s: float = WAIT_S) -> bytes:
    child.start()
    return child.ask(question, timeout_s)


def test_one_process_answers_one_question_after_the_other(child: KillableChild) -> None:
    """Also questions and answers that are empty, or larger than a pipe has room for."""
    assert child.pid is None, "it starts when it is needed"
    for question in (b"first", b"", b"x" * MOST_BYTES, b"last"):
        assert ask(child, question) == question
        process = psutil.Process(child.pid)
        assert process.cmdline()[0] == "pdserve: odd"
    assert os.getpgid(process.pid) == process.pid
    assert os.getsid(process.pid) == os.getsid(0)


@pytest.mark.parametrize("question", [b"sleep", b"spin"])
def test_a_late_child_is_killed_and_the_next_question_has_another_one(child: KillableChild, question: bytes) -> None:
    child.start()
    late = psutil.Process(child.pid)
    with pytest.raises(TimeoutError):
        child.ask(question, SOON_S)
    assert child.pid is None
    assert not late.is_running(), "it is gone, and no zombie"
    assert ask(child, b"again") == b"again"


@pytest.mark.parametrize(
    ("question", "how", "was_killed"),
    [
        (b"cry", "exit status 3", False),
        (b"garbage", "it wrote to the pipe of the answers", False),
        (b"shout", "it wrote to the pipe of the answers", False),
    ],
)
def test_a_child_that_fails_says_how_and_the_next_question_has_another_one(
    child: KillableChild, question: bytes, how: str, was_killed: bool
) -> None:
    with pytest.raises(ChildEnded) as caught:
        ask(child, question)
    assert (caught.value.how, caught.value.was_killed) == (how, was_killed)
    assert caught.value.written.endswith("last words") == (question == b"cry")
    assert len(caught.value.written) <= 4096
    assert ask(child, b"again") == b"again"


@pytest.mark.parametrize(("number", "was_killed"), [(signal.SIGKILL, True), (signal.SIGTERM, True), (signal.SIGABRT, False)])
def test_a_signal_from_outside_is_told_from_one_that_input_may_cause(
    child: KillableChild, number: signal.Signals, was_killed: bool
) -> None:
    child.start()
    assert child.pid is not None
    killer = threading.Timer(SOON_S, os.kill, (child.pid, number))
    killer.start()
    with pytest.raises(ChildEnded) as caught:
        child.ask(b"sleep", WAIT_S)
    killer.join()
    assert (caught.value.how, caught.value.was_killed) == (f"signal {number.name}", was_killed)


def test_a_child_that_was_killed_between_two_questions_costs_none(child: KillableChild) -> None:
    assert ask(child, b"first") == b"first"
    killed = psutil.Process(child.pid)
    killed.kill()
    deadline = time.monotonic() + WAIT_S
    while killed.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ask(child, b"second") == b"second"
    assert child.pid != killed.pid


def test_what_libraries_print_is_no_answer(child: KillableChild) -> None:
    assert ask(child, b"print") == b"", "standard input is empty"
    assert ask(child, b"again") == b"again"


def test_an_answer_beyond_the_bound_is_not_read() -> None:
    child = KillableChild(COMMAND, start_timeout_s=WAIT_S, most_bytes=(1 << 20) - 1)
    with pytest.raises(ChildEnded):
        ask(child, b"lengthy")
    child.close()


@pytest.mark.parametrize("size", [1, 1 << 20], ids=["small", "more than the pipe has room for"])
def test_a_child_that_reads_nothing_holds_its_parent_no_longer_than_the_deadline(size: int) -> None:
    greets = "import sys, time; sys.stdout.buffer.write(bytes(8)); sys.stdout.flush(); time.sleep(600)"
    child = KillableChild((sys.executable, "-c", greets), start_timeout_s=WAIT_S, most_bytes=1)
    child.start()
    with pytest.raises(TimeoutError):
        child.ask(bytes(size), SOON_S)
    child.close()


def test_a_child_that_does_not_start_is_killed() -> None:
    child = KillableChild((sys.executable, "-c", "import time; time.sleep(600)"), start_timeout_s=SOON_S, most_bytes=1)
    with pytest.raises(TimeoutError):
        child.start()
    assert child.pid is None


def test_what_a_child_started_is_killed_with_it(child: KillableChild) -> None:
    started = psutil.Process(int(ask(child, b"leave a child")))
    child.close()
    assert not processes.wait_gone([started], WAIT_S)


def test_a_child_inherits_no_socket_of_its_parent(child: KillableChild) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        os.set_inheritable(listening.fileno(), True)
        assert b"socket:" not in ask(child, b"descriptors")


@pytest.mark.parametrize("question", [b"sleep", b"spin"])
def test_closing_ends_who_waits_and_no_other_child_starts(child: KillableChild, question: bytes) -> None:
    child.start()
    closer = threading.Timer(SOON_S, child.close)
    closer.start()
    with pytest.raises(ChildEnded):
        child.ask(question, WAIT_S)
    closer.join()
    with pytest.raises(ChildEnded, match="closed"):
        child.start()


def test_no_call_waits_for_a_child_that_is_looked_at_now_and_then() -> None:
    """The question and the answer are larger than the pipes, and each look moves what can be moved."""
    process = ChildProcess(COMMAND, MOST_BYTES)
    process.wait(WAIT_S)
    process.send(b"x" * MOST_BYTES)
    assert until_it_answers(process) == b"x" * MOST_BYTES
    process.send(b"hang up")
    with pytest.raises(ChildEnded, match="it closed its pipes"):
        until_it_answers(process)
    deadline = time.monotonic() + WAIT_S
    while not process.close(0.0):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def until_it_answers(process: ChildProcess) -> bytes:
    deadline = time.monotonic() + WAIT_S
    while (answer := process.answer()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return answer


PARENT = """
import sys, threading
from test_killable_child import COMMAND, ChildProcess
child = ChildProcess(COMMAND, 100)
child.wait(60.0)
child.send(sys.argv[1].encode())
print(child.pid, flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("question", ["ping", "sleep", "spin"])
def test_a_child_ends_with_its_parent_however_that_ends(question: str) -> None:
    """Also while it holds the interpreter's lock, so that no thread of its own sees the pipe close."""
    folders = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    command = [sys.executable, "-c", PARENT, question]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": folders}) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        assert not processes.wait_gone([child], WAIT_S)


LATE = """
import os, time
from pdserve.killable_child import open_channel
os.read(0, 1)  # it returns once the parent has gone
open_channel("late")
time.sleep(600)
"""
HASTY = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
"""


def test_a_child_whose_parent_has_gone_before_it_asked_for_the_signal_ends_at_once() -> None:
    command = [sys.executable, "-c", HASTY, LATE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
        assert not processes.wait_gone([psutil.Process(int(done.stdout))], WAIT_S)
