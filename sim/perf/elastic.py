"""A cluster whose pools grow, shrink and exchange workers while it serves, by a controller on the virtual clock.

A process takes `start_s` from the order until its worker joins. A worker that leaves or flips drains first, by the production
events: the router places no more work on it, and it goes once it is empty. A flip is a new life: a new link, a new incarnation,
and the KV cache of the old life or an empty cache. Processes cost from the order on until they have gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pdserve.core.errors import PdserveError
from pdserve.core.ids import RequestId, WorkerId
from pdserve.core.report import Report
from pdserve.core.worker import Role
from pdserve.planner.limits import Limits, PoolSizes
from pdserve.planner.observations import Observations
from pdserve.planner.resizing import Cancel, Flip, Start, Step, steps_of
from router.core import events as ev
from sim.perf.cluster import ClusterSpec, PerfCluster
from sim.perf.members import Happening, MemberPhase, PerfMember, for_steps
from sim.perf.report import ElasticReport, PoolsAt
from sim.perf.traces import TraceRequest
from sim.perf.watch import PerfWatch

DRAIN_LOOK_S: Final = 0.1
"""A worker that drains looks so often whether it is empty, as in production."""


class Controller(Protocol):
    """Decides how many workers each pool should have."""

    def sizes(self, observed: Observations) -> PoolSizes | None:
        """Return the wanted sizes. None: the last sizes stay."""


@dataclass(frozen=True, slots=True)
class Elasticity:
    """The times and rules of changes."""

    limits: Limits
    interval_s: float = 1.0
    """The time between two looks of the controller."""
    start_s: float = 60.0
    """The time from the order of a process until its worker joins."""
    flip_s: float = 5.0
    """The time from the end of one life until the next life joins."""
    slo_class: str | None = None
    """The class whose requests tell the controller whether targets are met. None: all classes."""


class ElasticCluster(PerfCluster):
    """One run of an elastic cluster. Its first workers are those of the `ClusterSpec`, and serve from the start."""

    def __init__(
        self,
        spec: ClusterSpec,
        requests: Sequence[TraceRequest],
        controller: Controller,
        elasticity: Elasticity,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(spec, requests, on_end)
        self.elasticity = elasticity
        self.controller = controller
        self.pools = ElasticReport()
        self._shapes = {Role.PREFILL: spec.prefill[0], Role.DECODE: spec.decode[0]}
        self.members = [PerfMember(w.worker_id, w.role, w.shape, 0.0, MemberPhase.SERVING, w) for w in self.workers.values()]
        """The processes that have not gone, in the order of their starts."""
        self._watch = PerfWatch(self.core, elasticity.slo_class)
        self._numbers = len(self.members)
        self.clock.after(elasticity.interval_s, self._control)

    # The controller ------------------------------------------------------------------------------------------------

    def _control(self) -> None:
        if self._over:
            return
        observed = self._watch.look(self.clock.now_s, self.members)
        wanted = self.controller.sizes(observed)
        if wanted is not None:
            for step in steps_of(for_steps(self.members), wanted, self.elasticity.limits):
                self._take(step)
        self.pools.history.append(PoolsAt(observed, wanted, len(self.members)))
        self.clock.after(self.elasticity.interval_s, self._control)

    def _take(self, step: Step) -> None:
        if isinstance(step, Start):
            self.start(step.role)
            return
        member = next(one for one in self.members if one.worker_id == step.worker_id)
        if isinstance(step, Cancel):
            member.move(Happening.CANCELLED)
            self._gone(member)
        else:
            self._leave(member, Happening.FLIP if isinstance(step, Flip) else Happening.DRAIN)

    def start(self, role: Role) -> PerfMember:
        """Order a process, whose worker joins after `start_s`."""
        member = PerfMember(WorkerId(f"{role.value}-{self._numbers}"), role, self._shapes[role], self.clock.now_s)
        self._numbers += 1
        self.members.append(member)
        self.clock.after(self.elasticity.start_s, self._started, member)
        return member

    # The lives of a process ----------------------------------------------------------------------------------------

    def _started(self, member: PerfMember) -> None:
        if member.phase is MemberPhase.STARTING:
            member.move(Happening.LOADED)
            member.worker = self._make(member.role, member.worker_id, member.shape)
            self._join(member.worker)

    def _leave(self, member: PerfMember, happening: Happening) -> None:
        """Drain a member's worker, for good or for its other role."""
        assert member.worker is not None
        member.move(happening)
        if happening is Happening.FLIP:
            member.role = Role.DECODE if member.role is Role.PREFILL else Role.PREFILL
        self._handle(ev.DrainAsked(member.worker.worker_id))
        self.clock.after(DRAIN_LOOK_S, self._look, member, False)

    def _look(self, member: PerfMember, was_empty: bool) -> None:
        """End the life of a worker that is empty at two looks in a row: its last messages have then arrived."""
        worker = member.worker
        assert worker is not None
        empty = worker.draining and worker.idle
        if not (empty and was_empty):
            self.clock.after(DRAIN_LOOK_S, self._look, member, empty)
            return
        member.move(Happening.EMPTY)
        del self.workers[worker.link]
        self._tell(ev.WorkerLeft(worker.link))
        if member.phase is MemberPhase.GONE:
            self._note(worker)
            self._gone(member)
        else:
            self.clock.after(self._spec.hop_s + self.elasticity.flip_s, self._flipped, member)

    def _flipped(self, member: PerfMember) -> None:
        earlier = member.worker
        assert earlier is not None
        member.move(Happening.LOADED)
        member.worker = self._make(member.role, member.worker_id, member.shape, earlier)
        self.pools.flips += 1
        self._join(member.worker)

    def _gone(self, member: PerfMember) -> None:
        self.members.remove(member)
        if not self._over:
            self.pools.worker_s += self.clock.now_s - member.began_s

    def assert_empty(self) -> None:
        """Assert that no work is left, and that each linked worker is a member."""
        super().assert_empty()
        assert list(self.workers.values()) == sorted(
            [one.worker for one in self.members if one.worker is not None and one.worker.link in self.workers],
            key=lambda worker: worker.link,
        )

    # The router's shell --------------------------------------------------------------------------------------------

    def _end(self, request_id: RequestId, error: PdserveError | None, report: Report) -> None:
        super()._end(request_id, error, report)
        if self._over:
            self.pools.worker_s += sum(self.clock.now_s - member.began_s for member in self.members)
