"""Readings of a simulated cluster: the report of a router to the actuator, from heartbeats, counts of the demand and the
queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.planner.observations import Observations
from pdserve.planner.observe import ClusterReading, WorkerReading, observe
from router.core.router_core import RouterCore
from sim.perf.members import MemberPhase, PerfMember


@dataclass(slots=True)
class PerfWatch:
    """Keeps the last reading, and gives what has happened since."""

    core: RouterCore
    slo_class: str | None = None
    last: ClusterReading | None = None

    def look(self, now_s: float, members: Sequence[PerfMember]) -> Observations:
        """Return the observations since the last look."""
        workers = [WorkerReading(one.hello, one.load, one.readiness.ready, one.draining) for one in self.core.registry]
        demand = self.core.demand(now_s=now_s, uptime_s=now_s)
        before, self.last = self.last, ClusterReading(now_s, 1, len(self.core.waiting), demand, tuple(workers))
        kept = {one.worker_id: one.role for one in members if one.phase is not MemberPhase.DRAINING}
        return observe(before, self.last, kept, slo_class=self.slo_class)
