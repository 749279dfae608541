"""The faults of a soak. A seed decides their kinds, targets and times; the cluster's own speed decides what they hit."""

from __future__ import annotations

import heapq
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Final

import grpc

from pdserve.rpc.v1 import admin_pb2_grpc, inference_pb2
from testkit.processes import ProcessCluster

MEAN_PAUSE_S: Final = 3.0  # between faults: a worker takes about 5 s to start again, so faults overlap
MIN_PAUSE_S: Final = 0.5
LONG_STOP_S: Final = (6.0, 12.0)  # longer than the 5 s after which a silent worker is lost
SHORT_STOP_S: Final = (0.1, 2.0)
LOOK_S: Final = 0.1
ROUTER: Final = "router"


class Kind(Enum):
    """One kind of fault of a worker or of the router."""

    WORKER_KILL = "worker killed"
    WORKER_LONG_STOP = "worker stopped until it is lost"
    WORKER_SHORT_STOP = "worker stopped for a moment"
    WORKER_DRAIN = "worker drained by an operator"
    WORKER_SIGTERM = "worker drained by SIGTERM"
    WORKER_SIGTERM_TWICE = "worker ended by a second SIGTERM"
    ROUTER_KILL = "router killed"
    ROUTER_SIGTERM = "router ended by SIGTERM"
    ROUTER_LONG_STOP = "router stopped until it is lost"
    ROUTER_SHORT_STOP = "router stopped for a moment"


WEIGHTS: Final = {
    Kind.WORKER_KILL: 24,
    Kind.WORKER_LONG_STOP: 14,
    Kind.WORKER_SHORT_STOP: 14,
    Kind.WORKER_DRAIN: 12,
    Kind.WORKER_SIGTERM: 8,
    Kind.WORKER_SIGTERM_TWICE: 8,
    Kind.ROUTER_KILL: 6,
    Kind.ROUTER_SIGTERM: 4,
    Kind.ROUTER_LONG_STOP: 4,
    Kind.ROUTER_SHORT_STOP: 6,
}


@dataclass(order=True, slots=True)
class _Due:
    """One action, and the time at which it is due."""

    at_s: float
    number: int
    action: Callable[[], None] = field(compare=False)


class Injector:
    """Injects faults on a separate thread, from entering until `stop`. Every member that it paused runs again when `stop`
    returns.
    """

    def __init__(self, cluster: ProcessCluster, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.times_s: list[tuple[float, str]] = []
        self.error: BaseException | None = None
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._paused: dict[str, object] = {}
        self._due: list[_Due] = []
        self._number = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)

    def __enter__(self) -> Injector:
        self._began_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Inject no more faults, and perform at once all actions that are still due, such as resuming a paused member."""
        self._stop.set()
        self._thread.join()
        for due in self._due:
            due.action()
        self._due.clear()

    def _run(self) -> None:
        try:
            next_s = time.monotonic() + self._pause_s()
            while not self._stop.wait(LOOK_S):
                now_s = time.monotonic()
                while self._due and self._due[0].at_s <= now_s:
                    heapq.heappop(self._due).action()
                if now_s >= next_s:
                    self._strike()
                    next_s = now_s + self._pause_s()
        except BaseException as exc:  # noqa: BLE001 - the report shows it
            self.error = exc

    def _pause_s(self) -> float:
        return MIN_PAUSE_S + self._rng.expovariate(1 / (MEAN_PAUSE_S - MIN_PAUSE_S))

    def _strike(self) -> None:
        (kind,) = self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        name = ROUTER if kind.name.startswith("ROUTER") else self._rng.choice(self._cluster.worker_names)
        if not self._may(name):
            return
        self.counts[kind.value] += 1
        self.times_s.append((time.monotonic() - self._began_s, f"{kind.value}: {name}"))
        self._perform(kind, name)

    def _may(self, name: str) -> bool:
        """Tell whether the member may be struck: it runs, and so does another member of its pool. A soak without a whole pool
        would test only waiting.
        """
        pool = [n for n in self._cluster.worker_names if n.split("-")[0] == name.split("-")[0]]
        others = [n for n in pool if n != name] or [name]
        return self._runs(name) and any(self._runs(n) for n in others)

    def _runs(self, name: str) -> bool:
        return self._cluster.processes[name].alive and name not in self._paused

    def _perform(self, kind: Kind, name: str) -> None:
        process = self._cluster.processes[name]
        if kind in (Kind.WORKER_KILL, Kind.ROUTER_KILL):
            process.kill()
        elif kind in (Kind.WORKER_LONG_STOP, Kind.ROUTER_LONG_STOP):
            self._pause(name, self._rng.uniform(*LONG_STOP_S))
        elif kind in (Kind.WORKER_SHORT_STOP, Kind.ROUTER_SHORT_STOP):
            self._pause(name, self._rng.uniform(*SHORT_STOP_S))
        elif kind is Kind.WORKER_DRAIN:
            threading.Thread(target=_drain, args=(self._cluster.admin, name), daemon=True).start()
        else:
            process.send(signal.SIGTERM)
            if kind is Kind.WORKER_SIGTERM_TWICE:
                self._later(self._rng.uniform(0.0, 1.0), lambda: process.send(signal.SIGTERM))

    def _pause(self, name: str, length_s: float) -> None:
        process = self._cluster.processes[name]
        self._paused[name] = process
        process.pause()

        def go_on() -> None:
            process.resume()
            self._paused.pop(name, None)

        self._later(length_s, go_on)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._due, _Due(time.monotonic() + delay_s, self._number, action))


def _drain(address: str, name: str) -> None:
    """Drain a worker as an operator does. The call may fail, because the router may fail during it."""
    with grpc.insecure_channel(address) as channel:
        try:
            ask = inference_pb2.DrainRequest(worker_id=name, force=True)  # the other members may be away at the moment
            for _ in admin_pb2_grpc.AdminStub(channel).Drain(ask, timeout=60):
                pass
        except grpc.RpcError:
            pass
