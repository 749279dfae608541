"""Memory and step times of one worker, against figures that can be computed by hand, and a public table of measurements."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.capacity.answer import answer, degrees, fits
from pdserve.capacity.model_source import find_model
from pdserve.capacity.question import CapacityShares
from pdserve.capacity.worker_speed import BLOCK_SIZE, bound_by, e2e_s, last_true, roofline_s
from pdserve.core.kv_layout import KvGroup, KvSpec
from tests.capacity.questions import FLOORS, ask, worker_of

TABLE = Path(__file__).resolve().parents[3] / "shared" / "data" / "splitwise-sim" / "perf_model.csv"
RATIOS = {
    ("llama2-70b", "h100-80gb", 2): ((0.76, 1.03), (0.71, 0.94)),
    ("llama2-70b", "a100-80gb", 2): ((0.74, 1.40), (0.83, 1.06)),
    ("llama2-70b", "h100-80gb", 8): ((0.22, 0.92), (0.23, 0.33)),
    ("llama2-70b", "a100-80gb", 8): ((0.30, 1.12), (0.26, 0.35)),
    ("bloom-176b", "h100-80gb", 8): ((0.57, 1.03), (0.54, 0.66)),
    ("bloom-176b", "a100-80gb", 8): ((0.55, 1.28), (0.58, 0.78)),
}
"""Predicted over measured times, least and most, of prompts and of decode steps. docs/capacity.md prints them."""


def test_140_gb_of_weights_at_3350_gb_a_second_give_24_tokens_a_second() -> None:
    step = roofline_s(140e9, 2 * 70e9, 3.35e12, 990e12)
    assert step == pytest.approx(0.0418, rel=0.001)
    assert 1 / step == pytest.approx(24, rel=0.01)
    assert roofline_s(140e9, 2 * 70e9, 2e12, 990e12) == pytest.approx(0.070)
    assert bound_by(140e9, 2 * 70e9, 3.35e12, 990e12) == "bandwidth"
    assert bound_by(140e9, 2 * 70e9 * 300, 3.35e12, 990e12) == "compute"


def test_a_decode_step_of_llama_2_70b_is_the_time_to_read_its_weights() -> None:
    worker = worker_of(ask("llama-2-70b", gpus=1, shares=FLOORS))
    read = (find_model("llama-2-70b").shape.numbers - 32000 * 8192) * 2 + 2048 * 327_680  # of the embedding it reads one row
    assert worker.decode_s(1, 2048) == pytest.approx(read / 3.35e12)
    assert worker.decode_bound(1, 2048) == "bandwidth"


def test_a_prompt_is_the_time_of_its_operations() -> None:
    model, worker = find_model("llama-2-70b"), worker_of(ask("llama-2-70b", gpus=1, shares=CapacityShares(0.5, 1, 1)))
    scores = 80 * 64 * 2 * 2 * 128 * (2048 * 2049 // 2)  # layers, heads, two products of 128 numbers, pairs
    flops = 2 * model.shape.layer_numbers * 2048 + 2 * 32000 * 8192 + scores
    assert worker.prefill_s(2048) == pytest.approx(flops / (0.5 * 989.4e12))
    assert worker.prefill_bound(2048) == "compute"


def test_memory_of_a_batch() -> None:
    assert fits(140e9, 134e9, 4, 80e9)
    assert not fits(140e9, 134e9, 3, 80e9)
    per_user = find_model("llama-2-7b").shape.kv_numbers_of(4096) * 2
    assert 64 * per_user == pytest.approx(137.4e9, rel=0.001)


def test_180_gb_for_5_users_are_109863_tokens_each() -> None:
    worker = worker_of(ask("llama-2-70b", gpus=1))
    assert last_true(10**9, lambda tokens: worker.held_bytes(5, tokens) <= 180e9) == 109_863
    assert last_true(10**9, lambda tokens: worker.held_bytes(50, tokens) <= 180e9) == 10_986  # an article says 110,000 for 50


@pytest.mark.parametrize(("context", "step"), [(32_768, 8192), (32_768, 2048), (131_072, 2048), (1024, 2048)])
def test_users_of_a_model_with_windows_are_those_for_which_the_engine_splits_its_memory(context: int, step: int) -> None:
    """The engine gives the layers with windows what so many sequences use, and the others the rest: with so many users their
    pool has all contexts, and with one more it has not."""
    question = ask("gemma-3-27b", "h100-sxm", max_num_batched_tokens=step)
    worker = worker_of(question, 4)
    users = worker.users_at(context)
    assert users > 1
    spec, layer = [], 0
    for shape, count in question.model.shape.layers:
        planes = ((shape.attention.kv_numbers // 128, 128),)
        spec.append(KvGroup(tuple(range(layer, layer + count)), planes, BLOCK_SIZE, "bfloat16", shape.attention.window))
        layer += count
    kv, whole = KvSpec(tuple(spec)), next(i for i, group in enumerate(spec) if group.window is None)
    for sequences, has_room in ((users, True), (users + 1, False)):
        sizes = kv.split(int(worker.memory.kv_bytes), [group.most_useful(sequences, step) for group in spec])
        assert (sizes[whole] * BLOCK_SIZE >= sequences * context) is has_room
    assert worker.held_bytes(users, context) >= users * worker.kv_bytes(context)


def test_int8_halves_the_kv() -> None:
    whole, half = (worker_of(ask("llama-2-70b", kv_cache_dtype=name, gpus=8), 4) for name in ("bf16", "int8"))
    assert half.kv_bytes(4096) * 2 == whole.kv_bytes(4096)
    assert half.users_at(4096) in (2 * whole.users_at(4096), 2 * whole.users_at(4096) + 1)


def test_a_request_is_its_first_token_and_the_gaps_of_the_others() -> None:
    assert e2e_s(0.5, 0.02, 101) == pytest.approx(2.5)
    assert e2e_s(0.5, 0.02, 1) == 0.5


@pytest.mark.parametrize(
    ("tp", "message_bytes", "measured_s"),
    [
        (2, 2**20, 12.4e-6),
        (2, 2**28, 1.687e-3),
        (4, 2**14, 4.9e-6),
        (4, 2**25, 0.320e-3),
        (8, 2**14, 5.7e-6),
        (8, 2**28, 2.04e-3),
    ],
)
def test_all_reduces_take_about_what_was_measured_on_h200(tp: int, message_bytes: int, measured_s: float) -> None:
    worker = worker_of(ask("llama-3-8b", "h200"), tp)  # 32 layers, rows of 8,192 bytes
    assert worker.all_reduce_s(message_bytes / 8192) / 64 == pytest.approx(measured_s, rel=0.33)
    assert worker_of(ask("llama-3-8b", "h200")).all_reduce_s(1) == 0


def test_latent_kv_and_few_heads_are_stored_on_every_gpu() -> None:
    assert find_model("deepseek-v3").kv_copies(8) == 8
    assert find_model("qwen2.5-7b").kv_copies(4) == 1
    assert find_model("qwen3-30b-a3b").kv_copies(8) == 2


def test_without_a_degree_the_best_one_is_taken() -> None:
    assert degrees(ask("llama-3-8b", gpus=6)) == (1, 2, 4)
    assert degrees(ask("qwen2.5-7b", gpus=64)) == (1, 2, 4)  # it has 28 heads
    assert degrees(ask("llama-3-405b", gpus=64)) == (1, 2, 4, 8, 16)  # eight GPUs do not hold it
    question = ask("llama-3-70b", gpus=8)
    by_degree = {tp: answer(replace(question, tp=tp)).verdict.requests_per_s for tp in (1, 2, 4, 8)}
    assert by_degree[answer(question).degrees.tensor] == max(by_degree.values())
    assert by_degree[1] == 0  # one GPU does not hold it
    assert answer(ask("llama-3-405b", gpus=3)).degrees.tensor == 2  # no degree fits, and the answer says so
    assert not answer(ask("llama-3-405b", gpus=3)).memory.fits


CASES = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["llama-3-8b", "mixtral-8x7b", "deepseek-v3", "gemma-3-27b"]),
        "gpu": st.sampled_from(["h100-sxm", "a100-80", "l40s"]),
        "tp": st.sampled_from([1, 2, 8]),
        "batch": st.integers(1, 2000),
        "context": st.integers(1, 100_000),
    }
)
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40)


@PATIENT
@given(CASES, st.floats(1, 4), st.sampled_from(["bytes_per_s", "memory_bytes", "flops_per_s"]))
def test_a_better_gpu_is_never_slower(case: dict, times: float, what: str) -> None:
    question = ask(case["model"], case["gpu"])
    gpu = question.gpu
    value = (
        {key: rate * times for key, rate in gpu.flops_per_s.items()} if what == "flops_per_s" else getattr(gpu, what) * times
    )
    before = worker_of(question, case["tp"])
    after = worker_of(replace(question, gpu=replace(gpu, **{what: value})), case["tp"])
    batch, context = case["batch"], case["context"]
    assert after.decode_s(batch, context) <= before.decode_s(batch, context)
    assert after.prefill_s(context) <= before.prefill_s(context)
    assert after.mixed_s(batch, context, 512, 2048) <= before.mixed_s(batch, context, 512, 2048)
    assert after.users_at(context) >= before.users_at(context)


@PATIENT
@given(CASES)
def test_more_work_never_takes_less_time_and_more_users_never_get_more(case: dict) -> None:
    worker, batch, context = worker_of(ask(case["model"], case["gpu"]), case["tp"]), case["batch"], case["context"]
    assert worker.decode_s(batch + 1, context) >= worker.decode_s(batch, context)
    assert worker.decode_s(batch, context + 1) >= worker.decode_s(batch, context)
    assert worker.prefill_s(context + 1) >= worker.prefill_s(context)
    assert worker.mixed_s(batch, context, 256, 2048) >= worker.mixed_s(batch, context, 0, 2048)
    assert worker.max_context(batch + 1) <= worker.max_context(batch)
    assert worker.users_at(context + 1) <= worker.users_at(context)
    longest = worker.max_context(batch)
    assert longest == 0 or worker.users_at(longest) >= batch
    assert longest == worker.question.model.max_position or worker.users_at(longest + 1) < batch


@pytest.mark.skipif(not TABLE.exists(), reason="the public table of splitwise-sim is not here")
@pytest.mark.parametrize("case", RATIOS, ids=lambda case: "-".join(map(str, case)))
def test_ratios_to_measured_times_are_those_that_the_docs_print(case: tuple[str, str, int]) -> None:
    name, hardware, tp = case
    times = defaultdict(list)
    for row in csv.DictReader(TABLE.read_text().splitlines()):
        if (row["model"], row["hardware"], int(row["tensor_parallel"])) == case:
            key = int(row["prompt_size"]), int(row["batch_size"])
            times[key].append((float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3))
    model = "llama-2-70b" if name == "llama2-70b" else name
    worker = worker_of(ask(model, "h100-sxm" if hardware == "h100-80gb" else "a100-80", isl=1024, osl=128), tp)
    middle = {key: [statistics.median(column) for column in zip(*rows, strict=True)] for key, rows in times.items()}
    prompts = [worker.prefill_s(size) / prompt for (size, batch), (prompt, _) in middle.items() if batch == 1]
    steps = [worker.decode_s(batch, size + 64) / step for (size, batch), (_, step) in middle.items()]
    for found, (least, most) in zip((prompts, steps), RATIOS[case], strict=True):
        assert min(found) == pytest.approx(least, abs=0.006)
        assert max(found) == pytest.approx(most, abs=0.006)
