"""Each missed target is counted by what took most of the time."""

from __future__ import annotations

import pytest

from pdserve.core.errors import InternalBug, InvalidRequest, Overloaded
from pdserve.core.ids import RequestId
from pdserve.core.sampling import Placement
from pdserve.core.slo import ClassDemand, SloClass
from pdserve.core.worker import Role
from router.core import events as ev

from ...core_peers import Outcome, Peer, Stage

ONE_S = SloClass("one", ttft_s=1.0, tpot_s=1.0)


def pools(**config: object) -> tuple[Stage, Peer, Peer]:
    stage = Stage(**config)
    return stage, stage.join("prefill-0", Role.PREFILL), stage.join("decode-0", Role.DECODE)


def counts(stage: Stage) -> dict[str, float]:
    """Return the counts of the class that are not 0."""
    one = stage.core.demand(now_s=stage.now_s, uptime_s=0.0).of_class("one")
    found = {name: getattr(one, name) for name in ClassDemand.__dataclass_fields__ if name != "slo_class"}
    return {name: value for name, value in found.items() if value}


def missed(stage: Stage) -> set[str]:
    return {name for name in counts(stage) if name.startswith(("late_by", "slow_by"))}


def hear(stage: Stage, peer: Peer, after_s: float = 0.0) -> None:
    """A worker makes a step if it has nothing to say, and the router hears one message of it after a time."""
    if not peer.upward:
        peer.progress()
    stage.now_s += after_s
    stage.deliver(peer)


def wait_for_room(stage: Stage, decode: Peer, seconds: float, **fields: object) -> Outcome:
    """Submit a request that finds room after a time."""
    decode.refuse = int(seconds > 0)
    outcome = stage.submit("r", slo=ONE_S, **fields)  # type: ignore[arg-type]
    if seconds:
        stage.deliver(decode)
        stage.now_s += seconds
        stage.heartbeat(decode)
    return outcome


@pytest.mark.parametrize(
    ("waits", "cause"),
    [
        ({}, ()),
        ({"queue": 1.5}, ("late_by_queue",)),
        ({"reserve": 1.5}, ("late_by_queue",)),
        ({"start": 1.5}, ("late_by_prefill_queue",)),
        ({"prompt": 1.5}, ("late_by_prefill",)),
        ({"queue": 0.5, "reserve": 0.25, "start": 0.625}, ("late_by_queue",)),
        ({"queue": 0.5, "start": 0.625, "prompt": 0.25}, ("late_by_prefill_queue",)),
        ({"kv": 2.5}, ("slow_by_transfer",)),
        ({"first": 2.5}, ("slow_by_first_decode",)),
        ({"kv": 1.0, "first": 1.25}, ("slow_by_first_decode",)),
        ({"step": 2.5}, ("slow_by_steps",)),
        ({"kv": 4.0, "step": 1.25}, ("slow_by_steps",)),  # without the transfer they would be too slow as well
        ({"kv": 2.0, "step": 0.5}, ("slow_by_transfer",)),
        ({"prompt": 1.5, "step": 2.5}, ("late_by_prefill", "slow_by_steps")),
    ],
    ids=str,
)
def test_what_took_most_of_the_time_of_a_disaggregated_request(waits: dict[str, float], cause: tuple[str, ...]) -> None:
    stage, prefill, decode = pools()
    wait_for_room(stage, decode, waits.get("queue", 0.0), placement=Placement.DISAGGREGATED)
    parts = ("reserve", decode), ("start", prefill), ("prompt", prefill), ("kv", decode), ("first", decode), ("step", decode)
    for name, peer in parts:
        hear(stage, peer, waits.get(name, 0.0))
    assert missed(stage) == set(cause)
    gap_s = waits.get("kv", 0.0) + waits.get("first", 0.0)
    assert (counts(stage).get("first_gap_s", 0.0), counts(stage)["first_gaps"]) == (gap_s, 1)
    stage.assert_empty()


