"""A hostile prompt ejects nobody: what fails everywhere is the request's fault, at whatever rate it comes."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdserve.core.errors import PdserveError
from pdserve.core.ids import RequestId
from router.core import events as ev

from ...core_peers import Stage
from .sick import BUG, NO_NUMBERS, check_half_stays, later, out, poison, pools, serve

Step = tuple[str, float]
steps = st.lists(
    st.tuples(st.sampled_from(["poison", "poison", "poison", "good", "leave", "late"]), st.sampled_from([0.0, 0.1, 1.0, 20.0])),
    max_size=40,
)


def act(stage: Stage, kind: str, number: int) -> None:
    """A hostile client may also leave before its second failure, or set a deadline that passes first."""
    name = f"{'good' if kind == 'good' else 'poison'}-{number}"
    if kind == "late":
        stage.submit(name, max_tokens=6, deadline_s=0.05)
        for peer in list(stage.peers.values()):
            stage.deliver(peer, 9)
        stage.now_s += 0.06
        stage.tell(ev.Tick())
    else:
        stage.submit(name, max_tokens=6)
        for _ in range(4 if kind == "leave" else 0):
            for peer in list(stage.peers.values()):
                peer.progress()
                stage.deliver(peer, 9)
        if kind == "leave":
            stage.tell(ev.ClientGone(RequestId(name)))


@settings(max_examples=30, deadline=None)
@given(
    plan=steps,
    after=st.integers(0, 5),
    prefill=st.integers(1, 3),
    decode=st.integers(1, 5),
    error=st.sampled_from([NO_NUMBERS, BUG]),
    policy=st.sampled_from(["prefix_aware", "round_robin", "random"]),
)
def test_prompts_that_fail_everywhere_eject_nobody(
    plan: list[Step], after: int, prefill: int, decode: int, error: PdserveError, policy: str
) -> None:
    stage = pools(prefill, decode, decode_policy=policy, prefill_policy=policy, retry_burst=1000)
    poison(stage, after, error)
    for number, (kind, wait_s) in enumerate(plan):
        act(stage, kind, number)
        if wait_s:
            stage.run()
            later(stage, wait_s, min(wait_s, 2.0))
            assert not out(stage)
    stage.run()
    later(stage, 2.0)
    assert not out(stage)
    for name, outcome in stage.outcomes.items():
        assert outcome.ended == ["done"] or not name.startswith("good")
    stage.assert_empty()


def test_a_flood_of_hostile_prompts_leaves_others_served_and_nobody_ejected() -> None:
    """With the default budget of retries, which the flood uses up: then its requests have one try."""
    stage = pools(2, 4)
    poison(stage, after=2)
    for n in range(60):
        serve(stage, 5, each_s=0.02, name="poison", max_tokens=6)
        (good,) = serve(stage, 1, each_s=0.1, name=f"good{n}-", max_tokens=6)
        assert good.ended == ["done"]
        assert not out(stage)
    stage.assert_empty()


@pytest.mark.parametrize("bad", [1, 2])
def test_broken_workers_are_found_among_hostile_prompts(bad: int) -> None:
    stage = pools(2, 5, retry_burst=1000)
    poison(stage, after=1)
    for peer in list(stage.peers.values())[2 : 2 + bad]:
        peer.fault = lambda job: NO_NUMBERS
    seen: set[str] = set()
    lost = 0
    for n in range(120):
        serve(stage, 1, each_s=0.2, name="poison", max_tokens=6)
        good = serve(stage, 2, each_s=0.2, name=f"good{n}-", max_tokens=6)
        lost += sum(o.ended != ["done"] for o in good)
        seen.update(out(stage))
        check_half_stays(stage)
    assert seen == {f"decode-{n}" for n in range(bad)}
    assert lost <= 6 * (bad - 1), "of 240; two broken workers may share a request, while all look doubtful"
