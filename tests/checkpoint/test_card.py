"""What a model's card says, and that two workers can tell by it whether they serve the same model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pdserve.checkpoint.card import ModelCard, resolve_dtype
from pdserve.checkpoint.resolve import resolve
from pdserve.checkpoint.shards import write_shards
from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import AttentionSpec, DenseSpec, LayerSpec, Llama3Scaling, ModelSpec, NormSpec, RopeSpec

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def change(directory: Path, *without: str, **values: object) -> Path:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in without}))
    return directory


def test_the_tiny_model(tiny_dir):
    card = ModelCard.load(tiny_dir)
    assert (card.name, card.architecture) == ("tiny", "LlamaForCausalLM")
    layer = LayerSpec(AttentionSpec(4, 2, 16, 16, RopeSpec(10000.0)), DenseSpec(128), NormSpec(1e-5))
    assert card.spec == ModelSpec(512, 64, (layer,) * 4, NormSpec(1e-5), max_position=2048, tied_head=False)
    assert card.eos_token_ids == (2,)


def test_the_default_model():
    card = ModelCard.load(resolve("default"))
    assert card.name == "SmolLM2-135M-Instruct"
    layer = LayerSpec(AttentionSpec(9, 3, 64, 64, RopeSpec(100000.0)), DenseSpec(1536), NormSpec(1e-5))
    assert card.spec == ModelSpec(49152, 576, (layer,) * 30, NormSpec(1e-5), max_position=8192, tied_head=True)
    assert card.eos_token_ids == (2,)
    layout = card.kv_layout(16, "auto")
    assert (layout.dtype, layout.bytes_per_token, layout.block_bytes) == ("bfloat16", 23_040, 360 << 10)
    assert card.kv_layout(16, "float32").bytes_per_token == 2 * 23_040
    assert card.kv_layout(16, "float32", "bf16") == layout
    assert card.kv_layout(16, "auto", "int8").dtype == "int8"
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        card.kv_layout(16, "auto", "float32")


@pytest.mark.parametrize("model", ["tiny", "default"])
def test_the_fingerprint_is_that_of_the_goldens(model):
    assert ModelCard.load(resolve(model)).fingerprint == json.loads((GOLDENS / f"{model}.json").read_text())["fingerprint"]


def test_an_unknown_dtype_is_refused_by_name():
    with pytest.raises(ConfigError, match="dtype must be one of auto, bfloat16, float32, got 'int4'"):
        resolve_dtype("int4")


# --- spellings of config.json ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_llama3_scaling_in_the_keys_of_every_transformers(copy, spelling):
    card = ModelCard.load(change(copy, *{"rope_theta", "rope_scaling"} - set(spelling), **spelling))
    assert card.spec.layers[0].attention.rope == RopeSpec(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))


@pytest.mark.parametrize(
    ("spelling", "theta"),
    [
        ({"rope_theta": 5e5}, 500000.0),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}, 500000.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}, 700000.0),
        ({}, 10000.0),
    ],
)
def test_plain_rotation_in_the_keys_of_every_transformers(copy, spelling, theta):
    card = ModelCard.load(change(copy, *{"rope_theta", "rope_scaling"} - set(spelling), **spelling))
    assert card.spec.layers[0].attention.rope == RopeSpec(theta)


def test_what_transformers_itself_saves_is_read_alike(tiny_dir, tmp_path):
    """Its newest release writes keys of its own."""
    transformers = pytest.importorskip("transformers")
    shutil.copytree(tiny_dir, tmp_path / "saved")
    transformers.AutoConfig.from_pretrained(tiny_dir).save_pretrained(tmp_path / "saved")
    ours, theirs = ModelCard.load(tiny_dir), ModelCard.load(tmp_path / "saved")
    fields = set(ModelCard.__dataclass_fields__) - {"fingerprint"}
    assert {name: getattr(ours, name) for name in fields} == {name: getattr(theirs, name) for name in fields}


def test_heads_and_their_size_have_defaults(copy):
    card = ModelCard.load(change(copy, "num_key_value_heads", "head_dim"))
    attention = card.spec.layers[0].attention
    assert (attention.kv_heads, attention.qk_dim) == (4, 16)


def test_ids_that_end_a_request_come_from_both_files(copy):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    card = ModelCard.load(change(copy, eos_token_id=[9, 2]))
    assert card.eos_token_ids == (2, 7, 9)


REFUSED = {
    "architecture": ({"architectures": ["FalconForCausalLM"]}, "architecture FalconForCausalLM is not supported"),
    "no architecture": ({"architectures": None}, r"architecture \(none\)"),
    "rope": ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope scaling 'longrope'"),
    "old rope": ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope scaling 'dynamic'"),
    "half a rope": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 rope scaling lacks low_freq_factor"),
    "bias": ({"mlp_bias": True}, "mlp_bias is not supported"),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is not supported"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "heads": ({"num_attention_heads": 3, "num_key_value_heads": 2}, "3 is not a multiple of num_key_value_heads 2"),
    "type": ({"vocab_size": "many"}, "vocab_size must be an integer from 1 to 2147483647, got 'many'$"),
    "null": ({"hidden_size": None}, "hidden_size must be an integer"),
    # These once left as the exceptions of whatever stumbled over them.
    "no heads": ({"num_attention_heads": 0, "num_key_value_heads": 0}, r"config\.json"),
    "rope a text": ({"rope_scaling": "llama3"}, r"config\.json"),
    "architecture a number": ({"architectures": 7}, r"config\.json"),
    "rope by layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        "other than one object for all layers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_would_get_wrong_is_refused_by_name(copy, name):
    values, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words) as caught:
        ModelCard.load(change(copy, **values))
    assert str(copy) in caught.value.message


SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [-1, 2.7, True, "4", [1], {"a": 1}, 2**31, 10**4000, float("inf"), float("nan")])
def test_a_hostile_size_was_taken_or_refused_without_its_name(copy, name, value):
    """Fractions were cut, and texts and booleans read as numbers; other errors did not say which setting was wrong."""
    with pytest.raises(ConfigError, match=rf"config\.json: {name} must be an integer from 1 to 2147483647, got "):
        ModelCard.load(change(copy, **{name: value}))


HOSTILE = {
    "theta nan": ({"rope_theta": float("nan")}, "rope_theta must be a finite number above 0, got nan"),
    "theta 0": ({"rope_theta": 0}, "rope_theta must be a finite number above 0, got 0"),
    "eps below 0": ({"rms_norm_eps": -1e-5}, "rms_norm_eps must be a finite number of at least 0, got -1e-05"),
    "eps a text": ({"rms_norm_eps": "small"}, "rms_norm_eps must be"),
    "odd heads": ({"head_dim": 3}, "head_dim 3 is odd"),
    "end below 0": ({"eos_token_id": [2, -1]}, "eos_token_id must be an integer from 0"),
    "names": ({"architectures": {"0": "LlamaForCausalLM"}}, "architectures must be a list of names"),
    "equal bands": (
        {"rope_scaling": {
            "rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
            "original_max_position_embeddings": 8192,
        }},
        "high_freq_factor must be above low_freq_factor 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_value_that_would_serve_wrong_tokens_is_refused_by_name(copy, name):
    values, words = HOSTILE[name]
    with pytest.raises(ConfigError, match=rf"config\.json: {words}"):
        ModelCard.load(change(copy, **values))


def test_deep_nesting_ended_the_process_with_a_recursion_error(copy):
    (copy / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        ModelCard.load(copy)


@pytest.mark.parametrize("key", ["vocab_size", "num_hidden_layers", "rms_norm_eps", "max_position_embeddings"])
def test_a_missing_setting_is_named(copy, key):
    with pytest.raises(ConfigError, match=rf"config\.json lacks {key}"):
        ModelCard.load(change(copy, key))


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_a_config_that_is_no_json_object_is_refused(copy, text):
    (copy / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelCard.load(copy)


def test_a_damaged_note_of_origin_is_refused_by_its_own_name(copy):
    """It once was reported as a setting that config.json lacks."""
    for text in ("{}", "[]", "{", '{"name": 3}'):
        (copy / "pdserve.json").write_text(text)
        with pytest.raises(ConfigError, match=r"pdserve\.json"):
            ModelCard.load(copy)


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_directory_without_a_note_is_called_what_it_is_called(copy, monkeypatch):
    (copy / "pdserve.json").unlink()
    assert ModelCard.load(copy).name == "copy"
    monkeypatch.chdir(copy)
    assert ModelCard.load(Path()).name == "copy"
    (copy / "inner").mkdir()
    monkeypatch.chdir(copy / "inner")
    assert ModelCard.load(Path("..")).name == "copy"  # once it was ".."


# --- fingerprints ----------------------------------------------------------------------------------------------------


def fingerprint(directory: Path) -> str:
    return ModelCard.load(directory).fingerprint


def test_equal_models_at_other_paths_and_times_are_the_same(tiny_dir, copy):
    assert fingerprint(copy) == fingerprint(tiny_dir)
    (copy / "README.md").write_text("other words")
    change(copy, _name_or_path="/home/someone", transformers_version="5.0.0")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    assert fingerprint(copy) == fingerprint(tiny_dir)


def test_another_config_or_tokenizer_is_another_model(tiny_dir, copy):
    prints = {fingerprint(tiny_dir), fingerprint(change(copy, rms_norm_eps=1e-6))}
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + "\n")
    prints.add(fingerprint(copy))
    assert len(prints) == 3


def test_other_weights_are_another_model(tiny_dir, copy):
    """Values alone, a header alone, a size alone."""
    path = copy / "model.safetensors"
    whole = path.read_bytes()
    prints = {fingerprint(tiny_dir)}
    tensors = load_file(path)
    save_file({name: tensor + np.float32(1) for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    prints.add(fingerprint(copy))
    path.write_bytes(whole.replace(b"model.layers.0.mlp.up_proj", b"model.layers.0.mlp.UP_proj"))
    prints.add(fingerprint(copy))
    path.write_bytes(whole + b"\0" * 8)
    prints.add(fingerprint(copy))
    assert len(prints) == 4


def test_one_shard_that_differs_is_another_model(tiny_dir, copy):
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    write_shards(copy, shapes, tensors.__getitem__, lambda _: None, limit=200_000)
    before = fingerprint(copy)
    last = sorted(copy.glob("model-*.safetensors"))[-1]
    values = load_file(last)
    save_file({name: -tensor for name, tensor in values.items()}, last, metadata={"format": "pt"})
    assert fingerprint(copy) != before


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 64, (1 << 40).to_bytes(8, "little") + b"{}"])
def test_a_weight_file_that_is_none_is_refused(copy, content):
    (copy / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a complete safetensors file"):
        ModelCard.load(copy)
