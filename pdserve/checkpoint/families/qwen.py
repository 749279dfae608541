"""The families Qwen2, whose queries, keys and values have biases, and Qwen3, whose queries and keys are normed by head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pdserve.checkpoint.families.family import Family
from pdserve.checkpoint.families.llama import NAMES, attending, plain_spec
from pdserve.checkpoint.families.settings import check_settings, flag, windows_of
from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import ModelSpec

_QK_NORMS: Final = {
    "q_norm": "model.layers.{layer}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{layer}.self_attn.k_norm.weight",
}
_WINDOWS: Final = ("sliding_window", "use_sliding_window", "layer_types")


def read_qwen2(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a published configuration. See `Family.read` for the errors."""
    check_settings(config, *_WINDOWS)
    return attending(plain_spec(config), _windows(config), bias=True)


def read_qwen3(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a published configuration. See `Family.read` for the errors."""
    check_settings(config, "attention_bias", *_WINDOWS)
    return normed_heads(plain_spec({"head_dim": 128, **config}), config, _windows(config))


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the window of each layer. Without `use_sliding_window`, `sliding_window` means nothing."""
    if not flag(config, "use_sliding_window", False):
        return windows_of({**config, "sliding_window": None}, lambda layer: False)
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int) or first < 0:
        raise ConfigError(f"max_window_layers must be an integer of at least 0, got {first!r:.100}")
    return windows_of(config, lambda layer: layer >= first)


def normed_heads(spec: ModelSpec, config: Mapping[str, Any], windows: tuple[int | None, ...] | None = None) -> ModelSpec:
    """Return a Llama-like spec with Qwen3's attention: norms of heads, and the biases that `attention_bias` asks for."""
    bias = flag(config, "attention_bias", False)
    return attending(spec, windows, qk_norm=spec.norm, bias=bias, out_bias=bias)


QWEN2: Final = Family("Qwen2ForCausalLM", read_qwen2, NAMES)
QWEN3: Final = Family("Qwen3ForCausalLM", read_qwen3, replace(NAMES, layer={**NAMES.layer, **_QK_NORMS}))


def qwen2() -> Family:
    """Return the family Qwen2."""
    return QWEN2


def qwen3() -> Family:
    """Return the family Qwen3."""
    return QWEN3
