"""The whole model on Triton kernels, and decode steps replayed from recordings, against the CPU engine."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from kernel_cases import DEVICE

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.model_spec import MoeSpec
from pdserve.core.step_plan import GREEDY, SequenceSlice, StepPlan
from pdserve.engine.loading.load import load_weights
from pdserve.engine.models import choice, graphs
from pdserve.engine.models.graphs import buckets
from pdserve.engine.models.weights import ModelWeights, MoeWeights
from pdserve.engine.runner import ModelRunner
from testkit.toy_models import write_decilm


def record_nothing(step):
    """Stands in for a CUDA graph: runs the step once, and again at each replay, into the same tensor."""
    hidden = step()
    replays.append(len(hidden))
    return lambda: (replays.append(len(hidden)), hidden.copy_(step())), hidden


replays: list[int] = []


@pytest.fixture(
    scope="module",
    params=["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8_e4m3", "int4")), "two groups"],
)
def runners(request, tmp_path_factory):
    """A model by torch, and by Triton with recordings for up to 3 sequences; KV of one dtype, or in two groups.

    Its first layer, or one of each group: the interpreter takes a second for a layer.
    """
    directory, layers = resolve("tiny"), 1
    kv_cache_dtype = request.param
    if request.param == "two groups":
        directory, layers, kv_cache_dtype = tmp_path_factory.mktemp("decilm"), 2, "auto"
        write_decilm(directory)
    settings = {"dtype": "float32", "max_num_seqs": 3, "kv_cache_dtype": kv_cache_dtype}
    config = EngineConfig(device="cpu", kv_cache_memory=4 * MIB, **settings)
    whole = ModelCard.load(directory)
    card = replace(whole, spec=replace(whole.spec, layers=whole.spec.layers[:layers]))

    def load(dtype: torch.dtype, device: torch.device) -> ModelWeights:
        weights = load_weights(directory, whole, dtype, device)
        return replace(weights, layers=weights.layers[:layers])

    torch_runner = ModelRunner.make(card, config, load)
    if DEVICE.type == "cuda":
        config = EngineConfig(device="cuda", kv_cache_memory=4 * MIB, **settings)
        return torch_runner, ModelRunner.make(card, config, load)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "triton_usable", lambda device: True)
        patch.setattr(graphs, "cuda_recorder", lambda: record_nothing)
        by_triton = ModelRunner.make(card, config, load)
    assert by_triton.describe().startswith("Triton float32")
    return torch_runner, by_triton


def steps(lengths: list[int], decodes: int, groups: int, seed: int) -> list[StepPlan]:
    """Prompts in two chunks, then `decodes` single tokens of each sequence; shuffled blocks in each KV group."""
    rng = random.Random(seed)
    blocks = [rng.sample(range(16), 16) for _ in range(groups)]
    tables = [tuple(tuple(BlockId(b) for b in (own.pop(), own.pop())) for own in blocks) for _ in lengths]
    tokens = [[rng.randrange(512) for _ in range(length + decodes)] for length in lengths]
    cuts = [[0, length // 2, *range(length, length + decodes + 1)] for length in lengths]
    return [
        StepPlan(
            tuple(
                SequenceSlice(SeqId(i), cut[n], tuple(tokens[i][cut[n] : cut[n + 1]]), tables[i], ())
                for i, cut in enumerate(cuts)
            )
        )
        for n in range(decodes + 2)
    ]


@pytest.mark.quick("auto-lengths1", "two groups-lengths0")
@pytest.mark.parametrize("lengths", [[9], [20, 3, 15], [5, 6, 7, 8, 17]])
def test_triton_and_recordings_give_the_logits_of_torch(runners, lengths):
    by_torch, by_triton = runners
    replays.clear()
    for plan in steps(lengths, 2, len(by_torch.kv.caches), seed=len(lengths)):
        expected, found = by_torch.logits(plan), by_triton.logits(plan).cpu()
        assert (found - expected).abs().max() < 1e-3
    if DEVICE.type == "cpu":
        assert replays == {1: [1, 1], 3: [4, 4], 5: []}[len(lengths)], "not the recordings that fit"


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_recording_touches_no_block(kv_cache_dtype):
    """All rows are nobody's while a step is recorded."""
    directory = resolve("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "triton_usable", lambda device: True)
        patch.setattr(graphs, "cuda_recorder", lambda: record_nothing)
        config = EngineConfig(
            dtype="float32", device=DEVICE.type, kv_cache_memory=MIB, max_num_seqs=1, kv_cache_dtype=kv_cache_dtype
        )
        fresh = ModelRunner.load(directory, ModelCard.load(directory), config)
    assert not any(cache.blocks.any() for cache in fresh.kv.caches)


def test_recorded_steps_count_the_tokens_of_experts_and_no_row_of_nobody():
    """(1) Recording counts nothing. (2) Three sequences are decoded by a recording of four rows."""
    directory = resolve("tiny")
    whole = ModelCard.load(directory)
    hidden, random = whole.spec.hidden_size, torch.Generator().manual_seed(1)
    layer = replace(whole.spec.layers[0], mlp=MoeSpec(4, 2, 16))
    card = replace(whole, spec=replace(whole.spec, layers=(layer,)))
    shapes = (4, hidden), (4, 32, hidden), (4, hidden, 16)
    own = MoeWeights(*[0.3 * torch.randn(shape, generator=random) for shape in shapes])

    def load(dtype: torch.dtype, device: torch.device) -> ModelWeights:
        weights = load_weights(directory, whole, dtype, device)
        mlp = MoeWeights(*[one.to(device, dtype) for one in (own.router, own.gate_up, own.down)])
        return replace(weights, layers=(replace(weights.layers[0], mlp=mlp),))

    settings = {"dtype": "float32", "max_num_seqs": 3}
    by_torch = ModelRunner.make(card, EngineConfig(device="cpu", kv_cache_memory=MIB, **settings), load)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "triton_usable", lambda device: True)
        if DEVICE.type == "cpu":
            patch.setattr(graphs, "cuda_recorder", lambda: record_nothing)
        by_triton = ModelRunner.make(card, EngineConfig(device=DEVICE.type, kv_cache_memory=MIB, **settings), load)
    assert by_triton.expert_load() is None
    replays.clear()
    for plan in steps([4, 2, 3], 1, 1, seed=2):
        assert (by_triton.logits(plan).cpu() - by_torch.logits(plan)).abs().max() < 1e-3
    load_told = by_triton.expert_load()
    assert load_told == by_torch.expert_load()
    assert load_told.choices == (4 + 2 + 3 + 3) * 2
    assert replays == [4] or DEVICE.type == "cuda"


