"""One pool and two: rates within targets, queues, links, and what is recommended."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.capacity.answer import answer
from pdserve.capacity.devices import MOST_LINK_BYTES
from pdserve.capacity.placements import (
    colocated_rate,
    decode_rate,
    exposed_s,
    mean_queue_s,
    prefill_rate,
    queue_rate,
    queue_s,
    transfer_s,
)
from pdserve.capacity.question import CapacityQuestion
from pdserve.capacity.verdict import LEVERS, TwoPools, best_split, goodput_apart, judge
from tests.capacity.questions import FLOORS, ask, worker_of

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30)
FAST_LINK = 1e15


def waits(service_s: float, rate: float, number: int = 200_000) -> list[float]:
    """The times in an M/D/1 queue, by simulation."""
    draw, free, now, found = random.Random(7), 0.0, 0.0, []
    for _ in range(number):
        now += draw.expovariate(rate)
        free = max(free, now) + service_s
        found.append(free - now)
    return sorted(found)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
def test_the_queue_is_that_of_a_simulation(load: float) -> None:
    found = waits(1.0, load)
    assert mean_queue_s(1.0, load) == pytest.approx(sum(found) / len(found), rel=0.05)
    for share in (0.9, 0.99):
        assert queue_s(1.0, load, share) == pytest.approx(found[int(share * len(found))], rel=0.2)


@given(st.floats(1e-3, 10), st.floats(1e-3, 100), st.floats(0.01, 0.999))
def test_the_rate_meets_the_target_and_no_higher_one_does(service: float, target: float, share: float) -> None:
    rate = queue_rate(service, target, share)
    assert rate * service <= 1
    if service > target:
        assert rate == 0
    else:
        assert queue_s(service, rate, share) <= target
        assert queue_s(service, rate * 1.001 + 1e-9, share) > target


def test_a_queue_that_cannot_keep_up_is_infinite() -> None:
    assert queue_s(1.0, 1.0, 0.9) == mean_queue_s(1.0, 2.0) == math.inf


def test_a_transfer_is_bytes_by_rate_and_chunks_hide_most_of_it() -> None:
    whole = worker_of(ask("llama-3-8b", shares=FLOORS, isl=8192))
    assert transfer_s(whole, 50e9) == pytest.approx(8192 * 131_072 / 50e9)  # 1.07 GB over 400GbE: 21 ms
    assert exposed_s(whole, 50e9) == transfer_s(whole, 50e9)
    chunked = worker_of(ask("llama-3-8b", shares=FLOORS, isl=8192, max_num_batched_tokens=1024))
    assert exposed_s(chunked, 50e9) == pytest.approx(transfer_s(chunked, 50e9) / 8)
    slow = transfer_s(chunked, 1e9)
    assert exposed_s(chunked, 1e9) == pytest.approx(slow - chunked.prefill_s(8192) * 7 / 8)  # the link falls behind


@given(st.integers(1, 1000), st.floats(0.01, 100), st.floats(0.01, 100), st.integers(1, 16), st.integers(1, 16))
def test_the_split_is_the_best_of_all(gpus: int, prefill: float, decode: float, own: int, other: int) -> None:
    """Also where the workers of the two pools have different numbers of GPUs."""
    split = best_split(gpus, prefill, decode, own, other)
    counts = [(count, (gpus - count * own) // other) for count in range(1, gpus // own + 1) if gpus - count * own >= other]
    if not counts:
        assert split is None
        return
    assert split is not None
    assert split.prefill * own + split.decode * other <= gpus
    assert split.requests_per_s == max(min(one * prefill, two * decode) for one, two in counts)


QUESTIONS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["llama-3-8b", "qwen3-30b-a3b", "llama-2-7b"]),
        "gpu": st.sampled_from(["h100-sxm", "a100-80", "b200"]),
        "isl": st.integers(64, 3000),
        "osl": st.integers(8, 1000),
        "ttft_s": st.floats(0.05, 5),
        "tpot_s": st.floats(0.005, 0.2),
        "max_num_batched_tokens": st.sampled_from([512, 2048, 8192]),
    }
)


def equal_pools(question: CapacityQuestion) -> TwoPools:
    """Two pools of workers with one GPU."""
    return TwoPools(worker_of(question), worker_of(question))


def rates(question: CapacityQuestion, link: float = 25e9) -> tuple[float, ...]:
    worker = worker_of(question)
    found = prefill_rate(worker, link), decode_rate(worker, link), colocated_rate(worker)
    return tuple(rate.requests_per_s for rate in found)


def assert_no_less(better: tuple[float, ...], worse: tuple[float, ...], slack: float = 1e-2) -> None:
    """The slack is for batches between those that are tried."""
    assert all(b >= w * (1 - slack) for b, w in zip(better, worse, strict=True)), (better, worse)


@PATIENT
@given(QUESTIONS, st.floats(1, 4))
def test_longer_targets_never_serve_less(case: dict[str, Any], times: float) -> None:
    question = ask(**case)
    for field in ("ttft_s", "tpot_s"):
        assert_no_less(rates(replace(question, **{field: getattr(question, field) * times})), rates(question))
    assert_no_less(rates(replace(question, attainment=0.5)), rates(replace(question, attainment=0.99)))


@PATIENT
@given(QUESTIONS, st.floats(1, 4))
def test_a_better_gpu_never_serves_less(case: dict[str, Any], times: float) -> None:
    question = ask(**case)
    gpu = question.gpu
    faster = {name: rate * times for name, rate in gpu.flops_per_s.items()}
    for better in (
        replace(gpu, bytes_per_s=gpu.bytes_per_s * times),
        replace(gpu, memory_bytes=gpu.memory_bytes * times),
        replace(gpu, flops_per_s=faster),
    ):
        # With a slow link, a prompt that is computed faster hides less of its transfer.
        assert_no_less(rates(replace(question, gpu=better), FAST_LINK), rates(question, FAST_LINK))


@PATIENT
@given(QUESTIONS, st.floats(1e6, 1e12), st.floats(1, 100))
def test_a_faster_link_never_serves_less(case: dict[str, Any], link: float, times: float) -> None:
    question = ask(**case)
    assert_no_less(rates(question, link * times), rates(question, link))
    pools = equal_pools(question)
    assert goodput_apart(pools, link * times) >= goodput_apart(pools, link) * (1 - 1e-6)


@PATIENT
@given(QUESTIONS)
def test_a_rate_is_within_both_targets(case: dict[str, Any]) -> None:
    question = ask(**case)
    worker = worker_of(question)
    prefill, decode, colocated = prefill_rate(worker, 25e9), decode_rate(worker, 25e9), colocated_rate(worker)
    if prefill.requests_per_s:
        assert queue_s(worker.prefill_s(question.isl), prefill.requests_per_s, question.attainment) <= question.ttft_s
    if decode.requests_per_s:
        assert decode.tpot_s <= question.tpot_s
        assert decode.batch <= worker.users_at(question.isl + question.osl)
        assert decode.requests_per_s * (question.osl - 1) * decode.tpot_s <= decode.batch * (1 + 1e-9)  # Little's law
    if colocated.requests_per_s:
        assert colocated.tpot_s <= question.tpot_s
        assert colocated.batch == pytest.approx(colocated.requests_per_s * (question.osl - 1) * colocated.tpot_s)


@PATIENT
@given(QUESTIONS, st.integers(2, 64))
def test_break_even_is_where_two_pools_serve_as_much_as_one(case: dict[str, Any], workers: int) -> None:
    pools = equal_pools(ask(**case, gpus=workers))
    verdict = judge(pools, FAST_LINK)
    even = verdict.break_even_bytes_per_s
    if even is None:  # one pool serves nothing, or more than two pools with any link
        together = verdict.colocated_requests_per_s
        assert not together or goodput_apart(pools, MOST_LINK_BYTES) < together
        return
    assert goodput_apart(pools, even * 1.0001) >= verdict.colocated_requests_per_s * (1 - 1e-9)
    assert goodput_apart(pools, even / 1.001) < verdict.colocated_requests_per_s * (1 + 1e-9)
    assert not judge(pools, even / 1.01).disaggregate


def strict() -> dict[str, Any]:
    """Many GPUs, and a strict target for the gaps: prompts disturb decodes."""
    return {"model": "llama-3-70b", "gpus": 64, "tp": 4, "ttft_s": 0.5, "tpot_s": 0.03}


def test_two_pools_are_recommended_where_prompts_disturb_decodes() -> None:
    found = answer(ask(**strict())).verdict
    assert found.disaggregate
    assert found.constraint == "compute"
    assert found.split is not None
    assert found.requests_per_s == found.split.requests_per_s > 1.05 * found.colocated_requests_per_s


@pytest.mark.parametrize(
    ("changes", "constraint", "reason"),
    [
        ({"link": "1GB/s"}, "compute", "the link is too slow"),
        ({"gpus": 4}, "compute", "two pools need two workers"),
        ({"ttft_s": 0.01}, "compute", "no placement meets both targets"),
        ({"tpot_s": 0.01}, "bandwidth", "no placement meets both targets"),
        ({"tp": 1}, "memory", "does not fit"),
        ({"tpot_s": 1.0}, "compute", "two pools serve"),
    ],
    ids=str,
)
def test_one_pool_is_recommended_with_its_reason(changes: dict[str, Any], constraint: str, reason: str) -> None:
    found = answer(ask(**(strict() | changes))).verdict
    assert not found.disaggregate
    assert reason in found.reason
    assert found.constraint == constraint
    assert found.lever == LEVERS[constraint]


def test_every_constraint_is_found_by_name() -> None:
    def bound(**changes: Any) -> str:
        worker = worker_of(ask("llama-3-8b", **changes))
        return decode_rate(worker, question_link(worker.question)).bound

    def question_link(question: CapacityQuestion) -> float:
        return question.link_of(1).bytes_per_s

    assert bound(tpot_s=1.0) == "memory"
    assert bound(tpot_s=0.02) == "bandwidth"
    assert bound(tpot_s=0.02, link="0.1GB/s") == "link"
    assert bound(isl=16, osl=16, tpot_s=0.05) == "compute"


def test_one_pool_is_bound_by_what_takes_its_time() -> None:
    def bound(**changes: Any) -> str:
        return colocated_rate(worker_of(ask("llama-3-8b", **changes))).bound

    assert bound(isl=4000, osl=16, ttft_s=2.0) == "compute"  # prompts are late
    assert bound(isl=128, osl=4000, tpot_s=0.012) == "bandwidth"  # few prompts, and steps that read much
    assert bound(isl=128, osl=4000, tpot_s=1.0) == "memory"


def test_cost_is_tokens_by_price() -> None:
    found = answer(ask(**strict(), price_per_hour=2.0))
    assert found.cost is not None
    assert found.cost.output_tokens_per_dollar == pytest.approx(found.output_tokens_per_s * 3600 / (2.0 * 64))
    assert found.cost.source == "--price-per-hour"
    example = answer(ask(**strict()))
    assert example.cost is not None
    assert example.cost.source.startswith("example: ")
    assert answer(ask("llama-3-8b", "a10g")).cost is None
