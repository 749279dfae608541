"""The limits of the queue: shares of classes, who gives way, and that replays never do."""

from __future__ import annotations

import contextlib
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from pdserve.core.errors import Overloaded
from pdserve.core.ids import RequestId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.slo import DEFAULT_CLASS, SloClass
from pdserve.core.worker import Role
from router.core import events as ev
from router.core.live_request import LiveRequest
from router.core.queue_limits import CLASS_SHARE, CLIENT_SHARE, MAX_SHED, QueueLimits
from router.core.request_machine import RequestState

from ..core_peers import Stage

HIGH, LOW = SloClass("high", priority=5), SloClass("low", priority=-5)
CLASSES = (DEFAULT_CLASS, HIGH, LOW, SloClass("half", queue_share=0.5), SloClass("tenth", priority=-5, queue_share=0.1))
MAX_REQUESTS, MAX_TOKENS = 8, 60


class LimitsMachine(RuleBasedStateMachine):
    """The limits beside a list of what waits, over which every rule is computed anew."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = QueueLimits(max_requests=MAX_REQUESTS, max_tokens=MAX_TOKENS)
        self.waiting: list[LiveRequest] = []
        self.arrivals = 0

    def make(self, slo: SloClass, tokens: int) -> LiveRequest:
        spec = RequestSpec((0,) * tokens, SamplingParams(max_tokens=1))
        self.arrivals += 1
        return LiveRequest.of(ev.Submit(RequestId(f"r{self.arrivals}"), spec, 0.0, 9.0, slo=slo), self.arrivals)

    def new(self, slo: SloClass | None = None) -> list[LiveRequest]:
        return [r for r in self.waiting if not r.replay and slo in (None, r.slo)]

    def may_wait(self, slo: SloClass, tokens: int, gone: list[LiveRequest]) -> bool:
        """Tell from the list alone whether the whole queue has room without the requests that are gone."""
        left = [r for r in self.new() if r not in gone]
        return len(left) < MAX_REQUESTS and (not left or tokens + tokens_of(left) <= MAX_TOKENS)

    def within_share(self, slo: SloClass, tokens: int) -> bool:
        own = self.new(slo)
        return (not own or tokens + tokens_of(own) <= MAX_TOKENS * slo.queue_share) and len(own) < max(
            1, int(MAX_REQUESTS * slo.queue_share)
        )

    @rule(slo=st.sampled_from(CLASSES), tokens=st.integers(1, 70))
    def arrive(self, slo: SloClass, tokens: int) -> None:
        request = self.make(slo, tokens)
        below = sorted((r for r in self.new() if r.slo.priority < slo.priority), key=lambda r: (r.slo.priority, -r.arrival))
        fewest = next((n for n in range(len(below) + 1) if self.may_wait(slo, tokens, below[:n])), None)
        inside = slo.queue_share == 1.0 or self.within_share(slo, tokens)
        if fewest is None or not inside:
            with pytest.raises(Overloaded) as refused:
                self.limits.make_room(slo, tokens, now_s=0.0)
            assert (refused.value.reason == CLASS_SHARE) is not inside
            self.limits.check_invariants(self.waiting)
            return
        shed = self.limits.make_room(slo, tokens, now_s=0.0)
        assert shed == below[:fewest]
        assert not any(r.replay for r in shed)
        for gone in shed:
            self.limits.remove(gone)
            self.waiting.remove(gone)
        self.limits.add(request)
        self.waiting.append(request)
        assert len(self.new()) <= MAX_REQUESTS
        for one in CLASSES:
            assert len(self.new(one)) <= max(1, MAX_REQUESTS * one.queue_share)
            assert len(self.new(one)) <= 1 or tokens_of(self.new(one)) <= MAX_TOKENS * one.queue_share

    @precondition(lambda self: self.waiting)
    @rule(pick=st.integers(0, 99), back=st.booleans(), replay=st.booleans())
    def leave(self, pick: int, back: bool, replay: bool) -> None:
        """A request is bound, and perhaps comes back: in the same attempt, or as a replay."""
        request = self.waiting[pick % len(self.waiting)]
        self.limits.remove(request)
        self.waiting.remove(request)
        if back and (replay or self.may_wait(request.slo, len(request.spec.prompt_ids), [])):
            request.machine.attempt += replay
            self.limits.add(request)
            self.waiting.append(request)
        self.limits.check_invariants(self.waiting)


LimitsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLimits = LimitsMachine.TestCase


def tokens_of(requests: list[LiveRequest]) -> int:
    return sum(len(r.spec.prompt_ids) for r in requests)


def test_a_class_at_its_share_leaves_the_rest_to_the_others() -> None:
    machine = LimitsMachine()
    half, other = CLASSES[3], DEFAULT_CLASS
    for _ in range(20):
        machine.arrive(half, 1)
    for _ in range(20):
        machine.arrive(other, 1)
    assert (len(machine.new(half)), len(machine.new(other))) == (4, 4)


def test_one_request_ends_a_bounded_number_of_others() -> None:
    limits = QueueLimits(max_requests=100, max_tokens=100)
    machine = LimitsMachine()
    for _ in range(100):
        limits.add(machine.make(LOW, 1))
    assert len(limits.make_room(HIGH, MAX_SHED, now_s=0.0)) == MAX_SHED
    with pytest.raises(Overloaded, match="100 requests with 100 prompt tokens are waiting"):
        limits.make_room(HIGH, MAX_SHED + 1, now_s=0.0)


def test_a_shed_request_fails_with_both_classes_named_and_its_story_says_so() -> None:
    stage = Stage(max_queued_requests=2)
    stage.join("decode-0", Role.DECODE, max_num_seqs=1)
    running = stage.submit("running", slo=LOW)
    first, second = stage.submit("first", slo=LOW), stage.submit("second")
    high = stage.submit("high", slo=HIGH)
    assert (first.ended, second.ended, running.ended) == (["overloaded"], [], [])
    assert isinstance(first.error, Overloaded)
    assert first.error.reason == "shed"
    assert first.error.retry_after_s > 0
    assert "class 'high' came: its priority is 5, and that of class 'low' is -5" in first.error.message
    kinds = [entry.kind for entry in stage.core.stories_of("first")[0].entries]
    assert kinds[-2:] == ["shed", "ended"]
    assert stage.core.stories_of("first")[0].outcome is RequestState.FAILED
    with pytest.raises(Overloaded, match="at most 2 requests"):
        stage.submit("late", slo=DEFAULT_CLASS)
    stage.run()
    assert (second.ended, high.ended, running.ended) == (["done"], ["done"], ["done"])
    stage.assert_empty()


@pytest.mark.parametrize("first_s", [None, 0.5, 2.0])
def test_a_report_says_whether_the_targets_were_met(first_s: float | None) -> None:
    """A request that fails without a token has missed both targets; one that is cancelled in time has missed none."""
    slo = SloClass("mine", ttft_s=1.0, tpot_s=0.5)
    for cancelled in (True, False):
        stage = Stage()
        peer = stage.join("decode-0", Role.DECODE)
        outcome = stage.submit("r", slo=slo, deadline_s=9.0, max_tokens=2)
        stage.deliver(peer)
        if first_s is not None:
            stage.now_s = first_s
            peer.progress()
            stage.deliver(peer)
        if cancelled:
            stage.tell(ev.ClientGone(RequestId("r")))
        else:
            stage.now_s = 9.5
            stage.heartbeat(peer)
            stage.tell(ev.Tick())
        report = outcome.report
        assert report is not None
        assert report.slo_class == "mine"
        assert report.ttft_met is {None: None if cancelled else False, 0.5: True, 2.0: False}[first_s]
        assert report.tpot_met is (None if cancelled else False)


def test_a_finished_request_without_targets_has_missed_none() -> None:
    for slo, met in ((DEFAULT_CLASS, (None, None)), (SloClass("mine", ttft_s=1.0, tpot_s=0.5), (True, True))):
        stage = Stage()
        stage.join("decode-0", Role.DECODE)
        outcome = stage.submit("r", slo=slo, max_tokens=1)
        stage.run()
        assert outcome.report is not None
        assert (outcome.report.ttft_met, outcome.report.tpot_met) == met


# Clients -----------------------------------------------------------------------------------------------------------------


class ClientQueue:
    """The production limits, and what they let wait."""

    def __init__(self, client_share: float = 1.0) -> None:
        self.limits = QueueLimits(max_requests=8, max_tokens=80, client_share=client_share)
        self.waiting: list[LiveRequest] = []
        self.came = 0

    def come(self, *client: str, tokens: int = 1, slo: SloClass = DEFAULT_CLASS) -> list[LiveRequest]:
        """Let a request come. Return what was shed for it."""
        self.came += 1
        spec = RequestSpec((0,) * tokens, SamplingParams(max_tokens=1))
        submit = ev.Submit(RequestId(f"r{self.came}"), spec, 0.0, 9.0, slo=slo, client=client)
        shed = self.limits.make_room(slo, tokens, now_s=0.0, client=client)
        for gone in shed:
            self.limits.remove(gone)
            self.waiting.remove(gone)
        self.waiting.append(LiveRequest.of(submit, self.came))
        self.limits.add(self.waiting[-1])
        self.limits.check_invariants(self.waiting)
        return shed

    def counts(self, level: int = 0) -> dict[str, int]:
        return dict(Counter(one.client[level] for one in self.waiting))


def test_the_client_that_has_most_gives_way_until_shares_are_equal() -> None:
    queue = ClientQueue()
    for _ in range(8):
        queue.come("a")
    youngest = queue.waiting[-1]
    assert queue.come("b") == [youngest]
    for _ in range(3):
        assert [one.client for one in queue.come("b")] == [("a",)]
    assert queue.counts() == {"a": 4, "b": 4}
    for client in "ab":
        with pytest.raises(Overloaded):
            queue.come(client)
    assert [one.client[0] in "ab" for one in queue.come("c")] == [True]


def test_connections_and_calls_of_one_client_give_way_to_each_other() -> None:
    queue = ClientQueue()
    for _ in range(8):
        queue.come("a", "1", "x")
    assert [one.client for one in queue.come("a", "2", "y")] == [("a", "1", "x")]
    assert [one.client for one in queue.come("a", "1", "z")] == [("a", "1", "x")]
    assert queue.counts(2) == {"x": 6, "y": 1, "z": 1}


def test_tokens_count_as_requests_do() -> None:
    queue = ClientQueue()
    queue.come("a", tokens=75)
    queue.come("a", tokens=5)
    assert [len(one.spec.prompt_ids) for one in queue.come("b", tokens=5)] == [5]
    with pytest.raises(Overloaded):  # it would have more than what "a" has left
        queue.come("b", tokens=76)


def test_a_client_does_not_drive_out_a_class_of_higher_priority_nor_one_that_is_not_known() -> None:
    queue = ClientQueue()
    for _ in range(8):
        queue.come("a", slo=HIGH)
    with pytest.raises(Overloaded):
        queue.come("b")
    queue = ClientQueue()
    for _ in range(8):
        queue.come()
    with pytest.raises(Overloaded):
        queue.come("b")


def test_a_client_may_fill_its_share() -> None:
    queue = ClientQueue(client_share=0.25)
    queue.come("a"), queue.come("a", "other connection")
    with pytest.raises(Overloaded, match=r"2 requests of this client .* at most 2 requests and 20 tokens of one") as refused:
        queue.come("a")
    assert refused.value.reason == CLIENT_SHARE
    queue.come("b", tokens=60)
    with pytest.raises(Overloaded):
        queue.come("b")
    for _ in range(3):
        queue.come()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("12"), st.integers(1, 40)), max_size=60))
def test_shedding_between_clients_ends(comes: list[tuple[str, str, int]]) -> None:
    """Who was admitted by driving another out is not driven out by the same request again, so two clients cannot go on for
    ever."""
    queue = ClientQueue()
    for client, connection, tokens in comes:
        with contextlib.suppress(Overloaded):
            shed = queue.come(client, connection, tokens=tokens)
            assert len(shed) <= MAX_SHED
            for one in shed:
                with contextlib.suppress(Overloaded):
                    again = queue.limits.make_room(DEFAULT_CLASS, len(one.spec.prompt_ids), now_s=0.0, client=one.client)
                    assert queue.waiting[-1] not in again
