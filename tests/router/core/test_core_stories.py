"""Single paths through RouterCore, in the order in which they happen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.core.errors import DeadlineExceeded, InternalBug, Overloaded, Unavailable
from pdserve.core.ids import Handle, Incarnation, LeaseId, RequestId
from pdserve.core.kv_layout import Shortage
from pdserve.core.sampling import Placement
from pdserve.core.slo import ClassDemand, SloClass
from pdserve.core.worker import Role
from router.core import events as ev
from router.core.request_machine import LIVE, TERMINAL, TRANSITIONS, RequestEvent, RequestMachine, RequestState
from router.core.waiting import LEVEL_S

from ..core_peers import Stage, row


def pools(**config: object) -> Stage:
    stage = Stage(**config)
    stage.join("prefill-0", Role.PREFILL)
    stage.join("decode-0", Role.DECODE)
    return stage


def sent(stage: Stage, kind: type) -> list:
    return [e for e in stage.effects if isinstance(e, kind)]


def test_the_table_reaches_every_state_and_leaves_no_terminal_one() -> None:
    assert set(TRANSITIONS.values()) | {RequestState.QUEUED} == set(RequestState)
    assert not [key for key in TRANSITIONS if key[0] in TERMINAL]
    for state in LIVE:
        for event in (RequestEvent.CLIENT_GONE, RequestEvent.DEADLINE_PASSED, RequestEvent.BROKEN):
            assert TRANSITIONS[state, event] in TERMINAL


def test_an_illegal_event_raises_with_the_history_and_changes_nothing() -> None:
    machine = RequestMachine(RequestId("r"))
    machine.move(RequestEvent.DECODE_PICKED)
    with pytest.raises(Exception, match=r"STOPPED is illegal in BINDING; history: DECODE_PICKED:BINDING"):
        machine.move(RequestEvent.STOPPED)
    assert machine.state is RequestState.BINDING
    assert (machine.attempt, machine.bind) == (1, 1)


@pytest.mark.parametrize(
    ("why", "event"),
    [
        ("RESERVED is illegal in ATTACHED", lambda p, d: ev.Reserved(*d)),
        ("NO_ROOM is illegal in ATTACHED", lambda p, d: ev.NoRoom(*d, 1)),
        ("PREFILL_STARTED is illegal in LENDING", lambda p, d: ev.PrefillStarted(*p, LeaseId(Incarnation(1), 1), b"")),
        ("a prefill worker sent what only a decode worker reports", lambda p, d: ev.KvCommitted(*p, 1, 0.0, 0.0, 0.0)),
        (
            "a decode worker sent what only a prefill worker",
            lambda p, d: ev.PrefillStarted(*d, LeaseId(Incarnation(1), 1), b""),
        ),
    ],
)
def test_a_report_that_the_work_does_not_allow_fails_the_request_with_its_history(
    why: str, event: Callable[..., ev.Event]
) -> None:
    """(1) Decode has reserved, prefill has started, decode is attached. (2) One of the two says what it cannot mean."""
    stage = pools()
    prefill, decode = stage.peers.values()
    outcome = stage.submit("r")
    stage.deliver(decode)
    stage.deliver(prefill)
    stage.tell(event((prefill.link, *prefill.jobs), (decode.link, *decode.jobs)))
    assert outcome.ended == ["internal_bug"]
    assert why in str(outcome.error)
    stage.assert_empty()


def test_kv_is_not_committed_without_an_attach_nor_twice() -> None:
    for reports in (1, 3):
        stage = pools()
        prefill, decode = stage.peers.values()
        outcome = stage.submit("r", max_tokens=4)
        stage.deliver(decode)
        if reports == 3:
            stage.deliver(prefill)
        for _ in range(min(reports, 2)):
            assert not outcome.ended
            stage.tell(ev.KvCommitted(decode.link, *decode.jobs, 1, 0.0, 0.0, 0.0))
        assert outcome.ended == ["internal_bug"]
        assert "KV_COMMITTED is illegal in " + ("COMMITTED" if reports == 3 else "RESERVED") in str(outcome.error)
        stage.assert_empty()


def test_a_first_token_without_a_lease_fails_its_request() -> None:
    stage = pools()
    prefill, decode = stage.peers.values()
    outcome = stage.submit("r")
    stage.deliver(decode)
    stage.tell(ev.StepRows(prefill.link, [row(*prefill.jobs, 0)]))
    assert "FIRST_TOKEN is illegal in SENT" in str(outcome.error)
    stage.assert_empty()


def test_token_1_may_arrive_before_token_0_and_is_held() -> None:
    """(1) Decode commits and decodes. (2) The router hears decode first, then prefill."""
    stage = pools()
    prefill, decode = stage.peers.values()
    outcome = stage.submit("r", max_tokens=4)
    stage.deliver(decode)  # reserved
    stage.deliver(prefill)  # started, so decode is attached
    for _ in range(5):
        decode.progress()
    stage.deliver(decode, 10)
    assert outcome.emitted == []
    prefill.progress()
    stage.deliver(prefill)
    assert outcome.emitted == [0, 1, 2, 3]
    assert outcome.ended == ["done"]
    stage.assert_empty()


def test_nothing_of_decode_goes_out_before_its_kv_is_committed() -> None:
    stage = pools()
    prefill, decode = stage.peers.values()
    outcome = stage.submit("r", max_tokens=4)
    stage.deliver(decode)
    stage.deliver(prefill)
    prefill.progress()
    stage.deliver(prefill)  # token 0: HANDOFF
    (handle,) = decode.jobs
    stage.tell(ev.StepRows(decode.link, [row(handle, 1)]))
    assert outcome.emitted == [0]
    assert outcome.ended == ["internal_bug"]
    stage.assert_empty()


def test_the_queue_is_by_priority_then_arrival_and_bounded() -> None:
    stage = Stage(max_queued_requests=3)
    decode = stage.join("decode-0", Role.DECODE, max_num_seqs=1)
    stage.submit("first", max_tokens=2)
    for name, priority in (("low", -1), ("a", 0), ("high", 5)):
        stage.submit(name, max_tokens=2, priority=priority)
    with pytest.raises(Overloaded) as caught:
        stage.submit("over", max_tokens=2)
    assert caught.value.retry_after_s > 0
    stage.run()
    assert [stage.request_of(e) for e in sent(stage, ev.SendBind)] == ["first", "high", "a", "low"]
    assert decode.link
    stage.assert_empty()


@pytest.mark.parametrize(("priority", "levels"), [(0, 5), (4, 1), (-5, 10)])
def test_a_small_priority_waits_no_longer_than_the_difference_is_worth(priority: int, levels: int) -> None:
    """One slot, a second for each request, and always somebody of priority 5 who waits."""
    stage = Stage(max_queued_requests=100)
    decode = stage.join("decode-0", Role.DECODE, max_num_seqs=1)
    stage.submit("first", deadline_s=1e6, priority=5)
    low = stage.submit("low", deadline_s=1e6, priority=priority)
    seconds = 0
    while not low.ended:
        while len(stage.core.waiting) < 4:
            stage.submit(f"r{len(stage.outcomes)}", deadline_s=1e6, priority=5)
        for _ in range(3):
            decode.progress()
            stage.deliver(decode, 9)
        seconds += 1
        stage.now_s += 1.0
        stage.heartbeat(decode)
        assert seconds <= levels * LEVEL_S + 8
    assert seconds >= levels * LEVEL_S, "a larger priority is worth something"


def test_the_queue_is_bounded_by_tokens_too() -> None:
    stage = Stage(max_queued_tokens=50)
    stage.join("decode-0", Role.DECODE, max_num_seqs=1)
    stage.submit("first", prompt_len=40, max_tokens=2)
    stage.submit("second", prompt_len=40, max_tokens=2)
    with pytest.raises(Overloaded, match="50 tokens"):
        stage.submit("third", prompt_len=40, max_tokens=2)


def test_the_ledger_keeps_what_would_not_fit_in_the_queue() -> None:
    """Two of 40 tokens do not fit a pool of 64: the second is bound when the first is done."""
    stage = Stage()
    stage.join("decode-0", Role.DECODE)
    stage.submit("first", prompt_len=35, max_tokens=5)
    stage.submit("second", prompt_len=35, max_tokens=5)
    assert [stage.request_of(e) for e in sent(stage, ev.SendBind)] == ["first"]
    stage.run()
    assert [stage.request_of(e) for e in sent(stage, ev.SendBind)] == ["first", "second"]
    stage.assert_empty()


@pytest.mark.parametrize(("held", "bound"), [(24, ["first", "second"]), (0, ["first"])])
def test_the_ledger_charges_a_request_no_more_than_the_windows_of_its_layers_hold(held: int, bound: list[str]) -> None:
    """Two requests of 300 tokens go to a pool of 64, if each holds at most 24 of them at once. One of two workers that does not
    say so counts for both."""
    stage = Stage()
    decode = stage.join("decode-0", Role.DECODE, max_model_len=400, held_tokens=24)
    other = stage.join("decode-1", Role.DECODE, max_model_len=100, held_tokens=held)
    stage.submit("first", prompt_len=290, max_tokens=5)
    stage.submit("second", prompt_len=290, max_tokens=5)
    assert [stage.request_of(e) for e in sent(stage, ev.SendBind)] == bound
    assert {e.link for e in sent(stage, ev.SendBind)} == {decode.link}
    stage.leave(other)
    stage.run()
    assert [outcome.ended for outcome in stage.outcomes.values()] == [["done"], ["done"]]
    stage.assert_empty()


def test_after_no_room_a_worker_is_asked_again_when_it_shows_room() -> None:
    stage = Stage()
    decode = stage.join("decode-0", Role.DECODE)
    decode.refuse = 1
    outcome = stage.submit("r", max_tokens=2)
    stage.deliver(decode)
    assert len(sent(stage, ev.SendBind)) == 1
    stage.heartbeat(decode, free=0)
    assert len(sent(stage, ev.SendBind)) == 1
    stage.heartbeat(decode, free=16)
    assert len(sent(stage, ev.SendBind)) == 2
    stage.run()
    assert outcome.report is not None
    assert outcome.report.binds == 2
    stage.assert_empty()


def test_a_request_that_times_out_without_room_says_which_kv_group_lacked_it() -> None:
    """(1) The only decode worker names its full group. (2) The story of the request has it, and so has its last error. (3) A
    request that got room later fails without it."""
    stage = Stage()
    decode = stage.join("decode-0", Role.DECODE)
    outcome, later = stage.submit("r", deadline_s=3.0), stage.submit("later", deadline_s=3.0)
    for bind in sent(stage, ev.SendBind):
        decode.upward.clear()
        decode.jobs.clear()
        stage.tell(ev.NoRoom(decode.link, bind.work.handle, 9, Shortage(1, 70, 12, window=1024)))
    said = "KV group 1 (a window of 1,024 tokens) needs 70 blocks and has 12"
    story = stage.core.stories_of("r")[0]
    assert dict(next(entry for entry in story.entries if entry.kind == "no_room").fields)["shortage"] == said
    stage.heartbeat(decode, free=16)
    binds = {stage.request_of(bind): bind.work.handle for bind in sent(stage, ev.SendBind)}
    stage.tell(ev.Reserved(decode.link, binds[RequestId("later")]))
    stage.now_s = 3.5
    stage.tell(ev.Tick())
    assert str(outcome.error) == f"deadline_s of 3 s passed while binding; decode-0 has no room: {said}"
    assert isinstance(later.error, DeadlineExceeded)
    assert "room" not in str(later.error)


def test_a_prefill_pool_that_empties_during_the_bind_leads_to_colocation() -> None:
    stage = pools()
    prefill, decode = stage.peers.values()
    outcome = stage.submit("auto", max_tokens=3)
    forced = stage.submit("forced", max_tokens=3, placement=Placement.DISAGGREGATED)
    stage.leave(prefill)
    stage.deliver(decode, 2)
    stage.run()
    assert outcome.emitted == [0, 1, 2]
    assert outcome.report is not None
    assert outcome.report.placement_reason == "prefill_pool_empty"
    assert not forced.ended, "it waits for a prefill worker to come back, and holds nobody up"
    stage.join("prefill-0", Role.PREFILL)
    stage.run()
    assert forced.emitted == [0, 1, 2]
    stage.assert_empty()


def test_what_was_admitted_waits_for_a_worker_to_come_back_but_not_for_ever() -> None:
    stage = Stage(recovery_wait_s=3.0)
    decode = stage.join("decode-0", Role.DECODE, max_num_seqs=1)
    first, second = stage.submit("first"), stage.submit("second")
    stage.leave(decode)
    with pytest.raises(Unavailable):
        stage.submit("third")
    stage.now_s += 2.9
    stage.tell(ev.Tick())
    assert (first.ended, second.ended) == ([], [])
    stage.now_s += 0.2
    stage.tell(ev.Tick())
    assert (first.ended, second.ended) == (["unavailable"], ["unavailable"])
    stage.assert_empty()


def test_a_suspect_worker_gets_nothing_new_and_a_silent_one_is_lost() -> None:
    stage = Stage()
    stage.join("decode-0", Role.DECODE)
    stage.now_s = 4.0
    outcome = stage.submit("r")
    assert not sent(stage, ev.SendBind)
    stage.now_s = 5.1
    stage.tell(ev.Tick())
    assert len(sent(stage, ev.CloseLink)) == 1
    stage.join("decode-0", Role.DECODE)
    stage.run()
    assert outcome.ended == ["done"]
    stage.assert_empty()


def test_requests_for_which_there_is_no_worker_are_refused_at_once() -> None:
    stage = Stage()
    with pytest.raises(Unavailable, match="no decode worker"):
        stage.submit("r")
    stage.join("decode-0", Role.DECODE, max_model_len=20)
    with pytest.raises(Unavailable, match="50 tokens"):
        stage.submit("r", prompt_len=40, max_tokens=10)
    with pytest.raises(Unavailable, match="disaggregated"):
        stage.submit("r", placement=Placement.DISAGGREGATED)
    with pytest.raises(DeadlineExceeded):
        stage.submit("r", deadline_s=0.0)
    stage.submit("r")
    with pytest.raises(InternalBug, match="given twice"):
        stage.submit("r")
    assert stage.core.num_requests == 1


def test_many_finished_requests_leave_no_deadlines_behind() -> None:
    stage = Stage()
    stage.join("decode-0", Role.DECODE)
    for n in range(1200):
        stage.submit(f"r{n}", max_tokens=1, deadline_s=1e6)
        stage.run()
    stage.tell(ev.Tick())
    assert len(stage.core.requests.deadlines) <= 1024
    stage.assert_empty()


@pytest.mark.parametrize(
    "rows",
    [
        [(1, [1])],  # a gap at the start is held, not emitted
        [(0, [0]), (0, [0])],  # a repeat is dropped
    ],
)
def test_colocated_rows_are_ordered_too(rows: list[tuple[int, list[int]]]) -> None:
    stage = Stage()
    decode = stage.join("decode-0", Role.DECODE)
    outcome = stage.submit("r", max_tokens=3)
    stage.deliver(decode)
    (handle,) = decode.jobs
    for index, ids in rows:
        stage.tell(ev.StepRows(decode.link, [row(handle, index, ids=ids)]))
    stage.run()
    assert outcome.emitted == [0, 1, 2]
    stage.assert_empty()


@pytest.mark.parametrize(
    ("index", "ids", "text"),
    [(2, [1, 2], b"past max_tokens"), (1, [1], b"\xff\xfe"), (0, [0, 1], b"half emitted")],
)
def test_rows_that_cannot_be_fail_their_request_alone(index: int, ids: list[int], text: bytes) -> None:
    stage = Stage()
    decode = stage.join("decode-0", Role.DECODE)
    bad, good = stage.submit("bad", max_tokens=3), stage.submit("good", max_tokens=3)
    stage.deliver(decode, 2)
    handle = min(decode.jobs)
    stage.tell(ev.StepRows(decode.link, [row(handle, 0)]))
    broken = row(handle, index, ids=ids)
    broken.text = text if text.startswith(b"\xff") else b""
    stage.tell(ev.StepRows(decode.link, [broken, row(max(decode.jobs), 0)]))
    assert bad.ended == ["internal_bug"]
    stage.run()
    assert good.emitted == [0, 1, 2]
    stage.assert_empty()


def test_the_least_loaded_workers_are_picked_and_equals_take_turns() -> None:
    stage = Stage()
    for name in ("prefill-0", "prefill-1"):
        stage.join(name, Role.PREFILL)
    for name in ("decode-0", "decode-1"):
        stage.join(name, Role.DECODE)
    busy = next(iter(stage.peers.values()))
    stage.heartbeat(busy, queued_tokens=1000)
    for n in range(4):
        stage.submit(f"r{n}", prompt_len=4, max_tokens=2)
    for peer in list(stage.peers.values()):
        stage.deliver(peer, 10)
    assert {e.link for e in sent(stage, ev.SendPrefill)} == {ev.LinkId(2)}
    assert sorted(e.link for e in sent(stage, ev.SendBind)) == [3, 3, 4, 4]
    stage.run()
    stage.assert_empty()


def test_idle_decode_workers_take_turns_though_prefill_is_picked_in_between() -> None:
    stage = pools()
    stage.join("decode-1", Role.DECODE)
    for n in range(4):
        stage.submit(f"r{n}")
        stage.run()
    assert [e.link for e in sent(stage, ev.SendBind)] == [2, 3, 2, 3]
    stage.assert_empty()


def test_a_handle_of_another_link_is_stale() -> None:
    stage = pools()
    prefill, decode = stage.peers.values()
    outcome = stage.submit("r")
    (handle,) = decode.jobs
    assert stage.tell(ev.Reserved(prefill.link, handle)) == []
    assert stage.tell(ev.Reserved(decode.link, Handle(999))) == []
    stage.run()
    assert outcome.ended == ["done"]
    stage.assert_empty()


def test_a_client_that_leaves_says_nothing_about_a_target_unless_it_was_missed_before() -> None:
    """(1) One client leaves after its first token, which was in time; (2) another one leaves after waiting for too long."""
    stage = pools()
    tight = SloClass("tight", ttft_s=1.0)
    stage.submit("a", max_tokens=6, slo=tight, placement=Placement.COLOCATED)
    for peer in stage.peers.values():
        peer.progress()
        stage.deliver(peer, 2)
    stage.run(steps=2)
    assert stage.outcomes[RequestId("a")].emitted
    stage.tell(ev.ClientGone(RequestId("a")))
    before = stage.core.demand(now_s=stage.now_s, uptime_s=0.0)
    assert (before.requests, before.ttft_met, before.ttft_missed) == (1, 0, 0)
    stage.submit("b", slo=tight)
    stage.now_s += 2.0
    stage.tell(ev.ClientGone(RequestId("b")))
    after = stage.core.demand(now_s=stage.now_s, uptime_s=0.0)
    assert (after.ttft_met, after.ttft_missed, after.output_tokens) == (0, 1, before.output_tokens)
    assert after.of_class("tight") == ClassDemand("tight", ttft_missed=1, late_by_queue=1)
    assert after.of_class("default") == ClassDemand("default")


def test_targets_are_counted_by_class_and_all_together() -> None:
    stage = pools()
    for name, ttft_s in (("a", 1.0), ("b", 1.0), ("c", 3.0)):
        stage.submit(name, slo=SloClass(f"within {ttft_s:g} s", ttft_s=ttft_s, tpot_s=9.0))
    stage.now_s += 2.0
    stage.run()
    counts = stage.core.demand(now_s=stage.now_s, uptime_s=0.0)
    assert counts.classes == (
        ClassDemand("within 1 s", 0, 2, 2, 0, late_by_queue=2, first_gaps=2),
        ClassDemand("within 3 s", 1, 0, 1, 0, first_gaps=1),
    )
    assert (counts.ttft_met, counts.ttft_missed, counts.tpot_met, counts.tpot_missed) == (1, 2, 3, 0)
    stage.assert_empty()


def test_prompts_are_counted_where_they_are_computed() -> None:
    """(1) One prompt is computed by a prefill worker, (2) the other one by a decode worker."""
    stage = pools()
    stage.submit("a", prompt_len=40, placement=Placement.DISAGGREGATED)
    stage.submit("b", prompt_len=7, placement=Placement.COLOCATED)
    before = stage.core.demand(now_s=stage.now_s, uptime_s=0.0)
    assert (before.prompt_tokens, before.placed_prompt_tokens) == (47, 0)
    stage.run()
    after = stage.core.demand(now_s=stage.now_s, uptime_s=0.0)
    assert (after.placed_prompt_tokens, after.prefill_prompt_tokens) == (47, 40)
    stage.assert_empty()
