"""A tiny model of a family with its reference logits, and a sequence to compute."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pdserve.checkpoint.card import ModelCard
from pdserve.config import MIB, EngineConfig
from pdserve.core.block_pools import BlockTables
from pdserve.core.ids import NULL_BLOCK, BlockId, SeqId
from pdserve.core.kv_layout import KvGroup
from pdserve.core.model_spec import ModelSpec
from pdserve.core.step_plan import SequenceSlice, StepPlan
from pdserve.engine.models.weights import ModelWeights
from pdserve.engine.runner import ModelRunner
from testkit.random_models import reference_logits, write_random

LENGTH = 56
"""The tokens of the prompt: more than any window, three blocks and a half."""


@dataclass(frozen=True, slots=True)
class Made:
    """A model, a prompt, and the logits of each of the prompt's tokens by transformers: [tokens, vocab] float64."""

    directory: Path
    card: ModelCard
    ids: tuple[int, ...]
    reference: Tensor

    def runner(self, spec: ModelSpec | None = None, weights: ModelWeights | None = None, **settings: object) -> ModelRunner:
        """Load a runner. spec, weights: computed instead of the model's own."""
        card = self.card if spec is None else replace(self.card, spec=spec)
        config = EngineConfig(**{"kv_cache_memory": 4 * MIB, "dtype": "float32", "max_model_len": 256, **settings})
        if weights is None:
            return ModelRunner.load(self.directory, card, config)
        return ModelRunner.make(card, config, lambda dtype, device: weights)

    def error(self, logits: Tensor) -> float:
        """Return the largest error of the prompt's logits, relative to the largest logit."""
        return float((logits - self.reference).abs().max() / self.reference.abs().max())


def write_model(directory: Path, name: str, *, rounded: bool = False, **settings: object) -> Made:
    """Make a model of `RANDOM_MODELS` and a prompt in the empty `directory`.

    rounded: the reference computes with the weights rounded to bfloat16. settings: see `write_random`.
    """
    model = write_random(directory, name, **settings)
    if rounded:
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.copy_(tensor.bfloat16())
    ids = random.Random(name).choices(range(512), k=LENGTH)
    return Made(directory, ModelCard.load(directory), tuple(ids), reference_logits(model, ids))


@dataclass(frozen=True, slots=True)
class Sheet:
    """A sequence on its own blocks, which differ in each KV group."""

    ids: tuple[int, ...]
    groups: tuple[KvGroup, ...]
    tables: BlockTables
    seq_id: SeqId

    @classmethod
    def of(cls, runner: ModelRunner, ids: tuple[int, ...], seed: int = 1) -> Sheet:
        """Take blocks at random from the pool. Those of different seeds below 8 are disjoint."""
        spec, rng = runner.kv.spec, random.Random(seed)
        share = runner.kv.num_blocks // 8
        count = -(-len(ids) // spec.block_size)
        tables = tuple(tuple(map(BlockId, rng.sample(range(seed * share, (seed + 1) * share), count))) for _ in spec.groups)
        return cls(ids, spec.groups, tables, SeqId(seed))

    def live(self, start: int) -> BlockTables:
        """Return the tables of a step that begins at position `start`: blocks behind a window are null."""
        return tuple(
            (*[NULL_BLOCK] * group.first_live(start), *table[group.first_live(start) :])
            for group, table in zip(self.groups, self.tables, strict=True)
        )

    def piece(self, start: int, end: int) -> SequenceSlice:
        """Return a slice of the sequence."""
        return SequenceSlice(self.seq_id, start, self.ids[start:end], self.live(start), ())

    def whole(self) -> StepPlan:
        """Return the step that computes the whole sequence."""
        return StepPlan((self.piece(0, len(self.ids)),))
