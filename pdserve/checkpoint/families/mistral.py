"""The Mistral family: a Llama whose layers may all have a window of positions. Also Phi-3, whose checkpoints fuse matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pdserve.checkpoint.families.family import Family
from pdserve.checkpoint.families.llama import NAMES, attending, plain_spec
from pdserve.checkpoint.families.settings import check_settings, layer_count, window_of
from pdserve.core.model_spec import ModelSpec

FUSED_NAMES: Final = replace(
    NAMES,
    layer={
        **NAMES.layer,
        **dict.fromkeys(("q", "k", "v"), "model.layers.{layer}.self_attn.qkv_proj.weight"),
        **dict.fromkeys(("gate", "up"), "model.layers.{layer}.mlp.gate_up_proj.weight"),
    },
)


def read_mistral(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a published configuration. A missing window is 4096, and null is none. See `Family.read`."""
    config = {"sliding_window": 4096, **config}
    check_settings(config, "sliding_window", "layer_types")
    return attending(plain_spec(config), [window_of(config)] * layer_count(config))


def read_phi3(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a published configuration. `partial_rotary_factor` rotates a part of a head. See `Family.read`."""
    check_settings(config, "sliding_window", "layer_types")
    return attending(plain_spec(config, partial_rope=True), [window_of(config)] * layer_count(config))


MISTRAL: Final = Family("MistralForCausalLM", read_mistral, NAMES)
PHI3: Final = Family("Phi3ForCausalLM", read_phi3, FUSED_NAMES)


def family() -> Family:
    """Return the family Mistral."""
    return MISTRAL


def phi3() -> Family:
    """Return the family Phi-3."""
    return PHI3
