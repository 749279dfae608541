"""Weights that are read layer by layer: they equal those read at once, and memory never holds them twice."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.engine.loading import SIZES, write_model
from pdserve.checkpoint.card import ModelCard
from pdserve.core.errors import ConfigError
from pdserve.engine.loading.load import load_weights, stream_weights
from pdserve.engine.models.weights import ModelWeights

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]


def tensors_of(weights: ModelWeights) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    weights.map(lambda one: found.append(one) or one)
    return found


@pytest.fixture
def copy(tiny_dir, tmp_path) -> Path:
    shutil.copytree(tiny_dir, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_streamed_weights_are_the_held_ones_with_the_same_bytes(tiny_dir):
    card = ModelCard.load(tiny_dir)
    streamed, held = stream_weights(tiny_dir, card, torch.bfloat16, CPU), load_weights(tiny_dir, card, torch.bfloat16, CPU)
    again = ModelWeights(streamed.embedding, tuple(streamed.layers), streamed.norm, streamed.head)
    assert all(torch.equal(one, two) for one, two in zip(tensors_of(again), tensors_of(held), strict=True))
    assert streamed.nbytes == held.nbytes
    assert len(streamed.layers) == len(card.spec.layers)
    assert torch.equal(streamed.attention_norm(2), held.layers[2].attention_norm)


def test_progress_grows_to_all_bytes(tiny_dir):
    said: list[tuple[int, int]] = []
    card = ModelCard.load(tiny_dir)
    streamed = stream_weights(tiny_dir, card, torch.float32, CPU, progress=lambda what, done, total: said.append((done, total)))
    assert not said  # the headers are checked, and no number is read yet
    streamed.held()
    assert [done for done, _ in said] == sorted(done for done, _ in said)
    assert said[-1] == (streamed.nbytes, streamed.nbytes)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_tensor_is_named_before_anything_is_read(copy, dtype):
    (path,) = copy.glob("*.safetensors")
    tensors = load_file(path)
    name = "model.layers.3.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name].to(dtype)}, path)
    with pytest.raises(ConfigError, match=rf"{name} has dtype .*8.*, not one of BF16, F16, F32, F64"):
        stream_weights(copy, ModelCard.load(copy), torch.float32, CPU)


def test_a_tensor_in_two_files_is_named_before_anything_is_read(copy):
    """A folder may hold the same weights in two dtypes, and neither file says which one is meant."""
    (path,) = copy.glob("*.safetensors")
    save_file({"model.norm.weight": load_file(path)["model.norm.weight"]}, copy / "other.safetensors")
    with pytest.raises(ConfigError, match=rf"model.norm.weight is in {path.name} and in other.safetensors: keep one"):
        stream_weights(copy, ModelCard.load(copy), torch.float32, CPU)


def test_a_shard_that_is_cut_off_is_named_before_anything_is_read(copy):
    (path,) = copy.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=rf"{path.name}.*is the file complete\?"):
        stream_weights(copy, ModelCard.load(copy), torch.float32, CPU)


def test_halves_and_doubles_are_cast(copy):
    (path,) = copy.glob("*.safetensors")
    tensors = load_file(path)
    save_file({name: one.to(torch.float64 if "q_proj" in name else torch.float16) for name, one in tensors.items()}, path)
    layer = load_weights(copy, ModelCard.load(copy), torch.float32, CPU).layers[1]
    assert torch.equal(layer.attention.qkv[:64], tensors["model.layers.1.self_attn.q_proj.weight"])
    assert torch.equal(layer.mlp.down, tensors["model.layers.1.mlp.down_proj.weight"].half().float())


def test_loading_takes_the_weights_and_a_layer_at_most(tmp_path):
    """Both kinds of model on a CPU lay their weights out in new memory: torch in float32, compiled code in bfloat16."""
    size = SIZES["0.03B"]
    write_model(tmp_path, size)
    asked = [sys.executable, "-m", "bench.engine.loading", "--measure", str(tmp_path), "--dtype", "float32", "bfloat16"]
    said = json.loads(subprocess.run(asked, check=True, stdout=subprocess.PIPE, timeout=120, cwd=ROOT).stdout)
    assert [one["cached"] for one in said] == [False, True] * 2
    for one in said:
        layer = one["weights_bytes"] // size.layers
        slack = 16 << 20  # code that is loaded meanwhile, and working memory of the layout
        assert 2 * layer + slack < one["weights_bytes"]  # so a second copy of the weights would be seen
        assert one["weights_bytes"] // 2 < one["peak_bytes"] <= one["weights_bytes"] + 2 * layer + slack
