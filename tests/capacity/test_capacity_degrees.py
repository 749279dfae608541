"""Workers of several GPUs and nodes: stages, experts, the links between their GPUs, and degrees that are refused."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.capacity.answer import answer
from pdserve.capacity.placements import colocated_rate, decode_rate, prefill_rate
from pdserve.capacity.question import CapacityQuestion
from pdserve.capacity.worker_speed import NETWORK_BASE_S, NETWORK_STEP_S, WorkerSpeed, busiest
from pdserve.core.errors import ConfigError
from pdserve.core.shards import Degrees
from tests.capacity.questions import FLOORS, ask, worker_of

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30)


def speed(question: CapacityQuestion, tensor: int, pipeline: int = 1, experts: bool = False) -> WorkerSpeed:
    return WorkerSpeed(question, Degrees(tensor, pipeline, experts))


def test_two_stages_hold_twice_as_much_and_a_batch_passes_them_as_fast_as_the_gpus_of_one() -> None:
    question = ask("llama-3-70b", "h100-sxm", gpus=16)  # 80 layers: equal stages
    one, two = speed(question, 8), speed(question, 8, 2)
    assert (two.gpus, two.lanes, two.evenness) == (16, 2, 1.0)
    assert two.memory.total_bytes == 2 * one.memory.total_bytes
    assert two.memory.weights_bytes == pytest.approx(one.memory.weights_bytes), "embedding and head lie on different stages"
    hop_s = two.passes_s(32)
    assert hop_s > NETWORK_BASE_S + NETWORK_STEP_S
    assert two.decode_s(32, 2048) == pytest.approx(one.decode_s(32, 2048) + hop_s)
    assert two.prefill_s(2048) == pytest.approx(one.prefill_s(2048) + two.passes_s(2048))
    # Two batches are under way at a time, so the worker serves nearly twice as much.
    for rate in (prefill_rate, decode_rate):
        assert rate(two, 1e12).requests_per_s / rate(one, 1e12).requests_per_s > 1.8
    assert colocated_rate(two).requests_per_s / colocated_rate(one).requests_per_s > 1.8


def test_lanes_wait_for_the_largest_stage() -> None:
    """61 layers are 31 and 30: the GPUs of the second stage are idle for a 31st of the time, and have room left."""
    question = ask("deepseek-v3", gpus=16)
    two = speed(question, 8, 2)
    assert two.evenness == 61 / 62
    assert two.flops_per_s == pytest.approx(speed(question, 8).flops_per_s * 61 / 62)
    stage_bytes = two.memory.usable_bytes / 2 - (two.memory.weights_bytes + two.memory.activation_bytes) / 2
    layer_bytes = 8 * question.kv_bits / 8 * question.model.shape.kv_numbers_of(1) / 61  # each of 8 GPUs has all latents
    context = question.isl + question.osl
    assert two.users_at(context) == int(stage_bytes / (31 * layer_bytes * context))


def test_an_all_reduce_over_two_nodes_waits_for_the_network() -> None:
    question = ask("deepseek-v3", gpus=16, node_link="400GB/s", shares=FLOORS)
    near, far = speed(question, 8), speed(question, 16)
    each = 2 * 61
    assert far.all_reduce_s(0) - near.all_reduce_s(0) == pytest.approx(each * (NETWORK_BASE_S + 2 * NETWORK_STEP_S))
    row_bytes = 7168 * 2
    added_s = (far.all_reduce_s(1000) - far.all_reduce_s(0)) - (near.all_reduce_s(1000) - near.all_reduce_s(0))
    assert added_s == pytest.approx(each * 1000 * row_bytes / 400e9)  # 2 (n - 1) / n is 1 for two nodes
    slower = speed(replace(question, node_link="50GB/s"), 16)
    assert slower.decode_s(64, 2048) > far.decode_s(64, 2048)
    assert slower.decode_s(64, 2048) == pytest.approx(slower.links_s(64) + far.decode_s(64, 2048) - far.links_s(64))


@pytest.mark.parametrize(("experts", "chosen", "ranks", "tokens"), [(256, 8, 8, 64), (256, 8, 16, 1024), (128, 8, 4, 32)])
def test_the_busiest_rank_has_about_as_many_tokens_as_in_a_simulation(
    experts: int, chosen: int, ranks: int, tokens: int
) -> None:
    draw, most = random.Random(7), []
    for _ in range(60):
        counts = Counter(e * ranks // experts for _ in range(tokens) for e in draw.sample(range(experts), chosen))
        most.append(max(counts.values()))
    mean = tokens * chosen / ranks
    found = busiest(mean, mean * (1 - 1 / ranks), ranks)
    assert mean < found
    assert found == pytest.approx(statistics.mean(most), rel=0.1)


CASES = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b"]),
        "tensor": st.sampled_from([1, 2, 4, 8]),
        "batch": st.integers(1, 2000),
        "context": st.integers(1, 30_000),
    }
)


@PATIENT
@given(CASES)
def test_whole_experts_are_never_faster_than_parts_of_all_by_these_formulas(case: dict[str, Any]) -> None:
    """Parts lie evenly on the GPUs. What whole experts gain, larger products, is not counted."""
    question = ask(case["model"])
    parts, whole = speed(question, case["tensor"]), speed(question, case["tensor"], experts=True)
    batch, context = case["batch"], case["context"]
    assert whole.decode_s(batch, context) >= parts.decode_s(batch, context) * (1 - 1e-12)
    assert whole.prefill_s(context) >= parts.prefill_s(context) * (1 - 1e-12)
    if case["tensor"] == 1:
        assert whole.decode_s(batch, context) == pytest.approx(parts.decode_s(batch, context))
    assert whole.memory == parts.memory
    assert whole.decode_s(batch + 1, context) >= whole.decode_s(batch, context)


def test_targets_that_no_batch_meets_are_answered() -> None:
    """A batch of no sequences has no busiest GPU."""
    found = answer(ask("deepseek-v3", gpus=16, tp=16, experts=True, tpot_s=0.001)).verdict
    assert (found.requests_per_s, found.constraint) == (0.0, "bandwidth")


def test_pools_of_different_degrees_have_the_rates_of_their_own_degrees() -> None:
    asked = {"model": "llama-3-70b", "gpus": 16, "isl": 2048, "osl": 1024}
    mixed = answer(ask(**asked, tp=4, prefill_tp=8))
    prefill, decode = answer(ask(**asked, tp=8)), answer(ask(**asked, tp=4))
    assert mixed.prefill == prefill.prefill
    assert mixed.decode.requests_per_s == pytest.approx(decode.decode.requests_per_s, rel=0.02)  # prompts hide less of KV
    assert (mixed.memory, mixed.prefill_memory) == (decode.memory, prefill.memory)
    split = mixed.verdict.split
    assert split is not None
    assert split.prefill * 8 + split.decode * 4 <= 16


def test_without_a_degree_only_those_are_tried_that_fill_nodes() -> None:
    assert answer(ask("llama-3-70b", gpus=16, pp=2)).degrees.pipeline == 2
    four = answer(ask("llama-3-405b", gpus=16, gpus_per_node=4)).degrees
    assert four.tensor % 4 == 0
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size \(--pp\) 3 makes no workers .* lower it"):
        answer(ask("llama-3-70b", gpus=16, pp=3))


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("llama-3-8b", {"tp": 3}, r"--tensor-parallel-size \(--tp\) 3 does not divide the 32 query heads and 8 KV heads"),
        ("llama-3-8b", {"tp": 3}, r"into equal ranks: use 1 or 2 or 4 or 8$"),
        ("qwen2.5-7b", {"tp": 7, "gpus": 7}, r"28 query heads and 4 KV heads .*: use 1"),
        ("deepseek-v3", {"tp": 6}, r"the 128 query heads of deepseek-v3 into equal ranks: use 1 or 2 or 4 or 8"),
        ("mixtral-8x7b", {"tp": 16, "experts": True, "gpus": 16}, r"and 8 experts of .*: use 1 or 2 or 4 or 8"),
        ("llama-3-8b", {"experts": True}, r"--enable-expert-parallel is for mixtures of experts, and llama-3-8b has none"),
        ("llama-3-8b", {"pp": 33, "gpus": 64}, r"--pipeline-parallel-size \(--pp\) must be an integer from 1 to 32, got 33"),
        ("llama-3-8b", {"tp": 8, "pp": 2}, r"2 stages makes workers of 16 GPUs, and there are 8 \(--gpus\): use 1 or 2 or 4"),
        ("llama-3-8b", {"tp": 4, "pp": 3, "gpus": 16}, r"12 GPUs, which do not fill nodes of 8 GPUs \(--gpus-per-node\)"),
        ("llama-3-8b", {"tp": 4, "pp": 3, "gpus": 16}, r"evenly: lower --pipeline-parallel-size"),
        ("llama-3-8b", {"tp": 8, "gpus": 12, "gpus_per_node": 6}, r"8 GPUs, which do not fill nodes of 6 GPUs .*: use 1 or 2"),
        ("llama-3-8b", {"tp": 4, "prefill_tp": 5}, r"--prefill-tensor-parallel-size \(--prefill-tp\) 5 does not divide"),
        ("llama-3-8b", {"tp": 4, "prefill_pp": 9}, r"--prefill-pipeline-parallel-size .* from 1 to 8, got 9"),
    ],
    ids=str,
)  # fmt: skip
def test_degrees_that_do_not_divide_are_refused_with_those_that_work(model: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ask(model, **changes)


def test_latent_kv_takes_any_degree_that_divides_heads() -> None:
    assert ask("deepseek-v3", tp=64, gpus=64).tp == 64
    assert worker_of(ask("qwen3-30b-a3b", gpus=16), 16).kv_copies == 4
