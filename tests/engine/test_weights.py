"""Checkpoints that fit, and what is said of those that do not."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.checkpoint.card import ModelCard
from pdserve.core.errors import ConfigError
from pdserve.engine.loading.load import load_weights

CPU = torch.device("cpu")


@pytest.fixture
def copy(tiny_dir, tmp_path) -> Path:
    shutil.copytree(tiny_dir, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def tensors(tiny_dir) -> dict[str, torch.Tensor]:
    (path,) = tiny_dir.glob("*.safetensors")
    return load_file(path)


def load(directory: Path, dtype: torch.dtype = torch.float32):
    return load_weights(directory, ModelCard.load(directory), dtype, CPU)


def replace(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    (path,) = directory.glob("*.safetensors")
    save_file(tensors, path)


def test_projections_are_fused_in_order_and_cast(tiny_dir, tensors):
    layer = load(tiny_dir, torch.bfloat16).layers[2]
    names = [f"model.layers.2.self_attn.{n}_proj.weight" for n in "qkv"]
    assert torch.equal(layer.attention.qkv, torch.cat([tensors[n] for n in names]).bfloat16())
    assert torch.equal(layer.mlp.gate_up[:128], tensors["model.layers.2.mlp.gate_proj.weight"].bfloat16())
    assert torch.equal(layer.mlp.gate_up[128:], tensors["model.layers.2.mlp.up_proj.weight"].bfloat16())


def test_shards_with_an_index_load_like_one_file(copy, tensors):
    expected = load(copy)
    (path,) = copy.glob("*.safetensors")
    path.unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, chosen in shards.items():
        save_file({n: tensors[n] for n in chosen}, copy / file)
    index = {"weight_map": {n: file for file, chosen in shards.items() for n in chosen}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    found = load(copy)
    assert torch.equal(found.layers[3].attention.qkv, expected.layers[3].attention.qkv)
    assert torch.equal(found.head, expected.head)


def test_a_tied_head_is_the_embedding_and_counted_once(tiny_dir, copy, tensors):
    untied = load(tiny_dir)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    for keep_head in (True, False):
        replace(copy, {n: t for n, t in tensors.items() if keep_head or n != "lm_head.weight"})
        weights = load(copy)
        assert weights.head is weights.embedding
        assert weights.nbytes == untied.nbytes - untied.head.nbytes


def test_nothing_stays_mapped_after_loading(tiny_dir):
    weights = load(tiny_dir)
    assert weights.norm.sum().isfinite()
    assert ".safetensors" not in Path("/proc/self/maps").read_text()


def test_missing_unexpected_and_misshapen_tensors_are_named(copy, tensors):
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(3, 4)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)  # old checkpoints carry it
    replace(copy, tensors)
    with pytest.raises(ConfigError) as caught:
        load(copy)
    message = caught.value.message
    assert "missing: model.norm.weight" in message
    assert "unexpected: model.layers.0.self_attn.q_proj.bias" in message
    assert "model.layers.1.mlp.down_proj.weight has shape [3, 4], not [64, 128]" in message
    assert "inv_freq" not in message


def test_a_damaged_file_is_named(copy):
    card = ModelCard.load(copy)
    (path,) = copy.glob("*.safetensors")
    path.write_bytes(b"not safetensors at all")
    with pytest.raises(ConfigError, match=path.name):
        load_weights(copy, card, torch.float32, CPU)


def test_more_layers_than_the_file_has_are_summarised(tiny_dir):
    card = ModelCard.load(tiny_dir)
    card = dataclasses.replace(card, spec=dataclasses.replace(card.spec, layers=card.spec.layers[:1] * 6))
    with pytest.raises(ConfigError, match=r"missing: .* and 14 more"):
        load_weights(tiny_dir, card, torch.float32, CPU)
