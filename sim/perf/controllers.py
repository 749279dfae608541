"""Controllers of elastic clusters: the production planner, and a schedule that knows the load in advance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.planner.limits import Limits, PoolSizes, Targets
from pdserve.planner.observations import Observations
from pdserve.planner.planner import Plan, PlannerState, plan
from pdserve.planner.settings import PlannerSettings


@dataclass(slots=True)
class PlannerController:
    """Asks the planner at each look, as the actuator does. `plans` has each plan whose sizes are new."""

    targets: Targets
    limits: Limits
    settings: PlannerSettings = field(default_factory=PlannerSettings)
    state: PlannerState = field(default_factory=PlannerState)
    plans: list[tuple[float, Plan]] = field(default_factory=list)

    def sizes(self, observed: Observations) -> PoolSizes:
        """Return the sizes of the planner's next plan."""
        planned = plan(observed, self.targets, self.limits, self.state, self.settings)
        self.state = planned.state
        last = self.plans[-1][1] if self.plans else None
        if last is None or (last.prefill, last.decode) != (planned.prefill, planned.decode):
            self.plans.append((observed.now_s, planned))
        return PoolSizes(planned.prefill, planned.decode)


@dataclass(frozen=True, slots=True)
class ScheduleController:
    """Asks for the sizes of each interval so early that the workers serve when it begins. The last sizes stay."""

    schedule: Sequence[PoolSizes]
    interval_s: float
    start_s: float

    def sizes(self, observed: Observations) -> PoolSizes:
        """Return the sizes to ask for at the time of a look."""
        return self.at(observed.now_s)

    def at(self, now_s: float) -> PoolSizes:
        """Return the largest sizes from a time on until a worker that is ordered then would serve."""
        last = len(self.schedule) - 1
        first = min(last, int(now_s / self.interval_s))
        ahead = self.schedule[first : 1 + min(last, int((now_s + self.start_s) / self.interval_s))]
        return PoolSizes(max(one.prefill for one in ahead), max(one.decode for one in ahead))
