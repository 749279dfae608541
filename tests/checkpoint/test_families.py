"""Families of models: by the architecture of a published configuration, and one of the operator's own."""

from __future__ import annotations

import json

import pytest

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.families.settings import MOST_LAYERS
from pdserve.core.errors import ConfigError
from testkit.toy_models import DECILM_KV_HEADS, write_decilm

OWN = """
from dataclasses import replace
from pdserve.checkpoint.families.family import Family
from pdserve.checkpoint.families.llama import NAMES, read_llama

def family():
    return Family("TwinForCausalLM", read_llama, replace(NAMES, head="twin.head.weight"))

def nothing():
    return None
"""


@pytest.fixture
def decilm(tmp_path):
    (tmp_path / "decilm").mkdir()
    write_decilm(tmp_path / "decilm")
    return tmp_path / "decilm"


def change(directory, **values):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return directory


def test_decilm_has_kv_heads_by_layer(decilm):
    card = ModelCard.load(decilm)
    assert card.architecture == "DeciLMForCausalLM"
    assert tuple(layer.attention.kv_heads for layer in card.spec.layers) == DECILM_KV_HEADS
    assert {layer.attention.heads for layer in card.spec.layers} == {4}
    assert card.spec.kv_groups == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_key_value_heads_per_layer": [2, 1]}, "num_key_value_heads_per_layer has 2 numbers for 4 layers"),
        ({"num_key_value_heads_per_layer": [2, 1, 3, 1]}, "4 is not a multiple of num_key_value_heads 3"),
        ({"num_key_value_heads_per_layer": [2, 1, 0, 1]}, r"num_key_value_heads_per_layer\[2\] must be an integer from 1 to"),
        ({"num_key_value_heads_per_layer": 2}, "num_key_value_heads_per_layer must be a list of integers, got 2$"),
        ({"num_hidden_layers": MOST_LAYERS + 1}, "num_hidden_layers 4097 is over the limit of 4096"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
    ],
)
def test_what_decilm_does_not_describe_is_refused_by_name(decilm, values, words):
    with pytest.raises(ConfigError, match=words) as caught:
        ModelCard.load(change(decilm, **values))
    assert str(decilm) in caught.value.message


def test_an_unknown_architecture_is_refused_with_the_known_ones(decilm):
    known = "architecture FalconForCausalLM is not supported; supported: LlamaForCausalLM, DeciLMForCausalLM, "
    with pytest.raises(ConfigError, match=known):
        ModelCard.load(change(decilm, architectures=["FalconForCausalLM"]))


def test_a_family_of_the_operators_own_is_named_by_a_setting(tiny_dir, decilm, tmp_path, monkeypatch):
    (tmp_path / "own_family.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    config = json.loads((tiny_dir / "config.json").read_text())
    tiny = change(decilm, **config | {"architectures": ["TwinForCausalLM"]})
    card = ModelCard.load(tiny, "own_family:family")
    assert (card.architecture, card.tensors.head) == ("TwinForCausalLM", "twin.head.weight")
    assert card.spec == ModelCard.load(tiny_dir).spec
    with pytest.raises(ConfigError, match="'own_family:nothing', and this function returned None, not a Family"):
        ModelCard.load(tiny, "own_family:nothing")
    with pytest.raises(ConfigError, match="a family of TwinForCausalLM, and the model is LlamaForCausalLM"):
        ModelCard.load(tiny_dir, "own_family:family")
    with pytest.raises(ConfigError, match=r"engine\.model_family is 'own_family:missing', and module own_family has"):
        ModelCard.load(tiny, "own_family:missing")
