"""The planner's turn: once an interval it looks at what happened and says which sizes the pools should have.

It plans in both modes. In the mode FIXED nobody follows, but operators see what it would do, and it has learned the load when
they let it decide. A pool may follow a policy of the operator's own instead, which is asked in the mode AUTOMATIC alone: the
plan then waits for its answer, while the caller goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from pdserve.cluster.scaling.limits import planner_settings, targets_of
from pdserve.cluster.scaling.policy import ScalingPolicy, Told
from pdserve.cluster.scaling.report import plan_to_wire
from pdserve.cluster.scaling.wanted import Mode, WantedSizes
from pdserve.config import PLANNER, ClusterConfig
from pdserve.core.ids import WorkerId
from pdserve.core.worker import Role
from pdserve.observe.log_files import log_file
from pdserve.planner.limits import Limits, PoolSizes
from pdserve.planner.observations import Observations
from pdserve.planner.observe import ClusterReading, observe
from pdserve.planner.planner import NO_POLICIES, Plan, PlannerState, plan
from pdserve.planner.policy import ScalingContext
from pdserve.planner.resizing import Phase, PoolMember
from pdserve.rpc.v1 import scaling_pb2

POLICY_TIMEOUT_S: Final = 1.0
"""A policy that does not answer within this time is ended and started again. It computes one number from a page of others."""


class Planning:
    """The planner with what it remembers. All times are seconds of one clock, passed in."""

    def __init__(self, config: ClusterConfig, logs: Path, told: Told) -> None:
        """`logs`: the folder for what policies print. `told` hears of their faults. Raises `ConfigError` for a setting of the
        planner that is wrong."""
        self._interval_s = config.autoscaling.interval_s
        self._targets, self._settings = targets_of(config), planner_settings(config)
        self._slo_class = config.slo_class
        self._state = PlannerState()
        self._before: ClusterReading | None = None
        self._observed: Observations | None = None  # what happened, until a plan is made from it
        self._plan: Plan | None = None
        self._followed = False  # the last plan was followed
        timeout_s = min(POLICY_TIMEOUT_S, self._interval_s)
        self._policies = {
            role: ScalingPolicy(setting, name, timeout_s, policy_log(logs, role), told)
            for role, setting, name in policies_of(config)
        }

    @property
    def reasons(self) -> tuple[str, ...]:
        """The sentences of the last plan."""
        return self._plan.reasons if self._plan is not None else ()

    def follow(self, wanted: WantedSizes, now_s: float) -> None:
        """Follow the processes of the policies. They run only while somebody follows them."""
        for policy in self._policies.values():
            if wanted.mode is Mode.AUTOMATIC:
                policy.follow(now_s)
            else:
                policy.close()

    def decide(
        self, reading: ClusterReading, members: Sequence[PoolMember], limits: Limits, wanted: WantedSizes, now_s: float
    ) -> PoolSizes | None:
        """Return the sizes for the next interval. None: no interval has ended, or a policy is still asked."""
        is_due = self._before is None or now_s - self._before.at_s >= self._interval_s
        if is_due and self._observed is None:  # the plan of the last interval is made first, however short intervals are
            self._look(reading, members, limits, wanted, now_s)
        if self._observed is None or any(policy.is_asked for policy in self._policies.values()):
            return None
        observed, self._observed = self._observed, None
        state = self._state
        followed, self._followed = self._followed, wanted.mode is Mode.AUTOMATIC
        ours = followed and self._followed and state.sizes == wanted.sizes  # no order came in between
        if not ours:  # the present sizes are nobody's plan, so this plan begins with them
            state = replace(state, sizes=None, memories=None)
        answers = {role: policy.size for role, policy in self._policies.items()} if self._followed else NO_POLICIES
        self._plan = plan(observed, self._targets, limits, state, self._settings, answers, followed=self._followed)
        self._state = self._plan.state
        return PoolSizes(self._plan.prefill, self._plan.decode)

    def close(self) -> None:
        """End the processes of the policies. Idempotent."""
        for policy in self._policies.values():
            policy.close()

    def _look(
        self, reading: ClusterReading, members: Sequence[PoolMember], limits: Limits, wanted: WantedSizes, now_s: float
    ) -> None:
        """Note what happened in the interval that ends now, and ask the policies about it."""
        before, self._before = self._before, reading
        if before is None:
            return
        stays = {WorkerId(member.worker_id): member.role for member in members if member.phase is not Phase.LEAVING}
        self._observed = observe(before, reading, stays, slo_class=self._slo_class)
        for role, policy in self._policies.items():
            if wanted.mode is Mode.AUTOMATIC:
                own, size = getattr(limits, role.value), getattr(wanted.sizes, role.value)
                context = ScalingContext(role, size, own.min_workers, own.max_workers, self._observed, self._targets)
                policy.ask(context, now_s)

    def to_wire(self, now_s: float) -> scaling_pb2.ScalingPlan | None:
        """Return the last plan for operators. None: there was none."""
        if self._plan is None or self._before is None:
            return None
        return plan_to_wire(self._plan, now_s - self._before.at_s)


def policies_of(config: ClusterConfig) -> list[tuple[Role, str, str]]:
    """Return the pools that follow a policy of the operator's own, each with the setting and its value."""
    names = ((Role.PREFILL, config.prefill.scaling_policy), (Role.DECODE, config.decode.scaling_policy))
    return [(role, f"{role.value}.scaling_policy", name) for role, name in names if name != PLANNER]


def policy_log(logs: Path, role: Role) -> Path:
    """Return the file with what the policy of a pool prints."""
    return log_file(logs, f"{role.value}-policy.log")
