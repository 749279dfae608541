"""The steps towards the wanted sizes: they get there, never dip below what is asked, and never exceed the limits on the way."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.worker import Role
from pdserve.planner.limits import Limits, PoolLimits, PoolSizes
from pdserve.planner.resizing import Cancel, Drain, Flip, Phase, PoolMember, Start, Step, count_of, steps_of

ROUNDS = 12


@st.composite
def memberships(draw: st.DrawFn) -> list[PoolMember]:
    made = []
    for index in range(draw(st.integers(0, 10))):
        phase = draw(st.sampled_from(Phase))
        serving = phase is Phase.SERVING
        made.append(
            PoolMember(
                worker_id=f"w-{index}",
                role=draw(st.sampled_from(Role)),
                phase=phase,
                incarnation=index + 1 if serving else 0,
                ready=serving and draw(st.booleans()),
                work=draw(st.integers(0, 3)) if serving else 0,
                since_s=draw(st.integers(0, 3)),
                obstacle=draw(st.sampled_from(["", "prefill.num_gpus 1 and decode.num_gpus 2 differ"])),
            )
        )
    return made


SIZES = st.builds(PoolSizes, st.integers(0, 6), st.integers(1, 6))


@st.composite
def limits_over(draw: st.DrawFn, sizes: PoolSizes) -> Limits:
    """Limits within which the sizes are, as the planner promises."""
    pools = PoolLimits(0, gpus=draw(st.sampled_from([0.0, 1.0]))), PoolLimits(0, gpus=draw(st.sampled_from([0.0, 0.5, 2.0])))
    gpus = pools[0].gpus * sizes.prefill + pools[1].gpus * sizes.decode
    return Limits(
        *pools,
        max_workers=draw(st.none() | st.integers(0, 3).map(lambda more: sizes.prefill + sizes.decode + more)),
        max_gpus=draw(st.none() | st.integers(0, 3).map(lambda more: gpus + more)),
        can_flip=draw(st.booleans()),
    )


def apply(members: list[PoolMember], steps: list[Step], round_: int) -> list[PoolMember]:
    """The steps are taken; what they began ends before the next round."""
    by_id = {member.worker_id: member for member in members if member.phase is not Phase.LEAVING}
    for index, step in enumerate(steps):
        if isinstance(step, Start):
            name = f"new-{round_}-{index}"
            by_id[name] = PoolMember(name, step.role, Phase.WAITING, since_s=10.0 + round_)
        elif isinstance(step, Cancel | Drain):
            del by_id[step.worker_id]
        else:
            by_id[step.worker_id] = dataclasses.replace(by_id[step.worker_id], role=step.role, incarnation=100 + index)
    came = {Phase.WAITING: Phase.SERVING, Phase.LOADING: Phase.SERVING, Phase.SETTLING: Phase.SERVING}
    return [dataclasses.replace(m, phase=came.get(m.phase, m.phase), ready=True) for m in by_id.values()]


def wanted(sizes: PoolSizes, role: Role) -> int:
    return sizes.prefill if role is Role.PREFILL else sizes.decode


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_sizes_are_reached_and_then_nothing_more_is_done(data: st.DataObject) -> None:
    members, sizes = data.draw(memberships()), data.draw(SIZES)
    limits = data.draw(limits_over(sizes))
    for round_ in range(ROUNDS):
        members = apply(members, steps_of(members, sizes, limits), round_)
    assert {role: count_of(members, role) for role in Role} == {role: wanted(sizes, role) for role in Role}
    assert steps_of(members, sizes, limits) == []


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_pool_dips_below_what_is_asked_and_no_limit_is_exceeded_in_between(data: st.DataObject) -> None:
    members, sizes = data.draw(memberships()), data.draw(SIZES)
    limits = data.draw(limits_over(sizes))
    steps = steps_of(members, sizes, limits)
    takes = [step for step in steps if not isinstance(step, Start)]
    starts = [step.role for step in steps if isinstance(step, Start)]
    for role in Role:
        before = count_of(members, role)
        left = {step.worker_id for step in takes}
        left_over = count_of([member for member in members if member.worker_id not in left], role)
        assert left_over >= min(before, wanted(sizes, role))
        ready = [m for m in members if m.role is role and m.ready]
        assert len([m for m in ready if m.worker_id not in left]) >= min(len(ready), wanted(sizes, role))
        came = left_over + starts.count(role) + sum(isinstance(step, Flip) and step.role is role for step in takes)
        assert came <= max(before, wanted(sizes, role))
    there = {role: sum(member.role is role for member in members) for role in Role}
    if starts:  # nobody counts as gone before it is
        after = {role: there[role] + starts.count(role) for role in Role}
        assert not limits.exceeded(after[Role.PREFILL], after[Role.DECODE])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_each_step_names_a_worker_once_in_a_phase_that_allows_it(data: st.DataObject) -> None:
    members, sizes = data.draw(memberships()), data.draw(SIZES)
    limits = data.draw(limits_over(sizes))
    by_id = {member.worker_id: member for member in members}
    touched = [step for step in steps_of(members, sizes, limits) if not isinstance(step, Start)]
    assert len({step.worker_id for step in touched}) == len(touched)
    for step in touched:
        member = by_id[step.worker_id]
        if isinstance(step, Cancel):
            assert member.phase in (Phase.WAITING, Phase.LOADING)
        else:
            assert (member.phase, member.incarnation) == (Phase.SERVING, step.incarnation)
        if isinstance(step, Flip):
            assert limits.can_flip
            assert not member.obstacle
            assert step.role is not member.role
        else:  # whoever stays is missed at least as much
            others = [m for m in members if m.role is member.role and m.phase is member.phase]
            kept = [m for m in others if m.worker_id not in {other.worker_id for other in touched}]
            if member.phase is Phase.SERVING:
                assert all((m.ready, m.work) >= (member.ready, member.work) for m in kept)


def serving(worker_id: str, role: Role, **more: float) -> PoolMember:
    return PoolMember(worker_id, role, Phase.SERVING, incarnation=7, ready=True, work=more.get("work", 0.0))


PAIR = [serving("prefill-0", Role.PREFILL, work=2.0), serving("prefill-1", Role.PREFILL), serving("decode-0", Role.DECODE)]


def test_a_worker_changes_its_role_rather_than_one_leaving_and_another_coming() -> None:
    sizes = PoolSizes(prefill=1, decode=2)
    assert steps_of(PAIR, sizes, Limits(can_flip=True)) == [Flip("prefill-1", 7, Role.DECODE)]
    assert steps_of(PAIR, sizes, Limits()) == [Drain("prefill-1", 7), Start(Role.DECODE)]


def test_the_new_worker_waits_for_the_old_one_where_the_limit_has_no_room_for_both() -> None:
    sizes, limits = PoolSizes(prefill=1, decode=2), Limits(max_workers=3)
    assert steps_of(PAIR, sizes, limits) == [Drain("prefill-1", 7)]
    leaving = [dataclasses.replace(m, phase=Phase.LEAVING) if m.worker_id == "prefill-1" else m for m in PAIR]
    assert steps_of(leaving, sizes, limits) == []
    assert steps_of([m for m in PAIR if m.worker_id != "prefill-1"], sizes, limits) == [Start(Role.DECODE)]


def test_a_worker_without_a_place_is_cancelled_before_one_that_loads_and_before_one_that_serves() -> None:
    loading = PoolMember("prefill-2", Role.PREFILL, Phase.LOADING)
    waiting = PoolMember("prefill-3", Role.PREFILL, Phase.WAITING)
    members = [*PAIR, loading, waiting]
    steps = [steps_of(members, PoolSizes(count, 1), Limits(can_flip=True)) for count in (3, 2, 1)]
    cancels: list[Step] = [Cancel("prefill-3"), Cancel("prefill-2")]
    assert steps == [cancels[:1], cancels, [*cancels, Drain("prefill-1", 7)]]


def test_of_the_workers_that_serve_nobody_the_youngest_is_cancelled_first() -> None:
    loading = [
        PoolMember(f"prefill-{at}", Role.PREFILL, Phase.LOADING, since_s=since_s) for at, since_s in ((2, 5.0), (3, 9.0))
    ]
    assert steps_of([*PAIR, *loading], PoolSizes(3, 1), Limits()) == [Cancel("prefill-3")]
    assert steps_of([*PAIR, *reversed(loading)], PoolSizes(3, 1), Limits()) == [Cancel("prefill-3")]
