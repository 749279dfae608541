"""Published models: bytes of KV, parameters, and configurations that are wrong or hostile."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.capacity.model_source import find_model, published_models
from pdserve.capacity.published import read_model
from pdserve.checkpoint.families.registry import family_of
from pdserve.checkpoint.layout import read_json
from pdserve.checkpoint.resolve import resolve
from pdserve.core.errors import ConfigError
from pdserve.core.roofline import ModelShape

BYTES = 2  # of a number in 16 bits


def kv_bytes(name: str, tokens: int = 1) -> float:
    return find_model(name).shape.kv_numbers_of(tokens) * BYTES


def llama(**changes: Any) -> dict[str, Any]:
    base = dict(published_models()["llama-2-70b"]["config"])
    return {key: value for key, value in (base | changes).items() if value is not ...}


def test_80_layers_with_8_kv_heads_of_128_take_327680_bytes_a_token() -> None:
    assert kv_bytes("llama-2-70b") == 327_680
    assert kv_bytes("llama-2-70b", 4096) == pytest.approx(1.34e9, rel=0.005)


def test_the_same_without_gqa_takes_eight_times_as_much() -> None:
    model = read_model("mha", llama(num_key_value_heads=64))
    assert model.shape.kv_numbers_of(1) * BYTES == pytest.approx(2.62e6, rel=0.005)
    assert model.shape.kv_numbers_of(4096) * BYTES == pytest.approx(10.7e9, rel=0.005)
    assert model.shape.kv_numbers_of(8192) * BYTES == pytest.approx(21.47e9, rel=0.001)  # an article says 20.5 (GiB: 20.0)


def test_32_layers_with_32_kv_heads_take_2_gigabytes_at_4096() -> None:
    assert kv_bytes("llama-2-7b", 4096) == pytest.approx(2.147e9, rel=0.001)
    assert 64 * kv_bytes("llama-2-7b", 4096) == pytest.approx(137.4e9, rel=0.001)


def test_gpt3_takes_megabytes_and_not_kilobytes_a_token() -> None:
    assert kv_bytes("gpt-3-175b") == pytest.approx(4.72e6, rel=0.001)  # an article says 48 KB


def test_mla_of_deepseek_v3_takes_70272_bytes_a_token() -> None:
    assert kv_bytes("deepseek-v3") == 70_272


def test_a_sliding_window_bounds_what_its_layers_store() -> None:
    gemma = find_model("gemma-3-27b")
    layer = 2 * 16 * 128 * BYTES
    assert gemma.shape.kv_numbers_of(1024) * BYTES == 62 * 1024 * layer
    assert gemma.shape.kv_numbers_of(100_000) * BYTES == (52 * 1024 + 10 * 100_000) * layer  # every sixth layer sees all
    assert kv_bytes("mistral-7b", 10_000) == kv_bytes("mistral-7b", 4096)
    assert kv_bytes("qwen2.5-7b", 200_000) == 200_000 * kv_bytes("qwen2.5-7b")  # its window is switched off


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.74), ("llama-2-70b", 68.98), ("llama-3-8b", 8.03), ("llama-3-70b", 70.55), ("llama-3-405b", 405.85),
        ("mistral-7b", 7.24), ("mixtral-8x7b", 46.7), ("qwen2.5-7b", 7.62), ("qwen2.5-72b", 72.7), ("qwen3-30b-a3b", 30.53),
        ("qwen3-8b", 8.19),
        ("gemma-3-27b", 27.0), ("deepseek-v3", 671.0), ("smollm2-135m", 0.1345), ("gpt-3-175b", 174.6), ("bloom-176b", 176.2),
    ],
)  # fmt: skip
def test_each_named_model_has_its_published_parameters(name: str, billions: float) -> None:
    assert find_model(name).shape.numbers / 1e9 == pytest.approx(billions, rel=0.002)
    assert "https://" in published_models()[name]["source"]


def test_active_parameters_of_mixtures_are_the_published_ones() -> None:
    for name, billions in (("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3), ("deepseek-v3", 37.0)):
        shape = find_model(name).shape
        assert (shape.active_layer_numbers + 2 * shape.head_numbers) / 1e9 == pytest.approx(billions, rel=0.03)


def test_the_served_model_is_read_as_its_family_reads_it() -> None:
    for name in ("default", "tiny"):
        config = read_json(resolve(name) / "config.json")
        spec = family_of(config["architectures"][0]).read(config)
        assert find_model(name).shape == ModelShape.of(spec)
        kv = spec.kv_spec(16, "bfloat16")
        assert kv.bytes_per_token == find_model(name).shape.kv_numbers * BYTES  # this is what a worker reports in its Hello
    assert find_model("default").shape.kv_numbers * BYTES == 23_040


def test_more_kv_heads_than_the_configuration_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--num-kv-heads 64 .* 8 KV heads \(num_key_value_heads\)"):
        find_model("llama-2-70b", num_kv_heads=64)
    assert find_model("llama-2-70b", num_kv_heads=8) == find_model("llama-2-70b")
    assert find_model("llama-2-70b", num_kv_heads=4).shape.kv_numbers * BYTES == 163_840
    for name, count, why in (
        ("llama-2-70b", 3, "must divide the 64"),
        ("deepseek-v3", 1, "latent"),
        ("gpt-3-175b", 97, "96 KV"),
    ):
        with pytest.raises(ConfigError, match=why):
            find_model(name, num_kv_heads=count)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": ...}, "num_hidden_layers"), ({"vocab_size": ...}, "vocab_size"),
        ({"model_type": ...}, "model_type"),
        ({"model_type": "falcon"}, "falcon"), ({"model_type": []}, "wrong type"), ({"num_hidden_layers": 10**9}, "4096"),
        ({"hidden_size": 2**40}, "hidden_size"), ({"num_attention_heads": -1}, "num_attention_heads"),
        ({"hidden_size": float("nan")}, "hidden_size"), ({"num_key_value_heads": 7}, "num_key_value_heads 7"),
        ({"num_local_experts": 10**8, "num_experts_per_tok": 1}, "65536"),
        ({"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok 3"),
        ({"sliding_window": 5, "layer_types": ["x"]}, "layer_types"), ({"kv_lora_rank": 5}, "qk_nope_head_dim"),
        ({"quantization_config": {"quant_method": "new"}}, "quantization"), ({"quantization_config": 3}, "wrong type"),
        ({"mlp_only_layers": 3, "num_experts": 2, "num_experts_per_tok": 1}, "wrong type"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_configuration_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_model("m", llama(**changes))


JUNK = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.lists(st.integers(), max_size=3))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*llama(), "sliding_window", "kv_lora_rank", "n_routed_experts", "head_dim"]), JUNK))
def test_any_configuration_gives_bounded_numbers_or_a_named_error(changes: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        assert 0 < read_model("m", llama(**changes)).shape.numbers < 1e30


def test_models_are_found_by_path_and_unknown_ones_list_the_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama()))
    assert find_model(str(tmp_path)).shape == find_model("Llama-2-70B").shape
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": llama(model_type="gemma3_text")}))
    assert find_model(str(tmp_path)).shape.num_layers == 80
    for name, why in (
        ("llama-9", "llama-2-70b"),
        ("x\0y", "--model"),
        (str(tmp_path / "no"), "not known"),
        ("a" * 5000, "--model"),
    ):
        with pytest.raises(ConfigError, match=why):
            find_model(name)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        find_model(str(tmp_path))


def test_a_gguf_file_is_read_without_its_weights() -> None:
    from pdserve.checkpoint.resolve import default_gguf

    assert find_model(str(default_gguf())).shape == find_model("smollm2-135m").shape == find_model("default").shape


def test_gemma_3_with_images_is_as_large_as_its_language_model(tmp_path: Path) -> None:
    """Its published configuration leaves out most sizes. The numbers are those that the engine would load."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
    config["text_config"] = {**text, "model_type": "gemma3_text"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = family_of("Gemma3ForConditionalGeneration").read(config)
    assert find_model(str(tmp_path)).shape == ModelShape.of(read)
