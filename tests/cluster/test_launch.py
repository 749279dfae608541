"""One real Ray cluster over stand-in workers: it comes up, heals, and is healed."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from pdserve.client import AdminClient
from pdserve.cluster import plan, processes
from pdserve.cluster.events import (
    Event,
    EventPart,
    PartReady,
    PoolsResized,
    RouterBack,
    RouterLost,
    WorkerChanged,
    WorkerLoads,
    WorkerPhase,
)
from pdserve.cluster.launch import Cluster
from pdserve.cluster.scaling import port
from pdserve.config import ClusterConfig, PoolConfig, RouterConfig
from pdserve.rpc.v1 import inference_pb2, scaling_pb2

pytestmark = pytest.mark.ray
HERE = Path(__file__).resolve().parent
WAIT_S = 90.0
DEAD = "decode-1 is dead"


@dataclass
class Running:
    cluster: Cluster
    events: list[Event] = field(default_factory=list)

    def wait_event(self, wanted: Callable[[Event], bool]) -> Event:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for event in self.events:
                if wanted(event):
                    return event
            time.sleep(0.05)
        raise AssertionError(f"it did not come; seen: {self.events}")

    def wait_worker(self, worker_id: str, phase: WorkerPhase) -> None:
        self.wait_event(lambda e: isinstance(e, WorkerChanged) and (e.worker_id, e.phase) == (worker_id, phase))

    def pid(self, worker_id: str) -> int:
        return next(report.pid for report in self.cluster.reports if report.worker_id == worker_id)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, no worker can start."""
    return tmp_path_factory.mktemp("launch") / "broken"


@pytest.fixture(scope="module")
def running(broken: Path) -> Iterator[Running]:
    """A supervised cluster of one prefill worker, which may restart twice an hour, and one decode worker."""
    router = RouterConfig(http_port=0, grpc_port=0)
    twice, never = PoolConfig(max_restarts_per_hour=2, min_replicas=0), PoolConfig(max_restarts_per_hour=0)
    config = ClusterConfig(router=router, prefill=twice, decode=never)
    stop = threading.Event()
    started = threading.Event()
    holder: list[Running] = []
    outcome: list[BaseException] = []

    def hear(event: Event) -> None:
        holder[0].events.append(event)
        if isinstance(event, WorkerLoads):
            broken.with_name("followed").touch()  # workers load until one of them was followed

    def serve() -> None:
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", str(HERE))
                patch.setenv("STANDIN_BROKEN", str(broken))
                patch.setenv("STANDIN_LOADS_UNTIL", str(broken.with_name("followed")))
                patch.setattr(port, "CALL_TIMEOUT_S", WAIT_S)  # a lost answer is tried again, and told by other events
                patch.setenv("RAY_ADDRESS", "192.0.2.1:1")  # address: local must not look at it
                cluster = Cluster(
                    config,
                    stop=stop,
                    listener=hear,
                    router_command=(sys.executable, str(HERE / "standin_router.py")),
                    entries={plan.PREFILL: "standin_worker:start_prefill", plan.DECODE: "standin_worker:start_decode"},
                )
                holder.append(Running(cluster))
                with cluster:
                    cluster.start()
                    started.set()
                    cluster.supervise()
        except BaseException as exc:  # noqa: BLE001  re-raised in the fixture
            outcome.append(exc)
        finally:
            started.set()

    thread = threading.Thread(target=serve)
    thread.start()
    assert started.wait(2 * WAIT_S)
    if outcome:
        raise outcome[0]
    yield holder[0]
    stop.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert not holder[0].cluster.folders.private.exists()
    assert outcome == []


def test_every_part_and_worker_reports(running: Running) -> None:
    ready = [event.part for event in running.events if isinstance(event, PartReady)]
    assert sorted(part.value for part in ready) == sorted(part.value for part in EventPart)
    assert [report.worker_id for report in running.cluster.reports] == ["prefill-0", "decode-0"]
    assert all(report.memory.kv_bytes for report in running.cluster.reports)
    assert {path.name for path in running.cluster.folders.logs.iterdir()} >= {"prefill-0.log", "decode-0.log", "router.log"}


def test_a_worker_that_loads_tells_how_far_it_is(running: Running) -> None:
    told = [event for event in running.events if isinstance(event, WorkerLoads)]
    assert {event.worker_id for event in told} <= {"prefill-0", "decode-0"}
    assert {(event.state.what, event.state.done, event.state.total) for event in told} == {("loading weights", 30, 100)}


def test_workers_inherit_what_a_private_ray_was_given(running: Running) -> None:
    for worker_id in ("prefill-0", "decode-0"):
        environment = psutil.Process(running.pid(worker_id)).environ()
        assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
        assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(HERE.parents[1])


def test_workers_ran_behind_every_ordinary_process(running: Running) -> None:
    """Ray's nodes start workers at niceness 15 unless told otherwise."""
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, report.pid) for report in running.cluster.reports} == {ours}
    assert {report.niceness for report in running.cluster.reports} == {ours}


