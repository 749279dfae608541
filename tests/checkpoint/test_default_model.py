"""The default model's GGUF, read anew: its tensors are those that transformers reads from it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from safetensors import safe_open

from pdserve.checkpoint.gguf.file import GgufFile
from pdserve.checkpoint.gguf.model import GgufModel
from pdserve.checkpoint.resolve import default_gguf, resolve
from pdserve.checkpoint.shards import SINGLE

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"


@pytest.fixture(scope="module")
def model() -> GgufModel:
    return GgufModel(GgufFile(default_gguf()))


@pytest.mark.slow
def test_its_tensors_equal_the_references_bit_for_bit(model):
    """By digest, as tools/make_goldens.py takes it: transformers needs 18 s for what takes 3 here."""
    golden = json.loads((GOLDENS / "default_tensors.json").read_text())
    names = model.tensor_names()
    assert len(names) == golden["tensors"]
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = model.tensor(names[name])
        digest.update(f"{name} {tensor.shape} {tensor.dtype}\n".encode())
        digest.update(tensor.data)
    assert digest.hexdigest() == golden["sha256"]


def test_the_converted_copy_holds_what_the_file_holds(model):
    """The rows of q and k are put back here, and nowhere else."""
    names = model.tensor_names()
    with safe_open(resolve("default") / SINGLE, framework="np") as stored:
        assert set(stored.keys()) == set(names)
        for name in ("model.norm.weight", "model.layers.29.self_attn.k_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
            assert (stored.get_tensor(name) == model.tensor(names[name])).all()
