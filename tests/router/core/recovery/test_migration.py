"""A worker that drains or flips is empty soon, whatever its answers' lengths, and a request pays with nothing but time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdserve.core.worker import Role
from router.core import events as ev
from router.core import migration
from router.core.live_request import LiveRequest, StoryKind
from router.core.migration import FINISH_TOKENS, MOVES_EACH, Migration
from router.core.placer import Placer
from router.core.registry import Worker
from router.core.request_machine import RequestEvent, RequestState
from tests.router.core_peers import Outcome, Peer, Stage

LONG = 200
NOTHING_LEFT = {"max_attempts": 1, "retry_burst": 0, "retry_share": 0.0}


def join(stage: Stage, name: str, seqs: int, role: Role = Role.DECODE) -> Peer:
    return stage.join(name, role, max_num_seqs=seqs, num_blocks=1 << 14, max_model_len=1024)


def step(stage: Stage, tick: bool = True) -> None:
    for peer in list(stage.peers.values()):
        peer.progress()
        stage.deliver(peer, len(peer.upward))
    if tick:
        stage.now_s += 0.1
        for peer in list(stage.peers.values()):
            stage.heartbeat(peer, free=1 << 14)
        stage.tell(ev.Tick())


def running(count: int, slots: tuple[int, ...], *, prefill: int = 0, tokens: int = LONG) -> tuple[Stage, list[Outcome]]:
    """Requests that decode on workers with so many slots each, in a cluster in which nobody may retry anything."""
    stage = Stage(**NOTHING_LEFT)
    for n in range(prefill):
        join(stage, f"prefill-{n}", 64, Role.PREFILL)
    for n, seqs in enumerate(slots):
        join(stage, f"decode-{n}", seqs)
    outcomes = [stage.submit(f"r{n}", max_tokens=tokens, deadline_s=1e6) for n in range(count)]
    for _ in range(6):
        step(stage)
    return stage, outcomes


def finish(stage: Stage, outcomes: list[Outcome], tokens: int = LONG) -> None:
    for _ in range(tokens * (len(outcomes) + 3)):  # as long as if one worker served one after the other
        if all(o.ended for o in outcomes):
            break
        step(stage)
    stage.run()
    assert {tuple(o.ended) for o in outcomes} <= {("done",)}
    for outcome in outcomes:
        assert outcome.emitted == list(range(tokens))
        assert outcome.report is not None
        assert outcome.report.attempts == 1
    assert stage.core.recovery.bucket.taken == 0
    stage.assert_empty()


def named(stage: Stage, name: str = "decode-0") -> Peer:
    return next(p for p in stage.peers.values() if p.hello.worker_id == name)


def drain(stage: Stage, name: str = "decode-0", flip: bool = False) -> Peer:
    peer = named(stage, name)
    stage.tell(ev.FlipAsked(peer.hello.worker_id, Role.PREFILL) if flip else ev.DrainAsked(peer.hello.worker_id))
    return peer


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("prefill", [0, 1])
def test_a_draining_worker_is_empty_after_a_few_steps_of_long_answers(prefill: int, flip: bool) -> None:
    stage, outcomes = running(16, (8, 32), prefill=prefill)
    held = len(named(stage).jobs)
    assert held
    peer = drain(stage, flip=flip)
    steps = 0
    while peer.jobs:
        step(stage)
        steps += 1
        assert steps < 30, "it waits for its answers"
    finish(stage, outcomes)
    assert sum(o.report.migrations for o in outcomes if o.report) == held


def test_what_has_no_room_elsewhere_is_served_where_it_is() -> None:
    """No stream stands: each gets a token in each step, on the old worker as long as there is no room on another one."""
    stage, outcomes = running(8, (4, 4))
    peer = drain(stage)
    held = len(peer.jobs)
    for _ in range(5):
        before = [len(o.emitted) for o in outcomes]
        step(stage)
        assert [len(o.emitted) for o in outcomes] == [n + 1 for n in before]
    assert len(peer.jobs) == held
    finish(stage, outcomes)


def test_few_requests_wait_for_a_token_at_a_time() -> None:
    stage, outcomes = running(64, (64, 256))
    peer = drain(stage)
    assert len(peer.jobs) > 2 * MOVES_EACH
    while peer.jobs:
        before = sum(len(o.emitted) for o in outcomes)
        step(stage)
        assert sum(len(o.emitted) for o in outcomes) >= before + 64 - 2 * MOVES_EACH
    finish(stage, outcomes)


def test_room_that_opens_goes_to_who_must_leave_before_it_goes_to_the_queue() -> None:
    stage, outcomes = running(8, (4, 4))
    waiting = [stage.submit(f"w{n}", max_tokens=LONG, deadline_s=1e6) for n in range(3)]
    drain(stage)
    other = named(stage, "decode-1")
    stage.tell(ev.ClientGone(stage.placed[next(iter(other.jobs))][0]))
    assert not any(o.emitted for o in waiting)
    step(stage)
    assert sum(r.migrations for r in stage.core.requests.of_clients()) == 1
    finish(stage, [o for o in [*outcomes, *waiting] if o.ended != ["cancelled"]])


def test_who_has_few_tokens_left_ends_where_it_is() -> None:
    stage, outcomes = running(4, (4, 8), tokens=FINISH_TOKENS + 2)
    drain(stage)
    finish(stage, outcomes, tokens=FINISH_TOKENS + 2)
    assert all(o.report is not None and not o.report.migrations for o in outcomes)


def test_a_story_tells_that_a_request_was_moved() -> None:
    stage, outcomes = running(4, (4, 8))
    drain(stage)
    finish(stage, outcomes)
    moved = [e for s in stage.core.requests.stories for e in s.entries if e.kind == StoryKind.MIGRATED.value]
    assert moved
    assert {dict(e.fields)["worker"] for e in moved} == {"decode-0"}


def test_a_late_token_of_the_old_worker_reaches_nobody() -> None:
    stage, outcomes = running(2, (2, 4))
    peer = named(stage)
    peer.progress()  # its tokens are under way as it is told to cancel
    late = list(peer.upward)
    drain(stage)
    step(stage)
    for event in late:
        stage.tell(event)
    finish(stage, outcomes)


# Prompts that are not computed yet --------------------------------------------------------------------------------------


def prompts(count: int, *, prefill: int = 2, seqs: int = 8, decode: int = 1, **config: object) -> tuple[Stage, list[Outcome]]:
    """Requests whose prompts prefill workers have begun to compute, in a cluster in which nobody may retry anything."""
    stage = Stage(**NOTHING_LEFT, **config)
    for n in range(prefill):
        join(stage, f"prefill-{n}", 64, Role.PREFILL)
    for n in range(decode):
        join(stage, f"decode-{n}", seqs)
    outcomes = [stage.submit(f"r{n}", max_tokens=20, deadline_s=1e6) for n in range(count)]
    for _ in range(3):  # Reserved, and PrefillStarted; no engine makes a step
        for peer in list(stage.peers.values()):
            stage.deliver(peer, len(peer.upward))
    assert {r.machine.state for r in stage.core.requests.of_clients() if r.decode} == {RequestState.PREFILLING}
    return stage, outcomes


@pytest.mark.parametrize("flip", [False, True])
def test_prompts_of_a_draining_prefill_worker_are_computed_elsewhere_also_where_no_slot_is_free(flip: bool) -> None:
    stage, outcomes = prompts(12, seqs=8)
    peer = named(stage, "prefill-0")
    held = len(peer.jobs)
    assert held
    assert len(stage.core.waiting) == 4
    stage.tell(ev.FlipAsked(peer.hello.worker_id, Role.DECODE) if flip else ev.DrainAsked(peer.hello.worker_id))
    assert not peer.jobs, "it computes prompts to their ends"
    assert len(stage.core.waiting) == 4, "others got the room of those that moved"
    finish(stage, outcomes, tokens=20)
    assert sum(o.report.migrations for o in outcomes if o.report) == held


def test_a_prompt_whose_room_an_earlier_turn_has_claimed_waits_for_its_next_turn() -> None:
    stage, outcomes = prompts(4, seqs=4)
    outcomes.append(stage.submit("first", max_tokens=20, deadline_s=1e6, priority=100))
    drain(stage, "prefill-0")
    waits = [r.request_id for r in stage.core.waiting.all()]
    assert len(waits) == 1
    assert waits != ["first"]
    finish(stage, outcomes, tokens=20)


def test_prompts_of_a_draining_decode_worker_move_as_far_as_there_is_room() -> None:
    stage, outcomes = prompts(8, seqs=6, decode=2)
    peer = named(stage)
    assert len(peer.jobs) == 4
    drain(stage)
    assert len(peer.jobs) == 2
    finish(stage, outcomes, tokens=20)


@pytest.mark.parametrize("placement", ["auto", "disaggregated"])
def test_prompts_of_the_last_prefill_worker_are_computed_where_they_decode_or_to_their_ends(placement: str) -> None:
    stage, outcomes = prompts(4, prefill=1, placement=placement)
    peer = drain(stage, "prefill-0")
    assert len(peer.jobs) == (0 if placement == "auto" else 4)
    finish(stage, outcomes, tokens=20)


# Properties and mutants ------------------------------------------------------------------------------------------------


@given(
    count=st.integers(1, 10),
    slots=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    prefill=st.integers(0, 2),
    drains=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.booleans()), min_size=1, max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_drains_lose_nothing(count: int, slots: list[int], prefill: int, drains: list[tuple[int, int, bool]]) -> None:
    """Any workers but the last one that decodes drain at any time; some end once they are empty. A client sees the undisturbed
    tokens."""
    stage, outcomes = running(count, tuple(slots), prefill=prefill, tokens=40)
    outcomes += [stage.submit(f"late{n}", max_tokens=40, deadline_s=1e6) for n in range(count)]
    for which, steps, _ in drains:
        serving = [p for p in stage.peers.values() if not p.draining]
        if sum(p.hello.role is Role.DECODE for p in serving) == 1:
            serving = [p for p in serving if p.hello.role is Role.PREFILL]
        if serving:
            drain(stage, serving[which % len(serving)].hello.worker_id)
        for _ in range(steps):
            step(stage)
            waiting = sum(len(o.emitted) == len(r.resumed) for o, r in _moved(stage))
            assert waiting <= MOVES_EACH * len(slots)
        for peer in [p for p in stage.peers.values() if p.draining and not p.jobs and not p.upward]:
            stage.leave(peer)
    finish(stage, outcomes, tokens=40)


def _moved(stage: Stage) -> list[tuple[Outcome, Any]]:
    return [(stage.outcomes[r.request_id], r) for r in stage.core.requests.of_clients() if r.migrations and r.resumed]


def _takes_an_attempt(patch: pytest.MonkeyPatch) -> None:
    from router.core import request_machine

    patch.setitem(request_machine.TRANSITIONS, (RequestState.DECODING, RequestEvent.MIGRATED), RequestState.QUEUED)
    real = request_machine.RequestMachine.move

    def move(self: Any, event: RequestEvent) -> RequestState:
        return real(self, RequestEvent.RETRIED if event is RequestEvent.MIGRATED else event)

    patch.setattr(request_machine.RequestMachine, "move", move)


def _all_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(migration, "MOVES_EACH", 1 << 20)


def _into_the_queue(patch: pytest.MonkeyPatch) -> None:
    def move(self: Any, request: Any, worker: Any, now_s: float) -> Any:
        request.machine.move(RequestEvent.MIGRATED)
        request.migrations += 1
        yield from self._requests.withdraw(request)
        request.start_over()
        self._requests.wait(request)
        return True

    patch.setattr(Migration, "_migrate", move)


def _not_at_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Migration, "look", lambda self: None)


def _prompts_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Migration, "_compute_elsewhere", lambda self, request, worker, now_s: iter(()))


def _without_their_room(patch: pytest.MonkeyPatch) -> None:
    real = Placer.place

    def place(self: Any, request: Any, **more: Any) -> Any:
        return None if request.migrations else real(self, request, **more)

    patch.setattr(Placer, "place", place)


def _after_the_queue(patch: pytest.MonkeyPatch) -> None:
    real = Migration.migrate

    def move(self: Any, now_s: float) -> Any:
        if not len(self._requests.waiting):
            yield from real(self, now_s)

    patch.setattr(Migration, "migrate", move)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (_takes_an_attempt, lambda: test_a_draining_worker_is_empty_after_a_few_steps_of_long_answers(0, False)),
        (_all_at_once, test_few_requests_wait_for_a_token_at_a_time),
        (_into_the_queue, test_what_has_no_room_elsewhere_is_served_where_it_is),
        (_not_at_all, lambda: test_a_draining_worker_is_empty_after_a_few_steps_of_long_answers(0, False)),
        (_after_the_queue, test_room_that_opens_goes_to_who_must_leave_before_it_goes_to_the_queue),
        (
            _prompts_stay,
            lambda: test_prompts_of_a_draining_prefill_worker_are_computed_elsewhere_also_where_no_slot_is_free(False),
        ),
        (
            _without_their_room,
            lambda: test_prompts_of_a_draining_prefill_worker_are_computed_elsewhere_also_where_no_slot_is_free(False),
        ),
    ],
)
def test_these_tests_find(
    mutant: Callable[[pytest.MonkeyPatch], None], test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test()


def test_an_event_looks_at_a_few_requests_however_many_workers_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has room. Each worker's requests are looked at in turn."""
    stage, outcomes = running(120, (30, 30, 30, 30))
    looked: list[tuple[float, str]] = []
    real = Migration._migrate

    def migrate(self: Migration, request: LiveRequest, worker: Worker, now_s: float) -> Any:
        looked.append((now_s, worker.hello.worker_id))
        return real(self, request, worker, now_s)

    monkeypatch.setattr(Migration, "_migrate", migrate)
    for n in range(3):
        drain(stage, f"decode-{n}")
    looked.clear()
    for _ in range(6):
        before = len(looked)
        stage.now_s += 0.1
        stage.tell(ev.Tick())
        assert 0 < len(looked) - before <= 2 * migration.MAX_LOOKS, "a tick migrates twice"
    assert {name for _, name in looked} == {"decode-0", "decode-1", "decode-2"}
    finish(stage, outcomes)
