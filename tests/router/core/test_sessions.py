"""Sessions: turns go back to their workers, as long as these are not much more loaded; what is remembered is bounded."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.config import RouterConfig
from pdserve.core.ids import Incarnation, RequestId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.worker import Role
from router.core import events as ev
from router.core.live_request import LiveRequest
from router.core.policy import Candidate, Rankings, RequestView, pick, ranking_of, session_affinity
from router.core.pools import Sessions
from router.core.registry import Registry
from router.core.router_core import RouterCore

from ..core_peers import FINGERPRINT, Stage, hello

AFFINITY = ranking_of("session_affinity", session_affinity)
ROW = Candidate(ev.LinkId(1), kv_tokens=100, promised_tokens=0, free_slots=4, queued_tokens=0, max_model_len=64, suspect=False,
                refused=False)  # fmt: skip


def turn(session: str, salt: str = "") -> LiveRequest:
    spec = RequestSpec((1,), SamplingParams(max_tokens=1), cache_salt=salt)
    return LiveRequest.of(ev.Submit(RequestId("r"), spec, 0.0, 1.0, session_id=session), 0)


def joined(registry: Registry, link: int, worker_id: str, role: Role, incarnation: int) -> None:
    registry.join(ev.LinkId(link), hello(worker_id, role, incarnation=Incarnation(incarnation)), now_s=0.0)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["", *"abcdef"]), st.sampled_from(["", "x"]), st.sampled_from([1, 2])), max_size=40))
def test_the_sessions_of_the_last_turns_are_remembered_and_no_more(turns: list[tuple[str, str, int]]) -> None:
    registry = Registry(FINGERPRINT)
    joined(registry, 1, "d1", Role.DECODE, 1)
    joined(registry, 2, "d2", Role.DECODE, 2)
    sessions = Sessions(registry, max_sessions=3)
    model: OrderedDict[tuple[str, str], int] = OrderedDict()
    for session, salt, link in turns:
        worker = registry.get(ev.LinkId(link))
        assert worker is not None
        sessions.placed(turn(session, salt), worker)
        if session:
            model[session, salt] = link
            model.move_to_end((session, salt))
            if len(model) > 3:
                model.popitem(last=False)
        assert len(sessions) == len(model)
        for one in ("", *"abcdef"):
            for other in ("", "x"):
                assert sessions.last_turn(turn(one, other), Role.DECODE) == model.get((one, other))
                assert sessions.last_turn(turn(one, other), Role.PREFILL) is None


def test_a_worker_that_dials_again_keeps_its_sessions_and_one_that_restarts_does_not() -> None:
    registry = Registry(FINGERPRINT)
    joined(registry, 1, "d", Role.DECODE, 7)
    sessions = Sessions(registry)
    worker = registry.get(ev.LinkId(1))
    assert worker is not None
    sessions.placed(turn("s"), worker)
    registry.leave(ev.LinkId(1))
    assert sessions.last_turn(turn("s"), Role.DECODE) is None
    joined(registry, 2, "d", Role.DECODE, 7)
    assert sessions.last_turn(turn("s"), Role.DECODE) == 2
    registry.leave(ev.LinkId(2))
    joined(registry, 3, "d", Role.DECODE, 8)
    assert sessions.last_turn(turn("s"), Role.DECODE) is None


@pytest.mark.parametrize(("load", "stays"), [(0.0, True), (0.2, True), (0.3, False), (0.9, False)])
def test_a_decode_worker_keeps_its_session_up_to_a_quarter_more_load(load: float, stays: bool) -> None:
    own, other = ROW._replace(session=True, load=load), ROW._replace(link=ev.LinkId(2))
    picked = pick([other, own], [session_affinity(row, RequestView(10, 10)) for row in (other, own)])
    assert picked is (own if stays else other)


@pytest.mark.parametrize(("queue_s", "stays"), [(0.0, True), (0.9, True), (1.1, False)])
def test_a_prefill_worker_keeps_its_session_while_the_wait_is_shorter_than_the_prompt(queue_s: float, stays: bool) -> None:
    row = ROW._replace(role=Role.PREFILL, counted_tokens_per_s=1000.0)
    own, other = row._replace(session=True, load=queue_s), row._replace(link=ev.LinkId(2))
    picked = pick([other, own], [session_affinity(each, RequestView(1000, 1000)) for each in (other, own)])
    assert picked is (own if stays else other)


class AffinityStage(Stage):
    """Two pools of three workers, and the policy of sessions on both."""

    def __init__(self) -> None:
        super().__init__()
        self.replayable = False  # a recording names the policies of its settings, and these are others
        self.core = RouterCore(RouterConfig(probe_workers=False), FINGERPRINT, Rankings(AFFINITY, AFFINITY))
        for role in (Role.PREFILL, Role.DECODE):
            for number in range(3):
                self.join(f"{role.value}-{number}", role)

    def turn(self, name: str, session: str) -> tuple[str, str]:
        outcome = self.submit(name, session_id=session)
        self.run()
        assert outcome.report is not None
        return outcome.report.prefill_worker, outcome.report.decode_worker


def test_turns_go_back_to_their_workers_and_new_sessions_to_others() -> None:
    stage = AffinityStage()
    first = {session: stage.turn(f"first-{session}", session) for session in "abc"}
    assert len(set(first.values())) == 3
    for count in range(3):
        for session in "cab":
            assert stage.turn(f"{count}-{session}", session) == first[session]
    stage.assert_empty()


def test_a_session_moves_when_its_worker_is_fuller_by_a_quarter() -> None:
    """Workers have four slots. (1) Two turns of one session run at a time, so the second one moves. (2) The session follows."""
    stage = AffinityStage()
    decode = stage.turn("first", "a")[1]
    together = [stage.submit(f"together-{n}", session_id="a") for n in range(2)]
    stage.run()
    stayed, moved = [outcome.report.decode_worker for outcome in together if outcome.report is not None]
    assert stayed == decode != moved
    assert stage.turn("last", "a")[1] == moved
    stage.assert_empty()
