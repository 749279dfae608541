"""Predictions from what workers measure, and the policy that chooses by them."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from pdserve.core.errors import Overloaded
from pdserve.core.slo import DEFAULT_CLASS, SloClass
from router.core import policy
from router.core.events import LinkId
from router.core.forecast import Prediction, Transfers, check_target, predict, queue_wait_s
from router.core.policy import Candidate, RequestView, goodput
from router.core.queue_limits import RETRY_AFTER_MAX_S, RETRY_AFTER_MIN_S

BASE = Candidate(LinkId(1), 1000, 0, 4, 0, 64, suspect=False, refused=False, prompt_tokens_per_s=100.0, decode_step_s=0.02)
RATES = st.one_of(st.just(0.0), st.floats(0.01, 1e6))

workers = st.builds(
    Candidate,
    link=st.integers(1, 9).map(LinkId),
    kv_tokens=st.integers(1, 10_000),
    promised_tokens=st.integers(0, 20_000),
    free_slots=st.integers(1, 4),
    queued_tokens=st.integers(0, 1_000_000),
    max_model_len=st.just(4096),
    suspect=st.just(False),
    refused=st.just(False),
    running=st.integers(0, 300),
    step_sequences=st.integers(0, 300),
    prompt_tokens_per_s=RATES,
    counted_tokens_per_s=st.just(0.0),
    decode_step_s=st.one_of(st.just(0.0), st.floats(1e-4, 10.0)),
    cached_tokens=st.integers(0, 5000),
    load=st.floats(0, 1e3),
)
requests = st.builds(
    RequestView,
    prompt_tokens=st.integers(1, 4096),
    kv_tokens=st.integers(1, 8192),
    ttft_left_s=st.one_of(st.none(), st.floats(-10.0, 100.0)),
    tpot_s=st.one_of(st.none(), st.floats(1e-3, 1.0)),
)

measured = st.builds(
    lambda worker, rate, step_s: worker._replace(prompt_tokens_per_s=rate, decode_step_s=step_s),
    workers,
    st.floats(0.01, 1e6),
    st.floats(1e-4, 10.0),
)
demanding = st.builds(
    lambda request, ttft_s, tpot_s: request._replace(ttft_left_s=ttft_s, tpot_s=tpot_s),
    requests,
    st.floats(-10.0, 1000.0),
    st.floats(1e-3, 10.0),
)


def worse(worker: Candidate, more: int) -> list[Candidate]:
    """The same worker, each time with more of one thing that delays a request."""
    return [
        worker._replace(queued_tokens=worker.queued_tokens + more),
        worker._replace(running=worker.running + more),
        worker._replace(load=worker.load + more),
        worker._replace(cached_tokens=max(0, worker.cached_tokens - more)),
        worker._replace(decode_step_s=worker.decode_step_s * (1 + more)),
    ]


def test_a_first_token_waits_for_the_queue_and_for_what_is_not_cached() -> None:
    worker = BASE._replace(queued_tokens=50, cached_tokens=30)
    assert policy.prompt_wait_s(worker) == pytest.approx(0.5)
    assert policy.compute_s(worker, 40) == pytest.approx(0.1)
    assert policy.ttft_s(worker, 40) == pytest.approx(0.6)
    assert policy.compute_s(worker, 30) == pytest.approx(0.01)  # the last token is computed even if its KV is there


def test_a_step_with_the_sequences_that_it_was_measured_with_takes_what_was_measured() -> None:
    assert policy.tpot_s(BASE._replace(running=7, step_sequences=8)) == BASE.decode_step_s
    assert policy.tpot_s(BASE._replace(running=71, step_sequences=8)) == pytest.approx(BASE.decode_step_s * 136 / 72)


def test_unknown_rates_give_no_number_and_nothing_takes_no_time() -> None:
    unknown = BASE._replace(prompt_tokens_per_s=0.0, decode_step_s=0.0, queued_tokens=5)
    assert policy.prompt_wait_s(unknown) is None
    assert policy.ttft_s(unknown, 10) is None
    assert policy.tpot_s(unknown) is None
    assert policy.prompt_wait_s(unknown._replace(queued_tokens=0)) == 0.0
    assert policy.compute_s(unknown._replace(queued_tokens=0), 1) is None
    assert policy.total(1.0, None) is None
    assert policy.total() == 0.0


def test_a_place_in_the_queue_costs_one_end_of_a_request_for_each_ahead_and_one_more() -> None:
    assert queue_wait_s(9, 5.0) == pytest.approx(2.0)
    assert queue_wait_s(0, 5.0) == pytest.approx(0.2)
    assert queue_wait_s(9, 0.0) is None


@given(workers, st.integers(1, 4096), st.integers(1, 1000))
def test_predictions_never_fall_with_more_work(worker: Candidate, prompt_tokens: int, more: int) -> None:
    for busier in worse(worker, more):
        for foresee in (lambda w: policy.ttft_s(w, prompt_tokens), policy.tpot_s):
            now, then = foresee(worker), foresee(busier)
            assert (now is None) == (then is None)
            assert now is None or then is None or (then >= now >= 0 and math.isfinite(then))


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(0, 1e3)), min_size=1, max_size=50))
@example([(2, 5e-324), (2, 5e-324)])
def test_transfers_predict_within_what_they_have_seen(seen: list[tuple[int, float]]) -> None:
    transfers = Transfers()
    for one in seen:
        transfers.saw(*one)
    slack, tiny_s = 1 + 1e-9, 1e-300  # numbers below the smallest normal one have few bits left, so no share of them is exact
    exposed = [transfers.exposed_s(size) for size in (1, 1 << 20, 1 << 50)]
    assert exposed == sorted(exposed)
    assert exposed[-1] <= max(exposed_s for _, exposed_s in seen) * slack + tiny_s
    assert exposed[0] <= max(exposed_s / kv_bytes for kv_bytes, exposed_s in seen) * slack + tiny_s


@pytest.mark.parametrize("nothing", [(0, 1.0), (8, math.nan), (8, math.inf), (8, -1.0)])
def test_transfers_learn_nothing_from_no_bytes_and_no_numbers(nothing: tuple[int, float]) -> None:
    transfers = Transfers()
    transfers.saw(*nothing)
    assert transfers.exposed_s(1) is None


def test_small_handoffs_do_not_make_a_large_one_look_slow() -> None:
    transfers = Transfers()
    for _ in range(10):
        transfers.saw(100, 0.01)  # nearly all of it are messages
    assert transfers.exposed_s(1_000_000) == pytest.approx(0.01)
    assert transfers.exposed_s(50) == pytest.approx(0.005)


def test_transfers_follow_a_link_that_becomes_slower() -> None:
    transfers = Transfers()
    for _ in range(500):
        transfers.saw(1000, 0.1)
    for _ in range(500):
        transfers.saw(1000, 0.4)
    assert transfers.exposed_s(1000) == pytest.approx(0.4, rel=0.01)
    assert transfers.exposed_s(1000) == pytest.approx(0.4, rel=0.01)


@given(workers, requests)
def test_goodput_scores_lie_in_0_and_1(worker: Candidate, request: RequestView) -> None:
    assert 0 < goodput(worker, request) <= 1


@given(workers, requests, st.integers(1, 1000))
def test_more_work_never_scores_higher(worker: Candidate, request: RequestView, more: int) -> None:
    for busier in worse(worker, more):
        assert goodput(busier, request) <= goodput(worker, request)


def met(worker: Candidate, request: RequestView) -> int:
    """Count the targets that the request meets there. Both rates are known, and the request has both targets."""
    ttft_s, tpot_s = policy.ttft_s(worker, request.prompt_tokens), policy.tpot_s(worker)
    assert ttft_s is not None
    assert tpot_s is not None
    assert request.ttft_left_s is not None
    assert request.tpot_s is not None
    return (ttft_s <= request.ttft_left_s) + (tpot_s <= request.tpot_s)


@given(measured, measured, demanding)
def test_a_worker_that_meets_more_targets_scores_higher(one: Candidate, other: Candidate, request: RequestView) -> None:
    if met(one, request) > met(other, request):
        assert goodput(one, request) > goodput(other, request)


def test_goodput_prefers_slack_then_the_unknown_then_the_least_lateness() -> None:
    request = RequestView(100, 100, ttft_left_s=2.0, tpot_s=0.03)
    order = [
        BASE,  # 1.0 s and 0.02 s
        BASE._replace(queued_tokens=90),
        BASE._replace(prompt_tokens_per_s=0.0),
        BASE._replace(prompt_tokens_per_s=0.0, load=0.1),
        BASE._replace(queued_tokens=110),
        BASE._replace(queued_tokens=210),
        BASE._replace(queued_tokens=110, decode_step_s=0.04),
    ]
    scores = [goodput(worker, request) for worker in order]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == len(scores)


def test_a_request_that_is_late_already_still_takes_the_shorter_queue() -> None:
    late = RequestView(100, 100, ttft_left_s=-3.0)
    assert goodput(BASE, late) > goodput(BASE._replace(queued_tokens=1), late)


@given(workers, workers, st.integers(1, 4096))
def test_without_targets_the_load_decides(one: Candidate, other: Candidate, prompt_tokens: int) -> None:
    request = RequestView(prompt_tokens, prompt_tokens)
    if one.load < other.load:
        assert goodput(one, request) >= goodput(other, request)


VOICE = SloClass("voice", ttft_s=0.5)


def test_a_prediction_sums_the_queue_the_prompts_before_and_its_own() -> None:
    prediction = predict(BASE._replace(queued_tokens=50, cached_tokens=20), 40, 0.25)
    assert prediction is not None
    assert prediction.wait_s == pytest.approx(0.75)
    assert prediction.compute_s == pytest.approx(0.2)
    assert prediction.ttft_s == pytest.approx(0.95)
    assert predict(BASE, 40, None) is None
    assert predict(BASE._replace(prompt_tokens_per_s=0.0), 40, 0.0) is None


def test_a_request_that_would_be_late_and_would_wait_is_refused() -> None:
    with pytest.raises(Overloaded) as refused:
        check_target(VOICE, Prediction(0.3, 0.4))
    assert refused.value.retry_after_s == pytest.approx(0.2)
    assert "class voice" in str(refused.value)
    assert "ttft_s is 0.5 s" in str(refused.value)
    assert "wait 0.3 s" in str(refused.value)


@pytest.mark.parametrize(
    ("wait_s", "after_s"), [(0.501, RETRY_AFTER_MIN_S), (1e300, RETRY_AFTER_MAX_S), (math.inf, RETRY_AFTER_MAX_S)]
)
def test_a_refused_client_is_told_to_come_back_neither_at_once_nor_never(wait_s: float, after_s: float) -> None:
    assert refused_after_s(Prediction(wait_s, 0.0), late_s=0.0) == after_s


@pytest.mark.parametrize(
    ("slo", "prediction"),
    [
        (VOICE, None),  # nobody knows
        (VOICE, Prediction(0.0, 60.0)),  # nothing is before it, so no later time is better
        (VOICE, Prediction(0.3, 0.2)),  # just in time
        (DEFAULT_CLASS, Prediction(60.0, 60.0)),  # no target
    ],
)
def test_a_request_is_taken(slo: SloClass, prediction: Prediction | None) -> None:
    check_target(slo, prediction)


def refused_after_s(prediction: Prediction, late_s: float) -> float:
    """The time after which to try again, or 0 for a request that is taken."""
    try:
        check_target(VOICE, prediction, late_s=late_s)
    except Overloaded as exc:
        return exc.retry_after_s
    return 0.0


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 1), st.floats(0, 10))
def test_more_waiting_never_lets_a_request_in(wait_s: float, compute_s: float, late_s: float, more_s: float) -> None:
    now = refused_after_s(Prediction(wait_s, compute_s), late_s)
    assert refused_after_s(Prediction(wait_s + more_s, compute_s), late_s) >= now
