"""The parent's side of the process that speaks with Ray, over a child that does what the test says: no child is ever missed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.cluster import plan
from pdserve.cluster.driver import driver
from pdserve.cluster.driver.driver import RayDriver
from pdserve.cluster.errors import ClusterError, Interrupted
from pdserve.cluster.events import Event, RayBack, RayLost, WorkerChanged, WorkerPhase
from pdserve.cluster.member import MemberState
from pdserve.config import ClusterConfig

pytestmark = pytest.mark.slow
BOUND_S = 60.0
CHILD = """
import os, pickle, sys, time
from pathlib import Path
from pdserve.cluster.driver.driver import Begin, DriverAnswer, Joined
from pdserve.cluster.errors import ClusterError
from pdserve.cluster.events import WorkerChanged, WorkerPhase
from pdserve.cluster.member import Member, MemberState
from pdserve.killable_child import open_channel
folder = Path(sys.argv[1])
members, events = [], []
def answer(message):
    global members, events
    request = pickle.loads(message)
    if isinstance(request, Begin):
        refuses = (folder / "refuses").exists()
        return pickle.dumps(ClusterError("cannot start Ray: no room") if refuses else Joined("10.0.0.7", ()))
    count = [len(request.arguments[0])] if request.method == "launch" else []
    with (folder / "asked").open("a") as asked:
        print(os.getpid(), request.method, *count, file=asked)
    if request.method == "launch":
        members = [Member(each, state=MemberState.RUNNING, host="10.0.0.9") for each in request.arguments[0]]
        hosts = [each.host for each in request.arguments[0]]
        events = [WorkerChanged(hosts[0] or "nowhere", WorkerPhase.STARTING)]
    if (folder / "gone").exists():
        members[-1].state = MemberState.GONE
    while (folder / "hangs").exists():
        time.sleep(0.01)
    told, events = events, []
    return pickle.dumps(DriverAnswer(tuple(told), tuple(members)))
open_channel("driver of a test").serve(answer)
"""


class Driven:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self.ray = RayDriver(ClusterConfig(), folder, "mine", folder / "ray.log", self.events.append)
        blueprint = plan.Blueprint(ClusterConfig(), "127.0.0.1:1", "", folder, plan.WORKER_ENTRIES, "mine")
        self.plans = blueprint.plan_all()

    def check_until(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + BOUND_S
        while not what():
            assert time.monotonic() < deadline, self.events
            self.ray.check(0.01)

    def asked(self) -> list[str]:
        """The requests of all children, in order, with the pid of each."""
        file = self.folder / "asked"
        return file.read_text().splitlines() if file.exists() else []

    def child(self) -> int:
        return int(self.asked()[-1].split()[0])

    def saw(self, kind: type[Event]) -> bool:
        return any(isinstance(event, kind) for event in self.events)


@pytest.fixture
def driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:
    """Joined, with its workers launched. A lost child is replaced after no pause worth waiting for."""
    monkeypatch.setattr(driver, "COMMAND", (sys.executable, "-c", CHILD, str(tmp_path)))
    made = Driven(tmp_path)
    made.ray._backoff.first_s = made.ray._backoff.longest_s = 0.01
    made.ray.begin()
    made.ray.wait_joined(threading.Event())
    made.ray.launch(made.plans)
    made.check_until(lambda: made.ray.answers)
    yield made
    (tmp_path / "hangs").unlink(missing_ok=True)
    made.ray.close()


def test_the_next_child_gets_all_workers_with_the_nodes_on_which_they_run(driven: Driven) -> None:
    """(1) The child is killed: that is told, once. (2) Until the next has come, nothing is asked, and the workers stay known.
    (3) The next one launches all that are not gone, each with its node. (4) That is told as well."""
    (driven.folder / "gone").touch()
    driven.check_until(lambda: driven.ray.members[-1].state is MemberState.GONE)
    (driven.folder / "gone").unlink()
    first = driven.child()
    os.kill(first, 9)
    driven.check_until(lambda: driven.ray.lost)
    assert not driven.ray.answers
    driven.ray.cancel("decode-0")
    assert not driven.ray.stop(), "whoever closes the cluster must know that its workers were not reached"
    assert [member.worker_id for member in driven.ray.members] == [each.worker_id for each in driven.plans]
    driven.check_until(lambda: driven.ray.answers)
    assert driven.child() != first
    launched = [line.split(maxsplit=1)[1] for line in driven.asked() if "launch" in line]
    assert launched == [f"launch {len(driven.plans)}", f"launch {len(driven.plans) - 1}"]
    assert not any("cancel" in line for line in driven.asked())
    assert WorkerChanged("10.0.0.9", WorkerPhase.STARTING) in driven.events
    kinds = [type(event) for event in driven.events if isinstance(event, RayLost | RayBack)]
    assert kinds == [RayLost, RayBack]
    assert not driven.ray.lost


def test_a_child_that_hangs_is_replaced(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for meanwhile: a look returns after `PROMPT_S`, here at once."""
    monkeypatch.setattr(driver, "PROMPT_S", 0.0)
    monkeypatch.setattr(driver, "ANSWER_TIMEOUT_S", 0.2)
    first = driven.child()
    (driven.folder / "hangs").touch()
    driven.check_until(lambda: driven.ray.lost)
    (driven.folder / "hangs").unlink()
    monkeypatch.setattr(driver, "ANSWER_TIMEOUT_S", BOUND_S)
    driven.check_until(lambda: driven.ray.answers)
    assert driven.child() != first
    assert any(isinstance(event, RayLost) and "no answer for" in event.detail for event in driven.events)


