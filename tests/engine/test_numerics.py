"""The name of an engine's numerics: equal for equal bits, another for others, none where a token depends on its batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.engine.native import library
from pdserve.engine.numerics import numerics_of
from pdserve.engine.runner import ModelRunner

EXACT = {"dtype": "float32", "batch_invariant": True}


@cache
def card() -> ModelCard:
    return ModelCard.load(resolve("tiny"))


def name(**settings: Any) -> str:
    config = EngineConfig(model="tiny", device="cpu", kv_cache_memory=4 * MIB, **({"threads": 1} | settings))
    return numerics_of(ModelRunner.load(resolve("tiny"), card(), config), config)


@pytest.mark.parametrize(
    "settings", [{"threads": 2}, {"block_size": 32}, {"max_num_seqs": 3, "max_num_batched_tokens": 64}, {"max_model_len": 128}]
)
def test_what_changes_no_bit_changes_no_name(settings: dict[str, Any]) -> None:
    assert name(**EXACT, **settings) == name(**EXACT) != ""


def test_each_format_has_a_name_of_its_own() -> None:
    kinds: list[dict[str, Any]] = [EXACT, EXACT | {"kv_cache_dtype": "bf16"}]
    if library.find().library is not None:
        kinds += [{}, {"quantization": "int8"}, {"quantization": "int4"}]
    assert len({name(**kind) for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_all_instruction_sets_that_run_here_have_one_name(quantization: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [path for isa in library.SETS if (path := library.installed(f"_kernels_{isa}")) is not None]
    found = [one.library for path in paths if (one := library.open_library(path)).library is not None]
    names = set()
    for one in found:
        monkeypatch.setattr(library, "load", lambda one=one: one)
        names.add(name(quantization=quantization))
    assert len(names) == min(1, len(found))
    assert "" not in names


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"kv_cache_dtype": "int8"}])
def test_an_engine_whose_tokens_depend_on_the_batch_has_no_name(settings: dict[str, Any]) -> None:
    assert name(**settings) == ""


def test_one_other_bit_is_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another machine, compiler or library gives it."""
    usual, logits = name(**EXACT), ModelRunner.logits

    def nudged(self: ModelRunner, plan: Any) -> Any:
        found = logits(self, plan)
        return found.index_put((torch.tensor(-1), torch.tensor(7)), found[-1, 7].nextafter(found[-1, 7] + 1))

    monkeypatch.setattr(ModelRunner, "logits", nudged)
    assert name(**EXACT) not in ("", usual)
