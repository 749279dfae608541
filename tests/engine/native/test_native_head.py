"""The largest logit that is found while the head is multiplied: the id that the stored logits have, whatever they are."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from feature_models import HIDDEN, heads, model, weights_of

from pdserve.checkpoint.card import ModelCard
from pdserve.config import MIB, EngineConfig
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.model_spec import DenseSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import GREEDY, NO_TOKEN, SampleSpec, SequenceSlice, StepPlan
from pdserve.engine.native import library
from pdserve.engine.runner import ModelRunner
from pdserve.engine.sampler import best_ids

pytestmark = pytest.mark.skipif(library.load() is None, reason="the kernels were not built, or this CPU lacks AVX2")

POISONED = 0  # this token's embedding is no number
DRAWN = SampleSpec(SamplingParams(temperature=1.0, seed=1), 0)


def with_random(head: torch.Tensor) -> None:
    pass


def with_ties(head: torch.Tensor) -> None:
    head.copy_(head[torch.arange(len(head)) % 5].clone())


def with_equals(head: torch.Tensor) -> None:
    head.zero_()


def with_nan_last(head: torch.Tensor) -> None:
    head[-1, 3] = math.nan


def with_nan_first(head: torch.Tensor) -> None:
    head[0] = math.nan


def with_infinity(head: torch.Tensor) -> None:
    head[len(head) // 2, 3] = math.inf


def with_infinities(head: torch.Tensor) -> None:
    """All logits of a row are plus infinity, or all are minus infinity."""
    head[:, 3] = math.inf


def with_all_but_one_infinite(head: torch.Tensor) -> None:
    head[:-1, 3] = math.inf


FINITE = [with_random, with_ties, with_equals]
HEADS = [*FINITE, with_nan_last, with_nan_first, with_infinity, with_infinities, with_all_but_one_infinite]


def runner_of(tiny_dir, vocab: int, change, *, softcap: float | None, threads: int, quantization: str | None) -> ModelRunner:
    spec = model(heads(4, 2, 16), mlp=DenseSpec(128), vocab_size=vocab, softcap=softcap)
    generator = torch.Generator().manual_seed(vocab)
    embedding, head = (torch.randn(vocab, HIDDEN, generator=generator) for _ in range(2))
    embedding[POISONED] = math.nan
    change(head)
    weights = replace(weights_of(spec), embedding=embedding, head=head)
    config = EngineConfig(
        kv_cache_memory=8 * MIB, dtype="bfloat16", threads=threads, max_model_len=64, quantization=quantization
    )
    card = replace(ModelCard.load(tiny_dir), spec=spec)
    return ModelRunner.make(card, config, lambda dtype, _: weights.map(lambda tensor: tensor.to(dtype)))


def step_of(rows: int, vocab: int, sample: SampleSpec) -> StepPlan:
    """Each row is a sequence of one token. Every eighth is poisoned."""
    rng = random.Random(rows)
    ids = [POISONED if i % 8 == 3 else rng.randrange(vocab) for i in range(rows)]
    return StepPlan(tuple(SequenceSlice(SeqId(i), 0, (id_,), ((BlockId(i),),), (sample,)) for i, id_ in enumerate(ids)))


def check(runner: ModelRunner, vocab: int) -> set[int]:
    """Compare steps of some sizes. Return the ids that were found."""
    found: set[int] = set()
    for rows in (1, 5, 16, 97):
        plan = step_of(rows, vocab, GREEDY)
        kept = [token_id for token_id, _ in runner.execute(plan)]
        stored = runner._model.forward(plan, list(range(rows)))
        assert stored is not None
        assert kept == stored.best == best_ids(stored.values).tolist(), rows
        found |= set(kept)
    return found


@pytest.fixture(autouse=True)
def _one_thread_again():
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("change", HEADS)
def test_the_id_that_is_kept_is_that_of_the_stored_logits(tiny_dir, change, softcap):
    for vocab in (2, 31, 32, 33, 50, 1000):
        found = check(runner_of(tiny_dir, vocab, change, softcap=softcap, threads=2, quantization=None), vocab)
        assert NO_TOKEN in found, "a poisoned row"
        assert len(found) > 1 or change not in FINITE


@pytest.mark.parametrize("threads", [1, 3, 7])
@pytest.mark.parametrize("change", FINITE)
def test_the_id_does_not_depend_on_the_threads(tiny_dir, change, threads):
    """With more threads than cores, some get no columns and some come late."""
    check(runner_of(tiny_dir, 330, change, softcap=None, threads=threads, quantization=None), 330)


@pytest.mark.parametrize("change", FINITE)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_of_fewer_bits_have_their_largest_logit_too(tiny_dir, quantization, change):
    check(runner_of(tiny_dir, 330, change, softcap=None, threads=2, quantization=quantization), 330)


@pytest.mark.parametrize("drawn", [0, 1])
def test_logits_are_stored_where_a_row_needs_them(tiny_dir, drawn):
    """One row of a step that is not plainly greedy is enough."""
    runner = runner_of(tiny_dir, 50, with_random, softcap=None, threads=2, quantization=None)
    plan = step_of(8, 50, DRAWN)
    runner.execute(plan)
    room = runner._model._room
    room.fill_(math.pi)
    first = plan.slices[0]
    rest = tuple(one._replace(samples=(GREEDY,)) for one in plan.slices[1:])
    runner.execute(StepPlan((first._replace(samples=(DRAWN if drawn else GREEDY,)), *rest)))
    assert bool((room == math.pi).all()) == (not drawn)