@pytest.mark.parametrize(
    ("waits", "cause"),
    [
        ((0.0, 0.5, 0.5, 0.5), ()),
        ((1.5, 0.0, 0.0, 0.0), ("late_by_queue",)),
        ((0.0, 1.5, 0.0, 0.0), ("late_by_colocated",)),
        ((0.0, 0.0, 2.5, 0.0), ("slow_by_first_decode",)),
        ((0.0, 0.0, 0.0, 2.5), ("slow_by_steps",)),
    ],
)
def test_what_took_most_of_the_time_of_a_colocated_request(waits: tuple[float, ...], cause: tuple[str, ...]) -> None:
    stage, _, decode = pools()
    wait_for_room(stage, decode, waits[0], placement=Placement.COLOCATED)
    for wait_s in (0.0, *waits[1:]):
        hear(stage, decode, wait_s)
    assert missed(stage) == set(cause)
    assert counts(stage)["first_gaps"] == 1
    stage.assert_empty()


def test_a_first_token_that_is_heard_twice_is_not_taken_for_a_decoded_one() -> None:
    stage, _, decode = pools()
    stage.submit("r", slo=ONE_S, max_tokens=8, deadline_s=5.0, placement=Placement.COLOCATED)
    hear(stage, decode)
    decode.progress()
    again = decode.upward[0]
    for _ in range(2):
        stage.now_s += 0.5
        stage.tell(again)
    stage.now_s = 5.0
    stage.tell(ev.Tick())
    assert "first_gaps" not in counts(stage)


def test_a_late_first_token_that_is_the_only_one_has_no_gap_and_misses_no_target_for_gaps() -> None:
    stage, prefill, decode = pools()
    stage.submit("r", slo=ONE_S, max_tokens=1, placement=Placement.DISAGGREGATED)
    for peer, wait_s in ((decode, 0.0), (prefill, 0.0), (prefill, 2.0)):
        hear(stage, peer, wait_s)
    assert counts(stage) == {"ttft_missed": 1, "late_by_prefill": 1, "tpot_met": 1}
    stage.run()
    stage.assert_empty()


@pytest.mark.parametrize("left", [True, False], ids=["client gone", "deadline"])
@pytest.mark.parametrize(("heard", "cause"), [(0, "queue"), (1, "prefill_queue"), (2, "prefill")])
def test_a_request_that_ends_while_it_waits_was_late_by_what_it_waited_for(left: bool, heard: int, cause: str) -> None:
    """No attempt failed. One that has had no room on a worker which refused it is still a request without room."""
    stage, prefill, decode = pools()
    decode.refuse = int(heard == 0)
    stage.submit("r", slo=ONE_S, deadline_s=5.0, placement=Placement.DISAGGREGATED)
    for peer in (decode, prefill)[: max(1, heard)]:
        hear(stage, peer)
    stage.now_s += 6.0
    stage.tell(ev.ClientGone(RequestId("r")) if left else ev.Tick())
    assert missed(stage) == {f"late_by_{cause}"} | (set() if left else {"slow_by_failure"})
    stage.run()
    stage.assert_empty()


def test_a_request_that_fails_before_its_first_token_was_late_by_the_failure() -> None:
    stage, _, decode = pools()
    decode.fault = lambda job: InvalidRequest("is not supported here", field="constraint")
    stage.submit("r", slo=ONE_S, placement=Placement.COLOCATED)
    stage.run()
    assert counts(stage) == {"ttft_missed": 1, "late_by_failure": 1, "tpot_missed": 1, "slow_by_failure": 1}
    stage.assert_empty()


