"""A model whose layers have different numbers of KV heads, so its KV has two groups: every way to compute it."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from engine_ways import COMPILED
from reference_decoder import reference_logits

from pdserve.checkpoint.card import ModelCard
from pdserve.config import MIB, EngineConfig
from pdserve.core.errors import ConfigError
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import KvGroup
from pdserve.core.model_spec import UNEQUAL_HEADS, NormSpec, RopeSpec
from pdserve.core.step_plan import SequenceSlice, StepPlan
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.loading.load import load_weights
from pdserve.engine.models import native_decoder as native
from pdserve.engine.runner import ModelRunner
from testkit.toy_models import write_decilm

SIZE, LENGTH = 16, 35
WAYS = {
    "float32": ({"dtype": "float32"}, 1e-5),
    "float32-invariant": ({"dtype": "float32", "batch_invariant": True}, 1e-5),
    "bfloat16-torch": ({"dtype": "bfloat16", "compiled": False}, 0.05),
    "bfloat16-compiled": ({"dtype": "bfloat16"}, 0.05),
    "int8-kv": ({"dtype": "float32", "kv_cache_dtype": "int8"}, 0.05),
    "fp8-kv-compiled": ({"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}, 0.2),
}
"""The settings of each way, and the largest error: the root mean square, relative to that of the logits.
The tiny model, whose KV has one group, has errors of the same size."""


@pytest.fixture(scope="module")
def toy_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("decilm")
    write_decilm(directory)
    return directory


@pytest.fixture(scope="module")
def load(toy_dir):
    def make(compiled: bool = True, **settings: object) -> ModelRunner:
        config = EngineConfig(kv_cache_memory=16 * MIB, max_model_len=512, **settings)
        with pytest.MonkeyPatch.context() as patch:
            if not compiled:
                patch.setattr(native, "supports", lambda *_: False)
            return ModelRunner.load(toy_dir, ModelCard.load(toy_dir), config)

    return make


@pytest.fixture(scope="module")
def reference(toy_dir):
    return reference_logits(toy_dir, ids_of(1, LENGTH))


def ids_of(seq: int, length: int) -> list[int]:
    rng = random.Random(seq)
    return [rng.randrange(512) for _ in range(length)]


def sequence(seq: int, length: int, runner: ModelRunner) -> tuple[list[int], tuple[tuple[BlockId, ...], ...]]:
    """Tokens, and blocks that are different in each group."""
    rng = random.Random(seq)
    groups = [rng.sample(range(100 * seq, 100 * seq + 60), -(-length // SIZE)) for _ in runner.kv.spec.groups]
    return ids_of(seq, length), tuple(tuple(map(BlockId, blocks)) for blocks in groups)


def piece(ids, tables, start: int, end: int) -> SequenceSlice:
    return SequenceSlice(SeqId(1), start, tuple(ids[start:end]), tables, ())


def way(name: str):
    return pytest.param(name, marks=COMPILED if "compiled" in name else ())


def test_the_groups_are_the_layers_with_equal_heads(toy_dir):
    spec = ModelCard.load(toy_dir).kv_layout(SIZE, "float32")
    planes = {heads: ((heads, 16), (heads, 16)) for heads in (1, 2)}
    assert spec.groups == (KvGroup((0, 2), planes[2], SIZE, "float32"), KvGroup((1, 3), planes[1], SIZE, "float32"))


@pytest.mark.parametrize("name", [way(name) for name in WAYS])
def test_logits_are_those_of_an_independent_reference(reference, load, name):
    settings, tolerance = WAYS[name]
    runner = load(**settings)
    assert runner.compiled == name.endswith("compiled")
    ids, tables = sequence(1, LENGTH, runner)
    found = runner.logits(StepPlan((piece(ids, tables, 0, LENGTH),)))
    error = (found - reference).square().mean().sqrt() / reference.square().mean().sqrt()
    assert error < tolerance


@pytest.mark.parametrize("name", [way(name) for name in ["float32-invariant", "bfloat16-compiled"]])
def test_chunks_and_company_change_no_bit(load, name):
    """(1) Alone and whole, (2) in chunks beside other sequences, (3) token by token; always on other blocks of both groups."""
    runner = load(**WAYS[name][0])
    ids, tables = sequence(1, 90, runner)
    whole = runner.logits(StepPlan((piece(ids, tables, 0, 90),)))
    other_ids, other_tables = sequence(2, 200, runner)
    _, moved = sequence(4, 90, runner)
    parts = []
    for start in range(0, 90, 37):
        end = min(90, start + 37)
        plan = StepPlan((piece(other_ids, other_tables, 0, 3 + start), piece(ids, moved, start, end)))
        parts.append(runner.logits(plan)[3 + start :])
    assert torch.equal(torch.cat(parts), whole)
    _, again = sequence(5, 90, runner)
    singles = [runner.logits(StepPlan((piece(ids, again, i, i + 1),))) for i in range(90)]
    assert torch.equal(torch.cat(singles), whole)


@pytest.mark.parametrize("name", [way(name) for name in ["float32", "bfloat16-compiled"]])
def test_each_group_has_its_own_table(load, name):
    """Other blocks in the table of one group alone, once the KV is written, give other logits."""
    runner = load(**WAYS[name][0])
    ids, tables = sequence(1, 40, runner)
    runner.logits(StepPlan((piece(ids, tables, 0, 40),)))
    right = runner.logits(StepPlan((piece(ids, tables, 39, 40),)))
    for group in range(len(tables)):
        changed = tuple(table[::-1] if g == group else table for g, table in enumerate(tables))
        assert not torch.allclose(runner.logits(StepPlan((piece(ids, changed, 39, 40),))), right, atol=0.1)
        runner.logits(StepPlan((piece(ids, tables, 0, 40),)))


CHANGES = {
    "window": {"window": 8}, "bias": {"bias": True}, "qk_norm": {"qk_norm": NormSpec(1e-6)}, "softcap": {"softcap": 9.0},
    "scale": {"scale": 0.5}, "rope of neighbours": {"rope": RopeSpec(1e4, neighbours=True)}, UNEQUAL_HEADS: {"heads": 2},
}  # fmt: skip
NOWHERE = ("rope of neighbours", UNEQUAL_HEADS)


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_backend_does_not_compute_is_refused_by_name(toy_dir, name):
    """It is never computed as something else."""
    card = ModelCard.load(toy_dir)
    first, *others = card.spec.layers
    spec = replace(card.spec, layers=(replace(first, attention=replace(first.attention, **CHANGES[name])), *others))
    kv = KvPool(spec.kv_spec(SIZE, "bfloat16"), MIB, torch.device("cpu"))
    assert (native.obstacle(spec, kv) == f"compiled steps do not compute {name}") == (name not in native.COMPUTED)
    if name in NOWHERE:
        config = EngineConfig(kv_cache_memory=MIB, max_model_len=16)
        with pytest.raises(ConfigError, match=f"has {name}, which no engine here computes"):
            ModelRunner.make(replace(card, spec=spec), config, partial(load_weights, toy_dir, card))
