"""A light request does not wait for a burst that has all slots, and who gives way loses nothing but time."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdserve.core.slo import BUILT_IN, SloClass
from router.core.fair_slots import MAX_FIRSTS, FairSlots, largest_beside
from router.core.live_request import LiveRequest
from tests.router.core.recovery.test_migration import LONG, NOTHING_LEFT, finish, join, step
from tests.router.core_peers import Outcome, Stage

HEAVY = ("heavy", "c1", "call 1")


def burst(slots: int, count: int, clients: list[tuple[str, ...]], *, workers: int = 1) -> tuple[Stage, list[Outcome]]:
    stage = Stage(**NOTHING_LEFT)
    for n in range(workers):
        join(stage, f"decode-{n}", slots)
    outcomes = [stage.submit(f"r{n}", max_tokens=LONG, deadline_s=1e6, client=clients[n % len(clients)]) for n in range(count)]
    for _ in range(4):
        step(stage)
    return stage, outcomes


def migrated(outcomes: list[Outcome]) -> int:
    return sum(o.report.migrations for o in outcomes if o.report)


@pytest.mark.parametrize(
    ("clients", "light"),
    [
        ([HEAVY], ("light", "c9", "call 9")),
        ([("heavy", f"c{n}", f"call {n}") for n in range(8)], ("light", "c9", "call 9")),
        ([HEAVY], ("heavy", "c9", "call 9")),
        ([HEAVY], ("heavy", "c1", "call 9")),
    ],
    ids=["a call", "many connections", "another connection", "another call"],
)
def test_a_light_request_has_its_first_token_after_a_few_steps(clients: list[tuple[str, ...]], light: tuple[str, ...]) -> None:
    """The burst has all slots for 200 steps, and 8 more of it wait."""
    stage, outcomes = burst(8, 16, clients)
    one = stage.submit("light", max_tokens=3, deadline_s=1e6, client=light)
    for _ in range(5):
        step(stage)
    assert one.emitted
    assert sum(r.migrations for r in stage.core.requests.of_clients()) == 1
    finish(stage, outcomes)
    assert one.ended == ["done"]
    assert one.emitted == [0, 1, 2]


def test_nobody_gives_way_to_a_client_that_has_a_slot_or_where_each_has_one() -> None:
    stage, outcomes = burst(4, 4, [(f"client {n}", "c", "call") for n in range(4)])
    outcomes += [stage.submit("more", max_tokens=LONG, deadline_s=1e6, client=("client 0", "c", "another"))]
    outcomes += [stage.submit("new", max_tokens=LONG, deadline_s=1e6, client=("client 9", "c", "call"))]
    for _ in range(20):
        step(stage)
    assert not outcomes[-1].emitted
    finish(stage, outcomes)
    assert migrated(outcomes) == 0


def test_who_gave_way_comes_back_before_all_who_are_new() -> None:
    stage, outcomes = burst(4, 12, [HEAVY])
    stage.submit("light", max_tokens=12, deadline_s=1e6, client=("light", "c", "call"))
    for _ in range(5):
        step(stage)
    (aside,) = [r for r in stage.core.requests.of_clients() if r.migrations]
    for _ in range(15):
        step(stage)
    assert stage.outcomes[aside.request_id].emitted != list(aside.resumed)
    assert sum(bool(o.emitted) for o in outcomes) == 4, "nobody of the queue came before"
    finish(stage, outcomes)


def test_each_request_is_helped_once_and_a_client_keeps_a_slot() -> None:
    """Light clients come all the time."""
    stage, outcomes = burst(4, 4, [HEAVY])
    lights = []
    for n in range(30):
        lights.append(stage.submit(f"light {n}", max_tokens=20, deadline_s=1e6, client=(f"light {n}", "c", "call")))
        step(stage)
        assert any(r.client == HEAVY and r.decode is not None for r in stage.core.requests.of_clients())
    finish(stage, outcomes)
    assert all(o.ended == ["done"] for o in lights)
    assert migrated([*outcomes, *lights]) <= len(lights)


def test_a_request_that_needs_more_kv_than_any_that_runs_waits_for_its_turn() -> None:
    stage, outcomes = burst(4, 4, [HEAVY])
    large = stage.submit("large", prompt_len=700, max_tokens=3, deadline_s=1e6, client=("light", "c", "call"))
    for _ in range(20):
        step(stage)
    assert not large.emitted
    finish(stage, outcomes)
    assert migrated(outcomes) == 0


@pytest.mark.parametrize("high", [SloClass("high", priority=10, ttft_s=0.15), SloClass("quick", ttft_s=0.15, urgent=True)])
def test_a_class_gives_no_slot_to_a_lower_one_or_an_urgent_one_to_another(high: SloClass) -> None:
    stage = Stage(**NOTHING_LEFT)
    join(stage, "decode-0", 8)
    mine = [stage.submit(f"h{n}", max_tokens=LONG, deadline_s=1e6, slo=high, client=HEAVY) for n in range(16)]
    for _ in range(4):
        step(stage)
    batch = [
        stage.submit(f"b{n}", max_tokens=3, deadline_s=1e6, slo=BUILT_IN["batch"], client=(f"light {n}", "c", "call"))
        for n in range(10)
    ]
    for _ in range(30):
        step(stage)
        assert sum(r.decode is not None for r in stage.core.requests.of_clients() if r.slo is high) == 8
    finish(stage, mine)
    assert migrated(mine) == 0
    assert all(o.ended == ["done"] for o in batch)


def test_a_tick_looks_at_a_few_requests_however_many_kinds_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are looked at in the end."""
    stage, _ = burst(4, 4, [("client 0", "c", f"call {n}") for n in range(4)])
    looked: list[str] = []
    real = FairSlots._help

    def help_(self: FairSlots, request: LiveRequest, *args: Any) -> Any:
        looked.append(request.request_id)
        return real(self, request, *args)

    monkeypatch.setattr(FairSlots, "_help", help_)
    for n in range(20):
        stage.submit(f"w{n}", prompt_len=8 << n // 4, max_tokens=3, deadline_s=1e6, client=("client 0", "c", f"call {n}"))
    kinds = len(stage.core.requests.waiting.kinds())
    assert kinds > MAX_FIRSTS
    for _ in range(2 * kinds):
        before = len(looked)
        step(stage)
        assert len(looked) - before <= MAX_FIRSTS
    assert len(set(looked)) >= kinds


def test_a_request_that_gave_its_slot_back_is_charged_for_all_of_its_output() -> None:
    tags = []
    for light in (False, True):
        stage, outcomes = burst(4, 4, [HEAVY])
        if light:
            stage.submit("light", max_tokens=3, deadline_s=1e6, client=("light", "c", "call"))
        finish(stage, outcomes)
        assert migrated(outcomes) == light
        lines = stage.core.requests.waiting._flows.values()
        tags.append(sum(flows.root.below["heavy"].tag for flows in lines if "heavy" in flows.root.below))
    assert tags[1] >= tags[0] > 4 * LONG


PATHS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("cd"), st.sampled_from("ef")), max_size=12)


@settings(max_examples=200, deadline=None)
@given(PATHS, st.tuples(st.sampled_from("abx"), st.sampled_from("cdx"), st.sampled_from("efx")), st.booleans())
def test_a_flow_gives_way_only_to_one_beside_it_that_has_nothing(
    running: list[tuple[str, ...]], path: tuple[str, ...], odd: bool
) -> None:
    lesser = running[::2] if odd else running
    flow = largest_beside(path, running, lesser, more_than=2)
    if flow:
        level = len(flow) - 1
        mine = path[: len(flow)]
        assert flow[:level] == path[:level]
        assert flow != mine
        assert sum(one[: len(flow)] == mine for one in running) == 0
        assert sum(one[: len(flow)] == flow for one in lesser) > 2