def test_a_child_that_cannot_join_is_tried_again(driven: Driven) -> None:
    """(1) Ray is gone, and the next children cannot join it. (2) Then one can. Lost and back are told once each."""
    (driven.folder / "refuses").touch()
    os.kill(driven.child(), 9)
    driven.check_until(lambda: driven.ray.lost)
    driven.check_until(lambda: driven.ray._backoff.used > 2)
    (driven.folder / "refuses").unlink()
    driven.check_until(lambda: driven.ray.answers)
    assert [type(event) for event in driven.events if isinstance(event, RayLost | RayBack)] == [RayLost, RayBack]


def test_a_first_child_that_cannot_join_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "COMMAND", (sys.executable, "-c", CHILD, str(tmp_path)))
    (tmp_path / "refuses").touch()
    made = Driven(tmp_path)
    made.ray.begin()
    with pytest.raises(ClusterError, match="cannot start Ray: no room"):
        made.ray.wait_joined(threading.Event())
    made.ray.close()
    made.ray.close()


class Ended(subprocess.Popen[bytes]):
    """A child that has ended before its parent goes on."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.wait(BOUND_S)


@pytest.mark.parametrize(("stopped", "error"), [(False, ClusterError), (True, Interrupted)])
def test_a_first_child_that_a_signal_ends_at_once_ends_the_start_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool, error: type[Exception]
) -> None:
    """Writing to it fails with EPIPE, which the command line takes for a closed output, and ends without a word."""
    monkeypatch.setattr(driver, "COMMAND", (sys.executable, "-c", "pass"))
    monkeypatch.setattr(subprocess, "Popen", Ended)
    made = Driven(tmp_path)
    made.ray.begin()
    stop = threading.Event()
    if stopped:
        stop.set()
    with pytest.raises(error):
        made.ray.wait_joined(stop)
    made.ray.close()


def test_a_child_that_ends_before_it_has_the_pool_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "COMMAND", (sys.executable, "-c", CHILD, str(tmp_path)))
    made = Driven(tmp_path)
    made.ray._backoff.first_s = made.ray._backoff.longest_s = 0.01
    made.ray.begin()
    made.ray.wait_joined(threading.Event())
    child = made.ray._child
    assert child is not None
    os.kill(child.pid, 9)
    made.ray.launch(made.plans)
    made.check_until(lambda: made.ray.answers)
    assert made.saw(RayBack)
    made.ray.close()
