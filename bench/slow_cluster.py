"""A real cluster of slow workers that sizes its own pools, the load of a day on it, and what was seen of both."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from bench.deaths.cluster import DyingCluster
from bench.slow_worker import SLOW, Step, read_steps
from pdserve.client import AdminClient, CallFailed
from pdserve.cluster.events import WorkerPhase
from pdserve.cluster.scaling.actuator import POLL_S
from pdserve.cluster.scaling.report import reading_of
from pdserve.planner.observations import Observations
from pdserve.planner.observe import ClusterReading, observe
from pdserve.rpc.v1 import inference_pb2
from pdserve_bench.load.generator import run_load
from pdserve_bench.load.grpc_target import GrpcTarget
from pdserve_bench.load.schedule import RunLimits
from pdserve_bench.load.target import RequestOptions
from pdserve_bench.row import BenchRow
from pdserve_bench.workload.request import BenchRequest

LOOK_S: Final = 1.0
"""The time between two looks at the cluster. The actuator reports as often."""
REQUEST_TIMEOUT_S: Final = 120.0
COMING: Final = {one.value for one in (WorkerPhase.STARTING, WorkerPhase.WAITING, WorkerPhase.LOADING, WorkerPhase.LOADED)}
"""The phases of a worker that was ordered and serves nobody yet."""


@dataclass(frozen=True, slots=True)
class Look:
    """The cluster at one moment of the day, as the planner observes it, and the number of processes that are paid for."""

    observed: Observations
    members: int

    @property
    def at_s(self) -> float:
        """The time of the day."""
        return self.observed.now_s

    @property
    def prefill(self) -> int:
        """The ready prefill workers."""
        return self.observed.prefill.ready

    @property
    def decode(self) -> int:
        """The ready decode workers."""
        return self.observed.decode.ready


@dataclass(slots=True)
class Watched:
    """The sizes of a cluster, by the states that its router tells."""

    looks: list[Look] = field(default_factory=list)
    last: inference_pb2.GetClusterStateResponse = field(default_factory=inference_pb2.GetClusterStateResponse)
    starts_s: list[float] = field(default_factory=list)
    """The time of each start, from the order until the worker was ready."""
    flips: int = 0
    """The changes of roles."""
    _reading: ClusterReading | None = None
    _ordered_s: dict[str, float] = field(default_factory=dict)
    _flips: dict[str, int] = field(default_factory=dict)

    def note(self, state: inference_pb2.GetClusterStateResponse, at_s: float) -> None:
        """Take the state of a moment of the day."""
        self.last = state
        linked = {one.hello.worker_id: one for one in state.workers}
        others = {one.worker_id: one.phase for one in state.scaling.report.members if one.worker_id not in linked}
        for name, phase in others.items():
            if phase in COMING:  # it was ordered at the poll before the one that reports it
                self._ordered_s.setdefault(name, at_s - POLL_S)
        for name, one in linked.items():
            if one.ready and name in self._ordered_s:
                self.starts_s.append(at_s - self._ordered_s.pop(name))
            self.flips += max(0, one.hello.flips - self._flips.get(name, 0))
            self._flips[name] = one.hello.flips
        before, self._reading = self._reading, reading_of(state, at_s=at_s)
        self.looks.append(Look(observe(before, self._reading), len(linked) + len(others)))

    @property
    def worker_s(self) -> float:
        """The time of all processes until the last look."""
        return sum((late.at_s - early.at_s) * early.members for early, late in pairwise(self.looks))


@dataclass(frozen=True, slots=True)
class RealDay:
    """A day as real workers have served it."""

    rows: Sequence[BenchRow]
    watched: Watched
    steps: Sequence[Step]


async def run_day(folder: Path, requests: Sequence[BenchRequest]) -> RealDay:
    """Start the cluster of `cluster.yaml` in a folder that has the costs of its workers, send the requests, and stop it.

    Nothing of the cluster is left, however this ends. Raises `RuntimeError` if it does not start.
    """
    flags = ("--config", str(folder / "cluster.yaml"), "--autoscaling")
    cluster = DyingCluster(1, 1, module="bench.slow_worker", settings=flags, env={SLOW: str(folder)})
    try:
        cluster.start()
        if not await cluster.ready():
            raise RuntimeError(f"the cluster did not start: {cluster.said()}")
        target = GrpcTarget(f"127.0.0.1:{cluster.grpc}", RequestOptions(), channels=1)
        try:
            with watching(f"127.0.0.1:{cluster.admin}") as watched:
                rows = await run_load(iter(requests), target, RunLimits(request_timeout_s=REQUEST_TIMEOUT_S))
        finally:
            await target.close()
        return RealDay(rows, watched, read_steps(folder))
    finally:
        await cluster.close()


@contextlib.contextmanager
def watching(admin: str) -> Iterator[Watched]:
    """Look at a cluster every `LOOK_S` in a thread, until the block ends. The day begins with the block."""
    watched, over, origin_s = Watched(), threading.Event(), time.monotonic()

    def watch() -> None:
        with AdminClient(admin) as client:
            while not over.is_set():
                with contextlib.suppress(CallFailed):  # this look is missing
                    watched.note(client.cluster_state(LOOK_S), time.monotonic() - origin_s)
                over.wait(LOOK_S)

    thread = threading.Thread(target=watch, name="watch")
    thread.start()
    try:
        yield watched
    finally:
        over.set()
        thread.join()
