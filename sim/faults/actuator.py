"""An actuator in the simulation: a rolling upgrade by the router's Admin service, planned by a view of the cluster that is some
time old.

It restarts each worker of the first membership once, one after the other. Two actuators may run, as when an actuator is started
while another actuator still works: the newer actuator ends the term of the older one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Final

import grpc

from pdserve.rpc.v1 import inference_pb2, scaling_pb2
from router.grpc.admin import AdminService
from sim.faults.worker import SimWorker
from sim.world.stream import Aborted

POLL_S: Final = 0.2


class RollingUpgrade:
    """One actuator. `old` has the incarnation of each worker that shall restart, in the order of the restarts. `lag_s` is the
    time from a look at the cluster to the order that follows from it."""

    def __init__(self, admin: AdminService, name: str, old: Mapping[str, int], lag_s: float) -> None:
        self._admin = admin
        self._name = name
        self._old = old
        self._lag_s = lag_s
        self._term = 0
        self.refused = 0
        """The orders that the router has refused."""

    async def run(self) -> None:
        """Restart the workers, until none is left or another actuator has begun a term."""
        try:
            while await self._step():  # noqa: ASYNC110 - it polls, as a real one does
                await asyncio.sleep(POLL_S)
        except Aborted:
            self.refused += 1

    async def _step(self) -> bool:
        """Look at the cluster, wait, and drain one worker. Return False when all workers have restarted."""
        report = scaling_pb2.ScalingReport(mode="fixed")
        poll = scaling_pb2.ActuateRequest(actuator=self._name, term=self._term, report=report)
        self._term = (await self._admin.Actuate(poll, Context())).term
        state = await self._admin.GetClusterState(inference_pb2.GetClusterStateRequest(), Context())
        workers = {worker.hello.worker_id: worker for worker in state.workers}
        if set(workers) != set(self._old) or not all(w.ready and not w.draining for w in workers.values()):
            return True  # a worker restarts: one after the other
        left = [name for name, incarnation in self._old.items() if workers[name].hello.incarnation == incarnation]
        if not left:
            return False
        await asyncio.sleep(self._lag_s)
        order = inference_pb2.DrainRequest(worker_id=left[0], incarnation=self._old[left[0]], term=self._term)
        try:
            await self._admin.Drain(order, Context())
        except Aborted:
            self.refused += 1
        return True


class UpgradeWatch:
    """The promises of rolling upgrades, whatever the source of the orders: a worker drains only when all earlier drained
    workers serve again, and no worker drains twice. `old` has the incarnations that may drain."""

    def __init__(self, old: Mapping[str, int]) -> None:
        self.old = dict(old)
        self.drained: set[str] = set()
        """The workers that were seen to drain."""
        self._away: set[str] = set()

    def look(self, workers: Iterable[SimWorker], serving: Mapping[str, int]) -> list[str]:
        """Return what is wrong now, one sentence for each problem. `serving` has the incarnations of the workers that serve."""
        self._away = {name for name in self._away if serving.get(name) in (None, self.old[name])}
        found = []
        for worker in workers:
            name = worker.worker_id
            if not worker.process.alive or not worker.member._drain_asked.is_set() or name in self._away:
                continue
            if worker.incarnation != self.old[name]:
                found.append(f"{name} drains, but has restarted already")
            elif self._away:
                found.append(f"{name} drains before {' and '.join(sorted(self._away))} serves again")
            self._away.add(name)
            self.drained.add(name)
        return found


class Context:
    """The server's end of a call of the Admin service, for a caller in the same process."""

    def invocation_metadata(self) -> tuple[()]:
        """Return no metadata: no server asks for a token."""
        return ()

    def peer(self) -> str:
        """Return a name for the caller; all have the same."""
        return "simulated"

    async def write(self, message: Any) -> None:
        """Drop the progress of a drain."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """Raise the error with which the call ends."""
        raise Aborted(code, details, tuple(trailing_metadata))
