"""Sizes of policies of the operator's own: the planner decides the other pool, and no limit is ever exceeded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.worker import Role
from pdserve.planner.limits import Limits, PoolLimits, PoolSizes, Targets
from pdserve.planner.observations import DemandObserved, Observations, PoolObserved
from pdserve.planner.planner import Plan, PlannerState, plan
from pdserve.planner.policy import PolicySize

LIMITS = Limits(PoolLimits(1, 9), PoolLimits(1, 9))
TARGETS = Targets(1.0, 0.05)
sizes = st.none() | st.integers(0, 10_000)


def seen(now_s: float, prefill: int = 2, decode: int = 2) -> Observations:
    return Observations(
        now_s,
        10.0,
        DemandObserved(10.0, 5_000.0, 1_000.0, 0.0, 0.0, 0.0, 0.0),
        PoolObserved(prefill, tokens_per_s=5_000.0, busy_tokens_per_s=4_000.0, utilisation=0.6, queued_tokens=0.0),
        PoolObserved(decode, tokens_per_s=1_000.0, step_s=0.02, sequences=20.0, max_sequences=64.0, kv_used=0.3),
    )


def planned(rounds: list[dict[Role, PolicySize]], limits: Limits = LIMITS) -> list[Plan]:
    """One plan after the other, each followed at once."""
    made: list[Plan] = []
    state = PlannerState()
    for number, policies in enumerate(rounds, 1):
        present = made[-1] if made else None
        observed = seen(10.0 * number, *((present.prefill, present.decode) if present else (2, 2)))
        made.append(plan(observed, TARGETS, limits, state, policies=policies))
        state = made[-1].state
    return made


def size(workers: int | None, fault: str = "") -> PolicySize:
    return PolicySize("own:size", workers, fault)


def test_a_pool_follows_its_policy_at_once_and_keeps_its_size_without_one() -> None:
    """No cool-down and no delay of the planner's holds back what a policy wants."""
    wanted = [5, None, 1, None, 9]
    made = planned([{Role.PREFILL: size(each, "it raised ValueError")} for each in wanted])
    assert [each.prefill for each in made] == [5, 5, 1, 1, 9]
    assert "The policy own:size wants 5 prefill workers." in made[0].reasons
    kept = "The policy own:size gives no size, so the prefill pool keeps its 5: it raised ValueError."
    assert kept in made[1].reasons
    assert made[0].pools[0].raw_workers is None
    assert made[0].pools[1].raw_workers is not None


def test_a_policy_that_gives_no_size_from_the_start_keeps_the_pool_as_it_is() -> None:
    made = planned([{Role.DECODE: size(None)}] * 3)
    assert [each.decode for each in made] == [2, 2, 2]
    assert "it was not asked yet" in " ".join(made[0].reasons)


@pytest.mark.parametrize(("wanted", "becomes", "limit"), [(0, 1, "decode.min_workers"), (10, 9, "decode.max_workers")])
def test_a_policy_is_kept_within_the_limits_of_its_pool(wanted: int, becomes: int, limit: str) -> None:
    made = planned([{Role.DECODE: size(wanted)}])[0]
    assert (made.decode, made.pools[1].wanted, made.pools[1].limits) == (becomes, wanted, (limit,))


def test_a_policy_is_heard_where_the_planner_knows_nothing() -> None:
    observed = replace(seen(10.0), demand=DemandObserved())
    made = plan(observed, TARGETS, LIMITS, PlannerState(), policies={Role.PREFILL: size(4)})
    assert (made.prefill, made.decode) == (4, 2)
    assert [reason.partition(":")[0] for reason in made.reasons] == [
        "The policy own",
        "The sizes are held, because the state of the cluster is not known",
    ]
    both = {Role.PREFILL: size(4), Role.DECODE: size(3)}
    assert len(plan(observed, TARGETS, LIMITS, PlannerState(), policies=both).reasons) == 2


@given(
    wanted=st.lists(st.tuples(sizes, sizes), min_size=1, max_size=6),
    most=st.integers(2, 12),
    owned=st.sets(st.sampled_from(Role), min_size=1),
    can_flip=st.booleans(),
)
def test_no_policy_exceeds_a_limit(
    wanted: list[tuple[int | None, int | None]], most: int, owned: set[Role], can_flip: bool
) -> None:
    limits = Limits(PoolLimits(1, 7), PoolLimits(1, 7), max_workers=most, can_flip=can_flip)
    rounds = [{role: size(each[role is Role.DECODE]) for role in Role if role in owned} for each in wanted]
    for made in planned(rounds, limits):
        assert not limits.exceeded(made.prefill, made.decode)
        assert 1 <= made.prefill <= 7
        assert 1 <= made.decode <= 7


@given(prefill=st.integers(1, 9))
def test_the_planner_decides_the_other_pool_as_ever(prefill: int) -> None:
    """As long as no limit of both pools binds and no worker changes its role."""
    alone = planned([{}] * 4)
    beside = planned([{Role.PREFILL: size(prefill)}] * 4)
    assert [each.decode for each in beside] == [each.decode for each in alone]
    assert [PoolSizes(each.prefill, each.decode).prefill for each in beside] == [prefill] * 4
