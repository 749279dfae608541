"""A worker that drains refuses what it is sent. This is no failure: whatever the order, no request pays for it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdserve.core.errors import Unavailable
from pdserve.core.sampling import Placement
from pdserve.core.worker import Role
from router.core import events as ev
from router.core.handoff import Handoff
from router.core.recovery import Cost
from router.core.work_machine import WorkEvent

from ..core.recovery.stages import busy, pools, prefilling, sent
from ..core_peers import Stage

REQUESTS = 6
STEPS = 400


def serve_while_workers_leave(seed: int, prefill: int, decode: int) -> Stage:
    """Serve requests without any retry, while all workers but the last one of each role begin to drain at random moments. The
    router hears of a drain by the refusals alone."""
    random = Random(seed)
    stage = pools(prefill, decode, max_attempts=1, retry_share=0.0, retry_burst=0)
    peers = list(stage.peers.values())
    leaving = [p for p in peers if p.hello.worker_id not in (f"prefill-{prefill - 1}", f"decode-{decode - 1}")]
    for number in range(REQUESTS):
        stage.submit(f"r{number}", max_tokens=random.randrange(1, 5), placement=random.choice((None, *Placement)))
    for _ in range(STEPS):
        if leaving and random.random() < 0.3:
            leaving.pop(random.randrange(len(leaving))).draining = True
        peer = random.choice(peers)
        if random.random() < 0.5:
            peer.progress()
        stage.deliver(peer)
        stage.core.check_invariants()
    stage.run()
    return stage


def check_nobody_paid(stage: Stage) -> None:
    for name, outcome in stage.outcomes.items():
        assert outcome.ended == ["done"], f"{name} ended as {outcome.error}"
        assert outcome.report is not None
        assert (outcome.report.attempts, outcome.report.retry_reasons, outcome.report.rebinds) == (1, (), 0)
    assert not list(stage.core.pairs.set_aside(now_s=stage.now_s))
    assert not stage.core.pairs.in_doubt()
    for peer in stage.peers.values():
        worker = stage.core.registry.get(peer.link)
        assert worker is not None
        assert worker.draining == bool(peer.refused), "a worker that refused may be asked again"
    stage.assert_empty()


@given(seed=st.integers(0, 1 << 32), prefill=st.integers(1, 4), decode=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_a_request_without_any_retry_survives_each_refusal(seed: int, prefill: int, decode: int) -> None:
    check_nobody_paid(serve_while_workers_leave(seed, prefill, decode))


def refused_as_a_failure(self: Any, work: Any, event: Any, now_s: float) -> Any:
    work.machine.move(WorkEvent.DRAINING)
    self._requests.drop(work).draining = True
    yield from self._recovery.retry(work.request, Unavailable("draining"), now_s, Cost.ATTEMPT_AND_RETRY)


def refused_and_asked_again(self: Any, work: Any, event: Any, now_s: float) -> Any:
    yield from REAL(self, work, event, now_s)
    for worker in self._requests.registry:
        if worker.link == work.link:
            worker.draining = False
            worker.touch()


REAL: Callable[..., Any] = Handoff.place_elsewhere


@pytest.mark.parametrize("mutant", [refused_as_a_failure, refused_and_asked_again])
def test_the_property_finds(mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handoff, "place_elsewhere", mutant)
    with pytest.raises(AssertionError):
        check_seeds()


def check_seeds() -> None:
    for seed in range(20):
        check_nobody_paid(serve_while_workers_leave(seed, 3, 3))


def test_the_reservation_stays_when_a_prefill_worker_refuses() -> None:
    """(1) Decode reserves; (2) two prefill workers refuse; (3) the third one computes for the same reservation."""
    stage = pools(prefill=3, decode=2)
    prefills = [p for p in stage.peers.values() if p.hello.role is Role.PREFILL]
    outcome = stage.submit("r", max_tokens=4, placement=Placement.DISAGGREGATED)
    for peer in prefills[:2]:
        peer.draining = True
    stage.run()
    assert outcome.ended == ["done"]
    assert outcome.report is not None
    assert (outcome.report.binds, outcome.report.attempts, outcome.report.prefill_worker) == (1, 1, "prefill-2")
    story = stage.core.requests.stories_of("r")[0]
    refusals = [dict(entry.fields) for entry in story.entries if entry.kind == "refused"]
    assert [(r["worker"], r["why"]) for r in refusals] == [("prefill-0", "draining"), ("prefill-1", "draining")]
    stage.assert_empty()


def test_without_another_prefill_worker_the_bind_is_given_back_and_the_prompt_is_computed_where_it_is_decoded() -> None:
    stage = pools(prefill=1, decode=1)
    outcome = stage.submit("r", max_tokens=4)
    lender = next(p for p in stage.peers.values() if p.hello.role is Role.PREFILL)
    lender.draining = True
    stage.run()
    assert outcome.ended == ["done"]
    assert outcome.report is not None
    assert (outcome.report.placement, outcome.report.attempts) == (Placement.COLOCATED, 1)
    assert outcome.report.placement_reason == "prefill_pool_empty"
    stage.assert_empty()


@pytest.mark.parametrize("others", [1, 0])
def test_a_refused_rebind_goes_on_to_the_next_worker(others: int) -> None:
    """(1) The decode worker dies in the handoff; (2) the one that should replace it drains; (3) another one reads the lease,
    or, without one, the loss costs an attempt as ever."""
    stage = pools(prefill=1, decode=2 + others)
    outcome = stage.submit("r", max_tokens=6)
    prefilling(stage)
    lost = busy(stage, Role.DECODE)
    for peer in stage.peers.values():
        peer.draining = peer.hello.role is Role.DECODE and peer is not lost
    stage.leave(lost)
    first = stage.peers[sent(stage, ev.SendBind)[-1].link]
    for peer in stage.peers.values():
        peer.draining = peer is first
    stage.run()
    if not others:
        stage.join("decode-0", Role.DECODE)
        stage.run()
    assert outcome.ended == ["done"]
    assert outcome.report is not None
    assert outcome.report.attempts == 1 + (not others)
    stage.assert_empty()


def test_a_worker_that_dials_while_it_drains_gets_nothing() -> None:
    """The router may have restarted, and knows the worker's state from its Hello alone. No probe is started either."""
    stage = Stage(probe_workers=True)
    stage.join("decode-0", Role.DECODE, draining=True)
    stage.join("prefill-0", Role.PREFILL, draining=True)
    stage.now_s += 1.0
    stage.tell(ev.Tick())
    assert not sent(stage, ev.SendBind)
    assert all(worker.draining and not worker.serves for worker in stage.core.registry)


def test_a_probe_that_a_draining_peer_refuses_costs_the_other_worker_nothing() -> None:
    stage = Stage(probe_workers=True)
    decode = stage.join("decode-0", Role.DECODE)
    stage.run()  # it is probed alone first
    lender = stage.join("prefill-0", Role.PREFILL)
    lender.draining = True
    stage.run()
    worker = stage.core.registry.get(decode.link)
    assert worker is not None
    assert worker.readiness.ready
    assert (worker.readiness.failures, worker.readiness.probes) == (0, 0)
    stage.assert_empty()
