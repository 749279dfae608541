"""The planner under loads, measurements and delays that nobody would choose: it keeps the limits, and comes to rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pdserve.planner.limits import Limits, PoolLimits
from pdserve.planner.observations import Observations
from pdserve.planner.planner import Plan, plan
from tests.planner.fluid import PROMPT_RATE, Fluid, changes

INTERVAL_S = 2.0
HARD, QUIET = 450, 450
"""Intervals of the adversarial load, and of the quiet one that follows."""
QUIET_RATE = 8.0
TIGHT = Limits(PoolLimits(1, 6), PoolLimits(1, 6), max_workers=8, can_flip=True)

Observed = Callable[[Observations], Observations]


def swings(period_s: float) -> Callable[[float], float]:
    return lambda now_s: 60.0 if now_s % period_s < period_s / 2 else 3.0


def lies(factor: float) -> Observed:
    """Workers seem to compute faster by a factor, and their steps to be shorter."""

    def told(seen: Observations) -> Observations:
        rate, step_s = seen.prefill.busy_tokens_per_s, seen.decode.step_s
        return replace(
            seen,
            prefill=replace(seen.prefill, busy_tokens_per_s=rate and rate * factor),
            decode=replace(seen.decode, step_s=step_s and step_s / factor),
        )

    return told


def cached(seen: Observations) -> Observations:
    """Of ten prompt tokens, clients repeat nine."""
    return replace(
        seen,
        demand=replace(seen.demand, prompt_tokens_per_s=10 * (seen.demand.prompt_tokens_per_s or 0.0)),
        prefill=replace(seen.prefill, cached_share=0.9),
    )


def without_prompts(seen: Observations) -> Observations:
    """All prompts are computed by decode workers."""
    return replace(
        seen,
        demand=replace(seen.demand, queued_prompt_tokens=0.0),
        prefill=replace(seen.prefill, busy_tokens_per_s=None, utilisation=0.0, queued_tokens=0.0, cached_share=None),
    )


@dataclass(frozen=True)
class Case:
    """An adversarial load, and the most changes of the sizes in `HARD` intervals. `lasts`: the quiet load is observed alike."""

    load: Callable[[float], float]
    most_changes: int
    observed: Observed = lambda seen: seen
    lasts: bool = False
    more: dict[str, Any] = field(default_factory=dict)


CASES = {
    "swings as fast as the intervals": Case(swings(2 * INTERVAL_S), 15),
    "swings as slow as the cool-down": Case(swings(60.0), 15),
    "swings as slow as a flip": Case(swings(120.0), 15),
    "a flash crowd": Case(lambda now_s: 400.0 if 100 < now_s < 130 else 3.0, 15),
    "rates three times too high": Case(lambda _: 40.0, 15, lies(3.0)),
    "rates three times too low": Case(lambda _: 20.0, 15, lies(1 / 3)),
    "nine tokens of ten are cached": Case(lambda _: 40.0, 15, cached, lasts=True),
    "no prompt comes to prefill workers": Case(lambda _: 40.0, 15, without_prompts),
    "workers start after 15 minutes": Case(lambda _: 20.0, 10, more={"start_s": 900.0}),
    "workers never start": Case(lambda _: 20.0, 10, more={"start_s": 1e9}),
    "a budget with one worker too few": Case(lambda _: 40.0, 10, more={"limits": replace(TIGHT, max_workers=5)}),
    "one worker each": Case(lambda _: 40.0, 0, more={"limits": Limits(PoolLimits(1, 1), PoolLimits(1, 1))}),
}


@pytest.mark.quick(
    "swings as fast*",
    "a flash crowd",
    "rates*high",
    "nine tokens*",
    "no prompt*",
    "workers start*",
    "one worker each",
)
@pytest.mark.parametrize("name", CASES)
def test_the_pools_keep_their_limits_and_come_to_rest(name: str) -> None:
    """Nothing is exceeded at any moment, workers that start or drain included; sizes change a few times in a quarter of an
    hour; and each change has a sentence. Under a quiet load afterwards the pools are small and stay as they are."""
    case = CASES[name]
    fluid = Fluid(case.load, interval_s=INTERVAL_S, limits=TIGHT, seed=3)
    for setting, value in case.more.items():
        setattr(fluid, setting, value)

    def told(seen: Observations, *rest: Any) -> Plan:
        hard = case.lasts or fluid.now_s <= HARD * INTERVAL_S
        return plan(case.observed(seen) if hard else seen, *rest)

    fluid.planner = told
    before: Plan | None = None
    for _ in range(HARD):
        made = fluid.run(1)[0]
        _check(fluid, made, before)
        before = made
    assert changes(fluid.plans) <= case.most_changes
    fluid.load, fluid.start_s = lambda _: QUIET_RATE, 60.0
    fluid.waiting, fluid.prompts = min(fluid.waiting, 100.0), min(fluid.prompts, PROMPT_RATE)  # clients give up
    made = fluid.run(QUIET)[-1]
    assert changes(fluid.plans[-100:]) == 0
    assert made.prefill <= min(3, fluid.limits.prefill.max_workers)
    assert made.decode <= min(2, fluid.limits.decode.max_workers)


def _check(fluid: Fluid, made: Plan, before: Plan | None) -> None:
    limits = fluid.limits
    assert limits.prefill.min_workers <= made.prefill <= limits.prefill.max_workers
    assert limits.decode.min_workers <= made.decode <= limits.decode.max_workers
    assert not limits.exceeded(fluid.prefill.all, fluid.decode.all)
    text = " ".join(made.reasons)
    for role, pool in zip(("prefill", "decode"), made.pools, strict=True):
        old = before.pools[made.pools.index(pool)].size if before is not None else pool.size
        assert (f"The {role} pool {'grows' if pool.size > old else 'shrinks'} from {old} to" in text) == (pool.size != old)
