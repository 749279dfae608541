"""The ranks of a gang compute the bits of one process, whatever the degrees, the weights and the KV."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from gang_models import BY_COLUMNS, HALF_A_PANEL, SHARED, bf16_weights, gang_of_threads

from pdserve.config import MIB
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.model_spec import MoeSpec
from pdserve.core.shards import Degrees, RankShare
from pdserve.core.step_plan import SequenceSlice, StepPlan
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.layers.linear import COMPILED_SCHEMES
from pdserve.engine.models.native_decoder import NativeDecoder
from pdserve.engine.models.weights import ModelWeights
from tests.engine.drafted_rows import Case, check_drafts
from tests.engine.native.feature_models import weights_of

SIZE = 16
LENGTHS = (1, 17, 90, 330)
MODELS = SHARED | BY_COLUMNS | HALF_A_PANEL
ALL = [Degrees(2), Degrees(4), Degrees(8), Degrees(1, 2), Degrees(2, 2)]


def pool(spec, dtype: str = "bfloat16") -> KvPool:
    return KvPool(spec.kv_spec(SIZE, dtype), 8 * MIB, torch.device("cpu"), torch.bfloat16)


def plans(groups: int) -> list[StepPlan]:
    """Return steps of all prompts in chunks of different sizes, of single tokens, and of one token."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(160, (length + 2,), generator=generator).tolist() for length in LENGTHS]
    tables, used = [], 0
    for length in LENGTHS:
        count = -(-(length + 2) // SIZE)
        tables.append((tuple(map(BlockId, range(used, used + count))),) * groups)
        used += count

    def piece(i: int, start: int, end: int) -> SequenceSlice:
        return SequenceSlice(SeqId(i), start, tuple(ids[i][start:end]), tables[i], ())

    chunks = [piece(i, 0, length // 2) for i, length in enumerate(LENGTHS) if length > 1]
    return [
        StepPlan(tuple(chunks)),
        StepPlan(tuple(piece(i, length // 2, length) for i, length in enumerate(LENGTHS))),
        StepPlan(tuple(piece(i, length, length + 1) for i, length in enumerate(LENGTHS))),
        StepPlan((piece(3, LENGTHS[3] + 1, LENGTHS[3] + 2),)),
    ]


def computed(model: NativeDecoder, kv: KvPool) -> list[torch.Tensor]:
    """Compute all steps, and return their logits and best tokens, and the bytes of the pool."""
    results = []
    for plan in plans(len(kv.caches)):
        rows = list(range(plan.num_tokens)) if plan.num_tokens < 200 else [plan.num_tokens - 1]
        logits = model.forward(plan, rows)
        results += [logits.values.clone(), torch.tensor(logits.best)]
        results.append(torch.tensor(model.forward(plan, rows, best_alone=True).best))
    return [*results, *(cache.blocks.clone() for cache in kv.caches)]


@cache
def of_one_process(name: str, dtype: str, quantization: str | None) -> list[torch.Tensor]:
    spec, kv = MODELS[name], pool(MODELS[name], dtype)
    results = computed(NativeDecoder(RankShare(spec), weights(name), kv, 2048, COMPILED_SCHEMES[quantization]), kv)
    assert all(torch.isfinite(one.float()).all() for one in results[:3])
    return results


@cache
def weights(name: str) -> ModelWeights:
    return bf16_weights(weights_of(MODELS[name]))


def check(name: str, degrees: Degrees, dtype: str = "bfloat16", quantization: str | None = None) -> None:
    kv = pool(MODELS[name], dtype)
    with gang_of_threads(MODELS[name], weights(name), degrees, kv, quantization=quantization) as gang:
        assert all(map(torch.equal, of_one_process(name, dtype, quantization), computed(gang, kv)))


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("degrees", ALL, ids=str)
def test_the_bits_of_one_process(name, degrees):
    check(name, degrees)


@pytest.mark.parametrize("name", [name for name, spec in SHARED.items() if isinstance(spec.layers[0].mlp, MoeSpec)])
@pytest.mark.parametrize("degrees", [Degrees(2, 1, True), Degrees(8, 1, True), Degrees(2, 2, True)], ids=str)
def test_whole_experts_of_ranks(name, degrees):
    check(name, degrees)


@pytest.mark.parametrize(("name", "quantization"), [*product(BY_COLUMNS, [None, "int8", "int4"]), ("half_a_panel", None)])
@pytest.mark.parametrize("degrees", [Degrees(3), Degrees(3, 2)], ids=str)
def test_three_ranks_share_no_sums(name, degrees, quantization):
    check(name, degrees, quantization=quantization)


@pytest.mark.parametrize("name", ["windows", "twelve_latent"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_six_ranks_read_three_kv_heads(name, dtype):
    check(name, Degrees(6), dtype)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        *product(["grouped", "gemma", "latent_ranked", "shared_expert"], [Degrees(2), Degrees(4, 2)]),
        ("shared_expert", Degrees(2, 1, True)),
    ],
    ids=str,
)
def test_weights_of_fewer_bits(name, quantization, degrees):
    """A column of integers has one scale, which all ranks know. int8 has scales for whole columns."""
    check(name, degrees, quantization=quantization)


@pytest.mark.parametrize("dtype", ["float32", "int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize("name", ["llama", "one_kv_head", "gemma", "latent"])
def test_kv_of_other_dtypes(name, dtype):
    """A KV head that several ranks read is written by one: two that rounded it would round twice."""
    check(name, Degrees(4), dtype)


CASES = [Case(14, 6, 2), Case(90, 0, 1), Case(255, 4, 1), Case(300, 3, 4)]


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("llama", Degrees(2)), ("gemma", Degrees(4)), ("grouped", Degrees(2, 2)), ("latent", Degrees(1, 2)),
        ("nine_heads", Degrees(3)),
    ],
    ids=str,
)  # fmt: skip
def test_each_rank_takes_back_the_rejected_drafts_of_its_heads(name, degrees, dtype):
    kv = pool(MODELS[name], dtype)
    with gang_of_threads(MODELS[name], weights(name), degrees, kv) as gang:
        assert gang.drafts_obstacle is None
        for seed in range(3):
            check_drafts(gang, [kv], CASES, seed)


def test_ranks_that_share_a_head_of_quantised_kv_take_no_drafts():
    spec = MODELS["grouped"]
    for dtype, told in (("int8", "several ranks read one head of quantised KV"), ("bfloat16", None)):
        kv = pool(spec, dtype)
        with gang_of_threads(spec, weights("grouped"), Degrees(4), kv) as gang:
            assert (gang.drafts_obstacle or "").startswith(told or "")
            assert (gang.drafts_obstacle is None) == (told is None)


@pytest.mark.parametrize("name", ["gemma", "latent_mixture"])
def test_ranks_with_several_threads(name):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(name, Degrees(2))
        check(name, Degrees(2, 2, name == "latent_mixture"))
    finally:
        torch.set_num_threads(threads)
