"""A model whose KV has two groups, through real processes and NIXL, against the same computation done in this process."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from real_service import APART, QUICK_BEATS, tiny

from pdserve.checkpoint.card import ModelCard
from pdserve.config import EngineConfig
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import SampleSpec, SequenceSlice, StepPlan
from pdserve.engine.kv.convert import convert_blocks
from pdserve.engine.runner import ModelRunner
from pdserve.rpc.v1 import common_pb2
from testkit.client import generate_all, request
from testkit.processes import Place, ProcessCluster
from testkit.toy_models import write_decilm

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

BLOCK, CHUNK, OUTPUT = 16, 64, 12
LENGTHS = (1, 15, 16, 17, 64, 65, 100, 333)


@dataclass
class Pools:
    """A prefill and a decode worker, and the same engines in this process."""

    cluster: ProcessCluster
    prefill: ModelRunner
    decode: ModelRunner


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Prefix caching stays on: the prompts of a test begin alike."""
    directory = tmp_path_factory.mktemp("decilm")
    write_decilm(directory)
    return tiny(model=str(directory), max_num_batched_tokens=CHUNK, block_size=BLOCK, enable_prefix_caching=True)


@pytest.fixture(
    scope="module",
    params=[("float32", "fp32", "fp32"), ("float32", "fp32", "bf16"), ("bfloat16", "bf16", "bf16")],
)
def pools(request: pytest.FixtureRequest, engine: EngineConfig) -> Iterator[Pools]:
    """Equal dtypes are read straight into the pool; different ones are converted group by group. bfloat16 is compiled where
    it can be."""
    dtype, *stored = request.param
    engines = [replace(engine, dtype=dtype, kv_cache_dtype=name) for name in stored]
    places = {f"{role}-0": Place(worker={"engine": own}) for role, own in zip(("prefill", "decode"), engines, strict=True)}
    card = ModelCard.load(Path(engine.model))
    assert len(card.spec.kv_groups) == 2
    with ProcessCluster(engine, places=places, worker=QUICK_BEATS) as cluster:
        yield Pools(cluster, *(ModelRunner.load(Path(engine.model), card, own) for own in engines))
        cluster.assert_empty()


def computed_here(pools: Pools, prompt: list[int], params: SamplingParams) -> list[int]:
    """(1) The prompt, chunk by chunk, on one engine; (2) its blocks converted, each group for itself; (3) token by token on the
    other engine. The blocks of the groups have different ids."""
    spec = pools.prefill.kv.spec
    count = spec.blocks_for(len(prompt) + OUTPUT)
    tables = tuple(tuple(BlockId(first + i) for i in range(count)) for first in (0, 100))
    tokens = list(prompt)

    def step(runner: ModelRunner, start: int, end: int) -> None:
        samples = (SampleSpec(params, len(tokens) - len(prompt)),) if end == len(tokens) else ()
        plan = StepPlan((SequenceSlice(SeqId(1), start, tuple(tokens[start:end]), tables, samples),))
        tokens.extend(token_id for token_id, _ in runner.execute(plan))

    for start in range(0, len(prompt), CHUNK):
        step(pools.prefill, start, min(start + CHUNK, len(prompt)))
    for theirs, ours, table in zip(pools.prefill.kv.caches, pools.decode.kv.caches, tables, strict=True):
        filled = list(table[: spec.blocks_for(len(prompt))])
        ours.blocks[filled] = convert_blocks(theirs.blocks[filled], theirs.layout, ours.layout, len(prompt))
    while len(tokens) < len(prompt) + OUTPUT:
        step(pools.decode, len(tokens) - 1, len(tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("placement", [APART, common_pb2.PLACEMENT_COLOCATED], ids=["apart", "colocated"])
def test_tokens_are_those_of_the_same_engines_used_by_hand(pools: Pools, placement: common_pb2.Placement) -> None:
    """All at once, then each alone; the second time, full blocks of the prompt are found in both groups."""
    prefill = pools.prefill if placement == APART else pools.decode  # a colocated prompt is computed in decode's dtype
    by_hand = dataclasses.replace(pools, prefill=prefill)
    torch.set_num_threads(1)
    rng = random.Random(4 + placement)  # the KV that another placement has left is of another dtype
    shared = [rng.randrange(256) for _ in range(max(LENGTHS))]
    batch = [[*shared[: length - 1], rng.randrange(256)] for length in LENGTHS for _ in range(2)]
    ways = [{"temperature": 0.0} if i % 3 == 0 else {"temperature": 1.0, "seed": i} for i in range(len(batch))]
    messages = [
        request(ids, placement, max_tokens=OUTPUT, ignore_eos=True, **way) for ids, way in zip(batch, ways, strict=True)
    ]
    expected = [
        computed_here(by_hand, ids, SamplingParams(max_tokens=OUTPUT, ignore_eos=True, **way))  # type: ignore[arg-type]
        for ids, way in zip(batch, ways, strict=True)
    ]
    for concurrency in (8, 1):
        got = generate_all(pools.cluster.grpc, messages, concurrency=concurrency)
        assert [answer.ids for answer in got] == expected
        assert all(answer.report.attempts == 1 for answer in got)


def test_the_bytes_on_the_wire_are_those_of_both_groups(pools: Pools) -> None:
    spec = pools.prefill.kv.spec
    (answer,) = generate_all(pools.cluster.grpc, [request(list(range(100)), APART, max_tokens=2, ignore_eos=True)])
    assert answer.report.kv_bytes == spec.blocks_for(100) * spec.block_bytes