def test_a_step_with_drafts_replays_a_recording_and_has_the_bits_of_single_steps(runners):
    """Rows of drafts are decodes that share a block table. Quantised rows take turns, which no recording has.

    The single steps have four rows as well, because torch gives the products of another number of rows other bits.
    """
    by_triton = runners[1]
    groups, quantised = len(by_triton.kv.caches), by_triton.kv.spec.quantised
    own, *others = steps([14, 1, 1, 1], 0, groups, seed=8)[1].slices
    by_triton.logits(StepPlan((own._replace(start=0, token_ids=tuple(range(14))),)))
    before = [cache.blocks.clone() for cache in by_triton.kv.caches]
    drafted = own._replace(start=14, token_ids=(5, 6, 7, 8), samples=(GREEDY,) * 4)
    replays.clear()
    found = by_triton.logits(StepPlan((drafted,)))
    if DEVICE.type == "cpu":
        assert replays == ([] if quantised else [4])
    for cache, blocks in zip(by_triton.kv.caches, before, strict=True):
        cache.blocks.copy_(blocks)
    for row, token_id in enumerate(drafted.token_ids):
        single = own._replace(start=14 + row, token_ids=(token_id,), samples=(GREEDY,))
        logits = by_triton.logits(StepPlan((*others[:row], single, *others[row:])))
        assert torch.equal(logits[row], found[row])


def test_buckets_hold_the_largest_batch_and_waste_at_most_half():
    assert buckets(1) == (1,)
    assert buckets(3) == (1, 2, 4)
    assert buckets(64) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    assert buckets(65)[-1] == 96
    for batch in range(1, 300):
        assert next(size for size in buckets(256 + 64) if size >= batch) < 2 * batch
