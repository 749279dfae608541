"""The bits of each class of numerics, against a stored name of them: a change of bits is never by accident.

`WRITE_NUMERICS=1 python -m pytest tests/engine/native/test_native_goldens.py` stores what is computed now.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from native_builds import harness_sets, installed_set

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.families import registry
from pdserve.checkpoint.families.examples import example
from pdserve.config import MIB, EngineConfig
from pdserve.engine.loading.load import stream_weights
from pdserve.engine.native import library
from pdserve.engine.numerics import numerics_of
from pdserve.engine.runner import ModelRunner

GOLDENS = Path(__file__).parents[2] / "goldens" / "numerics.json"
FAMILIES = ["LlamaForCausalLM", "Gemma2ForCausalLM", "Qwen3MoeForCausalLM"]


@pytest.mark.skipif(not harness_sets(), reason="this CPU lacks AVX2")
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("isa", harness_sets())
def test_bits_are_those_that_were_stored(isa, architecture, quantization, monkeypatch):
    found = installed_set(isa)
    monkeypatch.setattr(library, "load", lambda: found.library)
    family = registry.family_of(architecture, None)
    card = ModelCard(architecture, architecture, family.read(example(architecture)), family.tensors, (), "served")
    config = EngineConfig(model="tiny", device="cpu", threads=1, kv_cache_memory=4 * MIB, quantization=quantization)

    def read(dtype: torch.dtype, device: torch.device) -> Any:
        return stream_weights(Path(), card, dtype, device, load_format="dummy")

    name = numerics_of(ModelRunner.make(card, config, read), card, config)
    stored = json.loads(GOLDENS.read_text()) if GOLDENS.exists() else {}
    place = stored.setdefault("amx" if isa.startswith("amx") else "avx", {}).setdefault(architecture, {})
    if "WRITE_NUMERICS" in os.environ:
        place[str(quantization)] = name
        GOLDENS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    assert place[str(quantization)] == name


def test_no_name_is_that_of_another_class():
    stored = json.loads(GOLDENS.read_text())
    names = [name for families in stored.values() for kinds in families.values() for name in kinds.values()]
    assert len(set(names)) == len(names) == 2 * len(FAMILIES) * 3