@pytest.mark.parametrize(("queue_s", "cause"), [(0.0, "late_by_failure"), (4.0, "late_by_queue")])
def test_the_time_of_an_attempt_that_failed_before_the_first_token_counts_as_one_part(queue_s: float, cause: str) -> None:
    stage, _, decode = pools()
    wait_for_room(stage, decode, queue_s, placement=Placement.COLOCATED)
    hear(stage, decode)
    stage.now_s += 2.0
    decode.fault = lambda job: InternalBug("a bug of the worker")
    hear(stage, decode)
    decode.fault = lambda job: None
    stage.join("decode-1", Role.DECODE)
    stage.run()
    assert stage.outcomes[RequestId("r")].ended == ["done"]
    assert missed(stage) == {cause}
    assert counts(stage)["first_gaps"] == 1
    stage.assert_empty()


@pytest.mark.parametrize("moved", [True, False], ids=["moved", "lost"])
def test_what_happens_after_the_first_token_says_nothing_of_why_it_was_late(moved: bool) -> None:
    """(1) The prompt takes 2 s and the first decoded token comes 0.25 s later. (2) The worker drains or is lost, and another
    one goes on after 60 s. The gap between the first two tokens is that of the first worker."""
    stage, prefill, decode = pools()
    stage.submit("r", slo=ONE_S, max_tokens=40, placement=Placement.DISAGGREGATED)
    for peer, wait_s in ((decode, 0.0), (prefill, 0.0), (prefill, 2.0), (decode, 0.0), (decode, 0.25)):
        hear(stage, peer, wait_s)
    stage.now_s += 60.0
    stage.join("decode-1", Role.DECODE)
    stage.heartbeat(prefill)
    if moved:
        decode.draining = True
        stage.tell(ev.DrainAsked(decode.hello.worker_id))
    else:
        stage.leave(decode)
    stage.run()
    report = stage.outcomes[RequestId("r")].report
    assert report is not None
    assert (report.attempts, report.migrations) == ((1, 1) if moved else (2, 0))
    assert missed(stage) == {"late_by_prefill", "slow_by_steps" if moved else "slow_by_failure"}
    assert (counts(stage)["first_gap_s"], counts(stage)["first_gaps"]) == (0.25, 1)


def test_a_handoff_to_another_decode_worker_was_slow_by_the_loss_of_the_first_one() -> None:
    stage, prefill, decode = pools()
    stage.submit("r", slo=ONE_S, placement=Placement.DISAGGREGATED)
    for peer in (decode, prefill, prefill):
        hear(stage, peer)
    stage.now_s += 5.0
    stage.join("decode-1", Role.DECODE)
    stage.heartbeat(prefill)
    stage.leave(decode)
    stage.run()
    report = stage.outcomes[RequestId("r")].report
    assert report is not None
    assert (report.rebinds, report.attempts) == (1, 1)
    assert missed(stage) == {"slow_by_failure"}
    stage.assert_empty()


def test_a_sibling_waits_for_the_prompt_of_its_leader_and_not_for_room() -> None:
    stage, prefill, decode = pools()
    stage.share(decode)
    for name, leader in (("r", ""), ("s", "r")):
        stage.submit(name, slo=ONE_S, prompt_len=10, keys=(1, 2), leader=leader, placement=Placement.DISAGGREGATED)
    for peer, wait_s in ((decode, 0.0), (prefill, 0.25), (prefill, 2.0)):
        hear(stage, peer, wait_s)
    stage.run()
    assert counts(stage)["late_by_prefill"] == counts(stage)["ttft_missed"] == 2
    stage.assert_empty()


def test_refusals_are_counted_by_class() -> None:
    stage = Stage(max_queued_requests=1)
    stage.join("decode-0", Role.DECODE, max_num_seqs=1)
    stage.submit("runs", slo=ONE_S)
    stage.submit("waits", slo=SloClass("other"))
    with pytest.raises(Overloaded):
        stage.submit("refused", slo=ONE_S)
    demand = stage.core.demand(now_s=0.0, uptime_s=0.0)
    assert (demand.refused, demand.classes) == (1, (ClassDemand("one", refused=1),))
    stage.run()
    stage.assert_empty()
