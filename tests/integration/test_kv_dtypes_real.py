"""Pools that store KV in different dtypes: real processes and NIXL, against the same computation done in this process.

Exact: one request at a time is computed in the same steps here and there, and compiled bfloat16 does not depend on the
machine's mood. What is compared is the product of prefill's engine, the converter and decode's engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from real_service import APART, LONG_PROMPT, QUICK_BEATS, OpenStream, tiny

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import EngineConfig
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import KvGroup
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import SampleSpec, SequenceSlice, StepPlan
from pdserve.engine.kv.convert import convert_blocks
from pdserve.engine.runner import ModelRunner
from testkit.client import Answer, generate_all, request
from testkit.processes import Place, ProcessCluster

pytestmark = pytest.mark.cluster

BLOCK, CHUNK = 16, 64
ENGINE = tiny(dtype="bfloat16", batch_invariant=False, max_num_batched_tokens=CHUNK, block_size=BLOCK)
LENGTHS = (1, 15, 16, 17, 64, 65, 100, 200, 333, 1500)  # the last takes more blocks than there are for staging
OUTPUT = 12


@dataclass
class Pools:
    """A prefill and a decode worker, in dtypes as configured."""

    cluster: ProcessCluster
    prefill: str
    decode: str


def stores(dtype: str) -> EngineConfig:
    return replace(ENGINE, kv_cache_dtype=dtype)


@pytest.fixture(
    scope="module",
    params=[("bf16", "int8"), *(pytest.param(one, marks=pytest.mark.slow) for one in (("int8", "bf16"), ("int8", "int8")))],
    ids="-to-".join,
)
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    """Ends with every block of pool and staging free."""
    prefill, decode = request.param
    places = {
        f"{role}-0": Place(worker={"engine": stores(dtype)}) for role, dtype in (("prefill", prefill), ("decode", decode))
    }
    with ProcessCluster(ENGINE, places=places, worker=QUICK_BEATS) as cluster:
        yield Pools(cluster, prefill, decode)
        cluster.assert_empty()
        worker = cluster.processes["decode-0"]
        assert worker.stop() == 0
        ends = [line for line in worker.log().splitlines() if "staging ends" in line]
        assert len(ends) == (decode != prefill), "equal dtypes need no staging"
        assert all("with 0 blocks in use" in line for line in ends)


@cache
def runner(dtype: str) -> ModelRunner:
    directory = resolve("tiny")
    return ModelRunner.load(directory, ModelCard.load(directory), stores(dtype))


def layout(dtype: str) -> KvGroup:
    return runner(dtype).kv.spec.groups[0]


def computed_here(prefill: str, decode: str, prompt: list[int], params: SamplingParams) -> list[int]:
    """(1) The prompt, chunk by chunk, on one engine; (2) its blocks converted; (3) token by token on the other."""
    table = tuple(BlockId(i) for i in range(layout(prefill).blocks_for(len(prompt) + OUTPUT)))
    filled = layout(prefill).blocks_for(len(prompt))
    tokens = list(prompt)

    def step(engine: ModelRunner, start: int, end: int) -> None:
        samples = (SampleSpec(params, len(tokens) - len(prompt)),) if end == len(tokens) else ()
        plan = StepPlan((SequenceSlice(SeqId(1), start, tuple(tokens[start:end]), (table,), samples),))
        tokens.extend(token_id for token_id, _ in engine.execute(plan))

    for start in range(0, len(prompt), CHUNK):
        step(runner(prefill), start, min(start + CHUNK, len(prompt)))
    theirs = runner(prefill).kv.caches[0].blocks[:filled].clone()
    runner(decode).kv.caches[0].blocks[:filled] = convert_blocks(theirs, layout(prefill), layout(decode), len(prompt))
    while len(tokens) < len(prompt) + params.max_tokens:
        step(runner(decode), len(tokens) - 1, len(tokens))
    return tokens[len(prompt) :]


def prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(256) for _ in range(length)] for length in LENGTHS for _ in range(2)]


def sampled(number: int) -> dict[str, object]:
    return {"temperature": 0.0} if number % 3 == 0 else {"temperature": 1.0, "seed": number}


def answers(pools: Pools, batch: list[list[int]], *, concurrency: int) -> list[Answer]:
    messages = [request(ids, APART, max_tokens=OUTPUT, ignore_eos=True, **sampled(i)) for i, ids in enumerate(batch)]
    return generate_all(pools.cluster.grpc, messages, concurrency=concurrency)


def test_tokens_are_those_of_prefill_conversion_and_decode_done_by_hand(pools: Pools) -> None:
    """And the bytes on the wire are of prefill's dtype."""
    torch.set_num_threads(1)
    batch, lent = prompts(), layout(pools.prefill)
    for number, (prompt, answer) in enumerate(zip(batch, answers(pools, batch, concurrency=1), strict=True)):
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, **sampled(number))  # type: ignore[arg-type]
        assert answer.ids == computed_here(pools.prefill, pools.decode, prompt, params), (
            f"prompt {number} of {len(prompt)} tokens"
        )
        assert answer.report.kv_bytes == lent.blocks_for(len(prompt)) * lent.block_bytes


def test_int8_halves_the_bytes_on_the_wire() -> None:
    """All but its scales."""
    wide, narrow = layout("bf16"), layout("int8")
    assert 2 * (narrow.block_bytes - narrow.scale_bytes) == wide.block_bytes
    assert narrow.scale_bytes < wide.block_bytes / 20


def test_conversion_shows_in_the_tokens_so_that_equal_ones_prove_something() -> None:
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, temperature=1.0, seed=3)
    batch = [prompt for prompt in prompts() if len(prompt) > 60]
    for prefill, decode in (("int8", "bf16"), ("bf16", "int8"), ("bf16", "int4")):
        changed = (computed_here(prefill, decode, p, params) != computed_here("bf16", "bf16", p, params) for p in batch)
        assert any(changed), (prefill, decode)


def test_many_at_once_wait_for_staging_and_none_is_lost(pools: Pools) -> None:
    """12 prompts of 100 blocks: 1,200 through 64 staging blocks."""
    rng = random.Random(12)
    batch = [[rng.randrange(256) for _ in range(BLOCK * 100)] for _ in range(12)]
    got = answers(pools, batch, concurrency=8)
    assert all(len(answer.ids) == OUTPUT for answer in got)
    assert all(answer.report.kv_bytes == 100 * layout(pools.prefill).block_bytes for answer in got)
    assert all(answer.report.attempts == 1 for answer in got)


def test_clients_that_leave_in_mid_transfer_leak_nothing(pools: Pools) -> None:
    """Before token 0, while chunks are pulled and converted; and right behind it, while the last ones are."""
    for number in range(16):
        message = request([(token + number) % 250 for token in LONG_PROMPT], APART, max_tokens=200, ignore_eos=True)
        with OpenStream(pools.cluster, message) as stream:
            if number % 2:
                stream.read(1)
            else:
                stream.initial_metadata()  # it has been admitted
    pools.cluster.assert_empty()
    (after,) = answers(pools, [list(range(40))], concurrency=1)
    assert len(after.ids) == OUTPUT