def test_a_worker_that_dies_again_and_again_is_started_later_each_time_and_given_up(running: Running, broken: Path) -> None:
    """(1) Kill the prefill worker: it is started anew. (2) It dies, and cannot start any more: the next start waits longer.
    (3) That fails as well: its restarts of the hour are used up, which is said once, with the setting and the log."""
    first = running.pid("prefill-0")
    os.kill(first, signal.SIGKILL)
    running.wait_worker("prefill-0", WorkerPhase.RESTARTING)
    running.wait_event(lambda _: any(report.worker_id == "prefill-0" for report in running.cluster.reports))
    second = running.pid("prefill-0")
    assert second != first
    told = [e.phase for e in running.events if isinstance(e, WorkerChanged) and e.worker_id == "prefill-0"]
    assert told.count(WorkerPhase.RESTARTING) == 1  # however long it took
    broken.touch()
    os.kill(second, signal.SIGKILL)
    running.wait_worker("prefill-0", WorkerPhase.DEAD)
    broken.unlink()
    told = [e for e in running.events if isinstance(e, WorkerChanged) and e.worker_id == "prefill-0"]
    waits = [event.detail.partition(",")[0] for event in told if event.phase is WorkerPhase.RESTARTING]
    assert waits == ["in 1 s", "in 2 s"]
    assert "2 of 2 restarts within the hour (prefill.max_restarts_per_hour)" in told[-1].detail
    assert "prefill-0.log" in told[-1].detail
    running.wait_event(lambda _: len(workers()) == 1)  # the decode worker's
    assert running.cluster.endpoints is not None
    with AdminClient(running.cluster.endpoints.admin) as client:
        scaled(client, running, prefill=0)  # else it is started again after a minute


WORKER = re.compile(r"pdserve: (prefill|decode)-\d+")


def workers() -> list[psutil.Process]:
    return [each for each in processes.descendants(os.getpid()) if WORKER.fullmatch(processes.command(each).strip())]


def test_dead_router_comes_back_at_the_same_addresses(running: Running) -> None:
    """(1) Kill it. (2) It comes back. (3) The worker dials it again, and clients find it where it was."""
    endpoints = running.cluster.endpoints
    assert endpoints is not None
    os.kill(endpoints.pid, signal.SIGKILL)
    running.wait_event(lambda event: isinstance(event, RouterLost))
    running.wait_event(lambda event: isinstance(event, RouterBack))
    back = running.cluster.endpoints
    assert back is not None
    assert dataclasses.replace(back, pid=0) == dataclasses.replace(endpoints, pid=0)
    with AdminClient(endpoints.admin) as client:
        deadline = time.monotonic() + WAIT_S
        while not client.cluster_state().workers and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [worker.hello.worker_id for worker in client.cluster_state().workers] == ["decode-0"]


def scaled(client: AdminClient, running: Running, **sizes: int) -> inference_pb2.GetClusterStateResponse:
    """Order sizes, and wait until the router knows just the workers that they stand for."""
    deadline = time.monotonic() + WAIT_S
    while not client.cluster_state().scaling.term:  # the actuator polls a new router within a second
        assert time.monotonic() < deadline
        time.sleep(0.05)
    number = client.scale(scaling_pb2.ScaleRequest(**sizes))
    while time.monotonic() < deadline:
        state = client.cluster_state()
        roles = [worker.hello.role for worker in state.workers if not worker.draining]
        report = state.scaling.report
        if (
            report.order == number  # which may be that of an order to the router before
            and all(getattr(report, name) == size for name, size in sizes.items())
            and not report.members
            and (roles.count(1), roles.count(2)) == (report.prefill, report.decode)
        ):
            return state
        time.sleep(0.05)
    raise AssertionError(f"not reached: {state}; {running.events[-5:]}")


def test_orders_change_the_pools_of_a_running_cluster(running: Running, broken: Path) -> None:
    """(1) A second decode worker comes. (2) It becomes a prefill worker, in the same process. (3) It leaves, and its process
    ends. (4) A worker that cannot start is said to be one, and the cluster goes on."""
    assert running.cluster.endpoints is not None
    with AdminClient(running.cluster.endpoints.admin) as client:
        state = scaled(client, running, decode=2)
        pids = {worker.hello.worker_id: worker.hello.pid for worker in state.workers}
        assert list(pids) == ["decode-0", "decode-1"]
        state = scaled(client, running, prefill=1, decode=1)
        moved = next(worker.hello for worker in state.workers if worker.hello.role == 1)
        assert moved.pid == pids[moved.worker_id]
        running.wait_worker(moved.worker_id, WorkerPhase.FLIPPING)
        left = [process for process in workers() if process.pid == moved.pid]
        scaled(client, running, prefill=0)
        assert not processes.wait_gone(left, WAIT_S)
        broken.touch()
        number = client.scale(scaling_pb2.ScaleRequest(decode=2))
        running.wait_event(lambda event: isinstance(event, PoolsResized) and event.text.startswith(DEAD))
        broken.unlink()
        assert client.cluster_state().scaling.report.order == number
        assert [worker.hello.worker_id for worker in client.cluster_state().workers] == list({*pids} - {moved.worker_id})
