"""Disaggregated output equals colocated output token for token, through real processes and NIXL.

Batch-invariant mode: without it a row of a matrix product differs in its last bits with the number of rows.
"""

import random
from dataclasses import replace

import pytest

from pdserve.client import InferenceClient
from pdserve.config import MIB, EngineConfig
from pdserve.engine.native import library
from pdserve.rpc.v1 import common_pb2
from testkit.client import generate_all, request
from testkit.processes import ProcessCluster

pytestmark = pytest.mark.cluster
COMPILED = pytest.mark.skipif(library.load() is None, reason="the kernels were not built, or this CPU lacks AVX2")

BLOCK = 16
CHUNK = 64  # tokens a step: prompts above it are computed in several chunks
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 128, 129, 160, 200, 256]
PLAIN_IDS = 256  # the byte tokens of the tiny model's vocabulary

ENGINE = EngineConfig(
    model="tiny",
    dtype="bfloat16",
    batch_invariant=True,
    block_size=BLOCK,
    max_num_batched_tokens=CHUNK,
    kv_cache_memory=16 * MIB,
    max_model_len=512,
    threads=1,
)


@pytest.fixture(scope="module")
def cluster():
    with ProcessCluster(ENGINE, prefill=1, decode=2) as running:
        yield running


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(PLAIN_IDS) for _ in range(LENGTHS[i % len(LENGTHS)])] for i in range(count)]


def sampling(i: int) -> dict[str, object]:
    """Half greedy, half seeded with every filter in use; every third of either with bias, penalties and log-probabilities."""
    penalised: dict[str, object] = {
        "presence_penalty": 0.6, "frequency_penalty": 0.9, "repetition_penalty": 1.3, "logit_bias": {65: 2.0, 66: 1.5},
        "logprobs": 2,
    } if i % 3 == 0 else {}  # fmt: skip
    if i % 2 == 0:
        return {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **penalised}
    return {**penalised, "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 1000 + i, "max_tokens": 12}


@pytest.mark.quick("54")
@pytest.mark.parametrize("count", [54, 216])
def test_disaggregated_equals_colocated_on_many_prompts_64_at_once(cluster, count):
    check_placements_agree(cluster, prompts(count, seed=count))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "quantization"), [("float32", None), pytest.param("bfloat16", "int8", marks=COMPILED)])
def test_all_of_it_in_float32_and_int8(dtype, quantization):
    """(1) Disaggregated equals colocated, then (2) alone equals in company, while most of each prompt is cached."""
    engine = replace(ENGINE, dtype=dtype, quantization=quantization)
    with ProcessCluster(engine, prefill=1, decode=2) as cluster:
        check_placements_agree(cluster, prompts(54, seed=4))
        check_alone_equals_in_company(cluster)


def check_placements_agree(cluster, batch):
    """Every prompt by both placements: the same tokens and text, and the right number of KV bytes."""
    bytes_per_token = kv_bytes_per_token(cluster)
    runs = {}
    for placement in (common_pb2.PLACEMENT_DISAGGREGATED, common_pb2.PLACEMENT_COLOCATED):
        messages = [request(ids, placement, **sampling(i)) for i, ids in enumerate(batch)]
        runs[placement] = generate_all(cluster.grpc, messages, concurrency=64)
    apart, together = runs.values()
    for i, (a, b) in enumerate(zip(apart, together, strict=True)):
        assert a.ids == b.ids, f"prompt {i} of {len(batch[i])} tokens"
        assert a.text == b.text
        assert a.logprobs == b.logprobs
        assert len(a.logprobs) == (len(a.ids) if i % 3 == 0 else 0)
        assert a.finish_reason == b.finish_reason
        assert a.report.kv_bytes == -(-len(batch[i]) // BLOCK) * BLOCK * bytes_per_token
        assert b.report.kv_bytes == 0
        assert a.report.prefill_worker == "prefill-0"
    assert {a.report.decode_worker for a in apart} == {"decode-0", "decode-1"}
    assert len({tuple(a.ids) for a in apart}) > len(batch) / 2, (
        "the prompts' outputs hardly differ: the comparison shows little"
    )


def kv_bytes_per_token(cluster) -> int:
    with InferenceClient(cluster.grpc) as client:
        return client.model_info().kv_bytes_per_token


def test_alone_equals_in_company(cluster):
    check_alone_equals_in_company(cluster)


def check_alone_equals_in_company(cluster):
    batch = prompts(8, seed=2)
    messages = [request(ids, common_pb2.PLACEMENT_DISAGGREGATED, **sampling(i)) for i, ids in enumerate(batch)]
    alone = [generate_all(cluster.grpc, [message])[0].ids for message in messages]
    assert [a.ids for a in generate_all(cluster.grpc, messages)] == alone


@pytest.mark.slow  # the short tests have it within one engine, for every family
@pytest.mark.parametrize(("dtype", "quantization"), [("float32", None), pytest.param("bfloat16", "int8", marks=COMPILED)])
def test_a_preempted_sequence_goes_on_with_the_same_tokens(dtype, quantization):
    """A pool of 24 blocks, 8 sequences that need 6 blocks each in the end: some are preempted and recomputed."""
    memory = 24 * BLOCK * tiny_kv_bytes_per_token(dtype)
    small = replace(ENGINE, dtype=dtype, quantization=quantization, kv_cache_memory=memory, max_model_len=128)
    batch = [ids[:20] for ids in prompts(36, seed=3) if len(ids) >= 20][:8]
    long = {"max_tokens": 70, "ignore_eos": True}
    with ProcessCluster(small, prefill=1, decode=1) as cluster:
        messages = [request(ids, common_pb2.PLACEMENT_DISAGGREGATED, **{**sampling(i), **long}) for i, ids in enumerate(batch)]
        together = [(a.ids, a.logprobs) for a in generate_all(cluster.grpc, messages)]
        alone = [(a.ids, a.logprobs) for message in messages for a in generate_all(cluster.grpc, [message])]
    assert together == alone


def tiny_kv_bytes_per_token(dtype: str) -> int:
    from pdserve.checkpoint.card import ModelCard
    from pdserve.checkpoint.resolve import resolve

    return ModelCard.load(resolve("tiny")).kv_layout(BLOCK, dtype).bytes_per_token
