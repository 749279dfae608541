"""The router foresees first tokens, and refuses requests by that, with workers that keep to the rates that they tell."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest

from pdserve.core.errors import Overloaded
from pdserve.core.report import Report
from pdserve.core.sampling import Placement
from pdserve.core.slo import SloClass
from pdserve.core.worker import Role
from router.core import events as ev

from ..core_peers import Outcome, Stage
from ..timed_peers import TimedStage

CHAT = SloClass("chat", ttft_s=0.5)
PATIENT = SloClass("patient", ttft_s=1000.0)
RATE = 1000.0


def cluster(*, prefills: int = 1, slots: int = 64, **config: object) -> TimedStage:
    stage = TimedStage(**config)
    for n in range(prefills):
        stage.worker(f"prefill-{n}", Role.PREFILL, tokens_per_s=RATE)
    stage.worker("decode-0", Role.DECODE, tokens_per_s=RATE, max_num_seqs=slots)
    return stage


def report(outcome: Outcome) -> Report:
    assert outcome.error is None
    assert outcome.report is not None
    return outcome.report


def finish(stage: TimedStage) -> None:
    while stage.core.num_requests:
        stage.until(stage.now_s + 1.0)
    stage.assert_empty()


def test_an_idle_cluster_foresees_the_prompt_and_refuses_nothing() -> None:
    stage = cluster()
    outcome = stage.arrive("long", prompt_len=5000, slo=CHAT)  # 5 s, ten times its target
    finish(stage)
    assert report(outcome).predicted_ttft_s == pytest.approx(5.0)
    assert report(outcome).ttft_s == pytest.approx(5.0)


def test_an_overload_refuses_the_class_with_a_target_and_says_when_to_come_back() -> None:
    stage = cluster()
    stage.arrive("first", prompt_len=400)
    with pytest.raises(Overloaded) as refused:
        stage.arrive("late", prompt_len=300, slo=CHAT)
    assert refused.value.retry_after_s == pytest.approx(0.2)
    assert "class chat" in str(refused.value)
    patient = stage.arrive("patient", prompt_len=300, slo=PATIENT)
    without = stage.arrive("without", prompt_len=300)
    finish(stage)
    assert report(patient).predicted_ttft_s == pytest.approx(0.7)
    assert report(without).predicted_ttft_s == 0.0


def test_after_the_time_that_it_was_told_a_client_is_served_in_time() -> None:
    """The prompt before is over or nearly so, and no heartbeat has said it yet."""
    stage = cluster()
    stage.arrive("first", prompt_len=400)
    with pytest.raises(Overloaded) as refused:
        stage.arrive("late", prompt_len=300, slo=CHAT)
    stage.until(stage.now_s + max(refused.value.retry_after_s, 0.4))
    again = stage.arrive("again", prompt_len=300, slo=CHAT)
    finish(stage)
    assert report(again).ttft_s <= 0.5


def test_a_heartbeat_of_the_past_refuses_nobody() -> None:
    """The last one said that 900 tokens waited. They are computed since, and the worker is idle."""
    stage = cluster(heartbeat_s=1.0)
    stage.until(0.95)
    stage.arrive("first", prompt_len=900)
    stage.until(1.9)
    outcome = stage.arrive("next", prompt_len=400, slo=CHAT)
    finish(stage)
    assert report(outcome).predicted_ttft_s == pytest.approx(0.4)


def test_a_full_decode_pool_is_a_wait_by_the_rate_at_which_requests_end() -> None:
    stage = cluster(slots=1)
    for n in range(5):
        stage.arrive(f"r{n}", prompt_len=100, max_tokens=40)  # 0.1 s, and 0.4 s of decode steps
    stage.until(1.7)
    with pytest.raises(Overloaded) as refused:
        stage.arrive("late", prompt_len=10, slo=CHAT)
    assert 0.0 < refused.value.retry_after_s < 3.0
    finish(stage)


def test_unknown_rates_foresee_nothing_and_refuse_nobody() -> None:
    stage = TimedStage()
    prefill = stage.worker("prefill-0", Role.PREFILL, tokens_per_s=RATE)
    stage.worker("decode-0", Role.DECODE, tokens_per_s=RATE)
    stage.heartbeat(prefill.peer, queued_tokens=10_000)
    outcome = stage.arrive("r", prompt_len=300, slo=CHAT)
    finish(stage)
    assert report(outcome).predicted_ttft_s == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_predictions_come_true_while_workers_keep_to_their_rates(seed: int) -> None:
    """Prompts come a little faster than two prefill workers compute them, and there is room on decode."""
    random, stage = Random(seed), cluster(prefills=2, colocate_by_cost=False)
    outcomes = []
    for n in range(60):
        stage.until(stage.now_s + random.expovariate(8.0))
        prompt_len = random.randint(50, 500)
        outcomes.append(stage.arrive(f"r{n}", prompt_len=prompt_len, slo=PATIENT, placement=Placement.DISAGGREGATED))
    finish(stage)
    errors = [report(o).ttft_s - report(o).predicted_ttft_s for o in outcomes]
    waits = [report(o).ttft_s for o in outcomes]
    assert max(waits) > 1.0, "the test means nothing without queues"
    assert sum(map(abs, errors)) / len(errors) < 0.15


def test_a_long_prefill_queue_sends_prompts_to_an_idle_decode_worker() -> None:
    stage = cluster()
    first = stage.arrive("first", prompt_len=100)
    stage.until(5.0)
    apart = [stage.arrive(f"long-{n}", prompt_len=3000, placement=Placement.DISAGGREGATED) for n in range(2)]
    local = stage.arrive("local", prompt_len=500, slo=PATIENT)  # 6 s there, and here 0.5 s for itself and for each that decodes
    asked = stage.arrive("asked", prompt_len=500, placement=Placement.DISAGGREGATED)
    finish(stage)
    assert report(first).placement_reason == "default"
    assert {report(o).placement_reason for o in apart} == {"requested"}
    assert (report(local).placement, report(local).placement_reason) == (Placement.COLOCATED, "prefill_queue")
    assert report(local).ttft_s == report(local).predicted_ttft_s == pytest.approx(0.5)
    assert report(asked).placement is Placement.DISAGGREGATED


def test_many_sequences_that_decode_keep_prompts_away_and_so_does_the_setting() -> None:
    for by_cost, busy in ((True, 20), (False, 0)):
        stage = cluster(colocate_by_cost=by_cost)
        stage.arrive("first", prompt_len=100)
        stage.until(5.0)
        for n in range(busy):
            stage.arrive(f"busy-{n}", prompt_len=10, max_tokens=150, placement=Placement.DISAGGREGATED)
        stage.until(6.0)
        stage.arrive("long", prompt_len=3000, placement=Placement.DISAGGREGATED)
        outcome = stage.arrive("r", prompt_len=500)
        finish(stage)
        assert report(outcome).placement_reason == "default"


def test_prompts_that_move_to_a_decode_worker_count_there_at_once() -> None:
    """No heartbeat comes in between. Each has those before it to wait for, until the prefill worker is as good."""
    stage = cluster()
    stage.arrive("first", prompt_len=100)
    stage.until(5.0)
    stage.arrive("long", prompt_len=3000, placement=Placement.DISAGGREGATED)
    outcomes = [stage.arrive(f"r{n}", prompt_len=500) for n in range(8)]
    finish(stage)
    reasons = [report(o).placement_reason for o in outcomes]
    assert reasons[0] == "prefill_queue"
    assert reasons.count("prefill_queue") < 5


def test_goodput_judges_each_worker_by_the_tokens_that_it_decides() -> None:
    """In two pools nobody knows how fast a decode worker computes prompts, and a prefill worker has no decode steps: such a
    target is not unknown, it is another worker's."""
    stage = TimedStage(prefill_policy="goodput", decode_policy="goodput")
    for n, rate in enumerate((100.0, 1000.0)):
        stage.worker(f"prefill-{n}", Role.PREFILL, tokens_per_s=rate, step_s=0.0)
    for n, step_s in enumerate((0.2, 0.02)):
        stage.worker(f"decode-{n}", Role.DECODE, step_s=step_s)
    outcomes = [stage.arrive(f"r{n}", prompt_len=100, slo=SloClass("chat", ttft_s=0.5, tpot_s=0.05)) for n in range(3)]
    finish(stage)
    assert {(report(o).prefill_worker, report(o).decode_worker) for o in outcomes} == {("prefill-1", "decode-1")}


def test_a_worker_that_invents_the_time_of_a_transfer_says_no_more_than_the_router_saw() -> None:
    """One such time would stay in the running sums for hours, and every prompt would go to the decode workers."""
    stage = Stage()
    stage.join("p", Role.PREFILL)
    decode = stage.join("d", Role.DECODE)
    stage.submit("r")
    told = 0
    while stage.core.num_requests:
        for peer in stage.peers.values():
            peer.progress()
            if peer is decode and peer.upward and isinstance(peer.upward[0], ev.KvCommitted):
                stage.now_s += 0.25
                peer.upward[0] = dataclasses.replace(peer.upward[0], exposed_transfer_s=1e300)
                told += 1
            stage.deliver(peer, len(peer.upward))
    assert told == 1
    assert stage.core.placer.transfers.exposed_s(100) == 0.25
    stage.assert_empty()
