"""The DeciLM family: a Llama whose layers have different numbers of KV heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdserve.checkpoint.families.family import Family
from pdserve.checkpoint.families.llama import NAMES, spec_of
from pdserve.checkpoint.families.settings import check_settings, layer_count
from pdserve.checkpoint.numbers import integers
from pdserve.core.model_spec import ModelSpec


def read_decilm(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a published configuration. See `Family.read` for the errors."""
    check_settings(config)
    kv_heads = integers(config, "num_key_value_heads_per_layer", layer_count(config))
    return spec_of(config, kv_heads)


DECILM: Final = Family("DeciLMForCausalLM", read_decilm, NAMES)


def family() -> Family:
    """Return the family."""
    return DECILM
