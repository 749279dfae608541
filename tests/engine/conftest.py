"""The tiny model loaded once for each way of running it, and plans written down by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.step_plan import SampleSpec, SequenceSlice, StepPlan
from pdserve.engine.models import native_decoder as native
from pdserve.engine.runner import ModelRunner
from tests.one_thread import one_thread as one_thread

RunnerFactory = Callable[..., ModelRunner]


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    return resolve("tiny")


@pytest.fixture(scope="session")
def make_runner() -> RunnerFactory:
    """make_runner(model, compiled=True, **EngineConfig fields): loaded once for each combination."""
    loaded: dict[tuple[object, ...], ModelRunner] = {}

    def make(model: str = "tiny", *, compiled: bool = True, **settings: object) -> ModelRunner:
        key = (model, compiled, *sorted(settings.items(), key=lambda item: item[0]))
        if key not in loaded:
            config = EngineConfig(**{"kv_cache_memory": 64 * MIB, "dtype": "float32", **settings})  # type: ignore[arg-type]
            directory = resolve(model)
            with pytest.MonkeyPatch.context() as patch:
                if not compiled:
                    patch.setattr(native, "supports", lambda *_: False)
                loaded[key] = ModelRunner.load(directory, ModelCard.load(directory), config)
        return loaded[key]

    return make


class Sheet:
    """A sequence on its own blocks, taken at random from the pool, cut into slices on demand."""

    def __init__(self, seq_id: int, tokens: tuple[int, ...], blocks: list[int]) -> None:
        self.seq_id = SeqId(seq_id)
        self.tokens = tokens
        self.block_table = tuple(BlockId(b) for b in blocks)

    def piece(self, start: int, end: int, *samples: SampleSpec) -> SequenceSlice:
        return SequenceSlice(self.seq_id, start, self.tokens[start:end], (self.block_table,), samples)

    def whole(self) -> StepPlan:
        return StepPlan((self.piece(0, len(self.tokens)),))


@pytest.fixture
def make_sheets() -> Callable[..., list[Sheet]]:
    """make_sheets(runner, lengths, rng): random tokens on shuffled, disjoint blocks."""

    def make(runner: ModelRunner, lengths: list[int], rng: random.Random, *, vocab: int = 512) -> list[Sheet]:
        size = runner.kv.spec.block_size
        blocks = rng.sample(range(runner.kv.num_blocks), sum(-(-n // size) for n in lengths))
        sheets = []
        for i, length in enumerate(lengths):
            own, blocks = blocks[: -(-length // size)], blocks[-(-length // size) :]
            sheets.append(Sheet(i, tuple(rng.randrange(vocab) for _ in range(length)), own))
        return sheets

    return make
