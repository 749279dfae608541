"""A policy of the operator's own may do anything: its pool keeps its size, somebody is told, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.cluster import processes
from pdserve.cluster.errors import Interrupted
from pdserve.cluster.events import PolicyChanged, PolicyFault
from pdserve.cluster.scaling.policy import FIRST_S, PolicyState, ScalingPolicy, check_policy
from pdserve.core.errors import ConfigError
from pdserve.core.worker import Role
from pdserve.planner.limits import Targets
from pdserve.planner.observations import DemandObserved, Observations
from pdserve.planner.policy import PolicySize, ScalingContext

HERE = Path(__file__).resolve().parent
WAIT_S = 60.0
SETTING = "prefill.scaling_policy"
CONTEXT = ScalingContext(Role.PREFILL, 2, 1, 9, Observations(10.0, 10.0, DemandObserved(queued_requests=2.0)), Targets())


class Asked:
    """A policy on a clock that stands until a test moves it."""

    def __init__(self, function: str, folder: Path) -> None:
        self.now_s = 0.0
        self.told: list[PolicyChanged] = []
        self.log = folder / "policy.log"
        self.name = f"odd_policies:{function}"
        self.policy = ScalingPolicy(SETTING, self.name, 1.0, self.log, lambda event, _: self.told.append(event))

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, (self.policy._state, self.told, self.log.read_text())
            time.sleep(0.01)
            self.policy.follow(self.now_s)

    def start(self) -> None:
        self.until(lambda: self.policy._state is PolicyState.IDLE)

    def ask(self) -> PolicySize:
        """Ask, and follow until there is an answer or a fault. The clock stands, so that nobody is late."""
        self.policy.ask(CONTEXT, self.now_s)
        self.until(lambda: not self.policy.is_asked)
        return self.policy.size

    @property
    def pid(self) -> int:
        assert self.policy._process is not None
        return self.policy._process.pid


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Asked]]:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("POLICY_NOTE", str(tmp_path / "note"))
    made: list[Asked] = []

    def make(function: str) -> Asked:
        made.append(Asked(function, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.policy.close()
        one.policy.close()
    left = [each for each in processes.descendants(os.getpid()) if "policy" in processes.command(each)]
    assert left == []


def test_a_policy_gives_sizes_from_what_it_sees(asked: Callable[[str], Asked]) -> None:
    here = asked("seen")
    here.start()
    assert [here.ask().workers for _ in range(3)] == [4, 4, 4]
    assert here.told == []


def test_what_a_policy_prints_goes_to_its_log(asked: Callable[[str], Asked]) -> None:
    here = asked("prints")
    here.start()
    assert here.ask() == PolicySize("odd_policies:prints", 3)
    assert "garbage\n" in here.log.read_text()


@pytest.mark.parametrize(
    ("function", "fault", "words"),
    [
        ("raises", PolicyFault.RAISED, "it raised ZeroDivisionError: "),
        ("exits", PolicyFault.RAISED, "it raised SystemExit: done"),
        ("raises_oddly", PolicyFault.RAISED, "it raised Odd"),
        ("surrogate", PolicyFault.RAISED, "it raised RuntimeError: ???"),
        ("eats_memory", PolicyFault.RAISED, "it raised MemoryError"),
        ("nan", PolicyFault.NOT_A_SIZE, "it returned nan, not a whole number from 0 to 10000"),
        ("negative", PolicyFault.NOT_A_SIZE, "it returned -1,"),
        ("text", PolicyFault.NOT_A_SIZE, "it returned '3',"),
        ("true", PolicyFault.NOT_A_SIZE, "it returned True,"),
        ("huge", PolicyFault.NOT_A_SIZE, "it returned an object of type int,"),
        ("billion", PolicyFault.NOT_A_SIZE, "it returned 1000000000.0,"),
        ("nothing", PolicyFault.NOT_A_SIZE, "it returned None,"),
        ("long_bytes", PolicyFault.NOT_A_SIZE, "it returned b'"),
    ],
)
def test_a_policy_that_fails_keeps_its_process(
    asked: Callable[[str], Asked], function: str, fault: PolicyFault, words: str
) -> None:
    """It is asked again as if nothing had happened, and the fault is told once."""
    here = asked(function)
    here.start()
    pid = here.pid
    for _ in range(2):
        size = here.ask()
        assert size.workers is None
        assert size.fault.startswith(words)
    assert here.pid == pid
    assert [event.fault for event in here.told] == [fault]
    assert here.policy.faults == 2
    assert here.told[0].text.startswith(f"{SETTING}: {here.name} gives no size, so the pool keeps the one that it has: {words}")


@pytest.mark.parametrize("function", ["dies", "writes_to_every_pipe", "closes_every_pipe"])
def test_a_process_that_is_lost_comes_again_after_a_pause(asked: Callable[[str], Asked], function: str) -> None:
    """(1) The process is lost. (2) No other one starts before the pause is over. (3) The next pause is longer."""
    here = asked(function)
    for pause_s in (FIRST_S, 2 * FIRST_S):
        here.start()
        assert here.ask().workers is None
        assert here.policy._state is PolicyState.DOWN
        here.now_s += pause_s - 0.01
        here.policy.follow(here.now_s)
        assert here.policy._state is PolicyState.DOWN
        here.now_s += 0.01
    assert [event.fault for event in here.told] == [PolicyFault.ENDED]


@pytest.mark.parametrize("function", ["hangs", "spins"])
def test_a_late_policy_is_ended(asked: Callable[[str], Asked], function: str) -> None:
    here = asked(function)
    here.start()
    child = psutil.Process(here.pid)
    here.policy.ask(CONTEXT, here.now_s)
    here.now_s += 0.99
    here.policy.follow(here.now_s)
    assert here.policy.is_asked
    here.now_s += 0.01
    here.policy.follow(here.now_s)
    assert here.policy.size == PolicySize(here.name, fault="it gave no answer within 1 s")
    assert [event.fault for event in here.told] == [PolicyFault.LATE]
    assert not processes.wait_gone([child], WAIT_S)


def test_processes_of_a_policy_end_with_it(asked: Callable[[str], Asked], tmp_path: Path) -> None:
    here = asked("has_children")
    here.start()
    here.policy.ask(CONTEXT, here.now_s)
    note = tmp_path / "note"
    here.until(lambda: note.exists() and note.read_text() != "")
    child = psutil.Process(int(note.read_text()))
    here.now_s += 1.0
    here.policy.follow(here.now_s)
    assert not processes.wait_gone([child], WAIT_S)


def test_a_policy_that_recovers_says_so(asked: Callable[[str], Asked], tmp_path: Path) -> None:
    here = asked("healing")
    here.start()
    assert here.ask().workers is None
    (tmp_path / "note").touch()
    assert here.ask().workers == 5
    assert [event.fault for event in here.told] == [PolicyFault.RAISED, None]


def test_a_policy_that_is_asked_before_it_is_ready_gives_no_size(asked: Callable[[str], Asked]) -> None:
    here = asked("three")
    here.policy.ask(CONTEXT, 0.0)
    assert (here.policy.size.workers, here.policy.is_asked) == (None, False)
    here.start()
    assert here.ask().workers == 3
    here.policy.close()
    here.policy.ask(CONTEXT, 0.0)
    assert here.policy.size.workers is None, "an old size is nobody's wish"


def test_a_policy_whose_module_goes_away_is_told(asked: Callable[[str], Asked]) -> None:
    here = asked("gone")
    here.policy.follow(0.0)
    here.until(lambda: here.policy.fault is not None)
    assert [event.fault for event in here.told] == [PolicyFault.CANNOT_START]
    assert "module odd_policies has no function gone" in here.told[0].text


@pytest.mark.parametrize("name", ["odd_policies:gone", "odd_policies:NOT_CALLABLE", "no_such_module:size"])
def test_a_policy_that_cannot_be_imported_is_a_wrong_setting(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    with pytest.raises(ConfigError, match=f"^{SETTING} is '{name}', and module"):
        check_policy(SETTING, name, tmp_path / "log", threading.Event())


def test_a_check_ends_when_the_cluster_should_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    stop = threading.Event()
    check_policy(SETTING, "odd_policies:three", tmp_path / "log", stop)
    stop.set()
    with pytest.raises(Interrupted):
        check_policy(SETTING, "odd_policies:three", tmp_path / "log", stop)
    assert not [each for each in processes.descendants(os.getpid()) if "policy" in processes.command(each)]


PARENT = """
import sys, time
from pathlib import Path
from test_policy import CONTEXT, Asked
here = Asked(sys.argv[1], Path(sys.argv[2]))
here.start()
here.policy.ask(CONTEXT, 0.0)
print(here.pid, flush=True)
time.sleep(600)
"""


def test_a_policy_ends_with_its_parent_while_it_spins(tmp_path: Path) -> None:
    """`test_killable_child.py` has the other cases."""
    note = tmp_path / "note"
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{Path.cwd()}", "POLICY_NOTE": str(note)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, "spins", str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        deadline = time.monotonic() + WAIT_S
        while not note.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        parent.send_signal(signal.SIGKILL)
        assert not processes.wait_gone([child], WAIT_S)
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()
