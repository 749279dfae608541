"""The Mixtral family: a Mistral in which each MLP is a mixture of experts. The weights of the chosen experts add up to one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pdserve.checkpoint.families.family import Family
from pdserve.checkpoint.families.llama import NAMES, attending, plain_spec, with_mlps
from pdserve.checkpoint.families.settings import activation, check_settings, expert_count, layer_count, window_of
from pdserve.checkpoint.numbers import integer
from pdserve.core.model_spec import ModelSpec, MoeSpec

_BLOCK: Final = "model.layers.{layer}.block_sparse_moe."
_MATRICES: Final = {"gate": "w1", "up": "w3", "down": "w2"}
"""The published names of an expert's matrices."""


def read_mixtral(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a published configuration. A missing theta is a million. See `Family.read` for the errors."""
    check_settings(config, "num_experts", "num_local_experts", "sliding_window", "layer_types")
    config = {"rope_theta": 1e6, **config}
    spec = attending(plain_spec(config), [window_of(config)] * layer_count(config))
    chosen, width = integer(config, "num_experts_per_tok"), integer(config, "intermediate_size")
    mixture = MoeSpec(expert_count(config), chosen, width, activation=activation(config))
    return with_mlps(spec, lambda layer: mixture)


_EXPERTS: Final = {f"expert_{part}": f"{_BLOCK}experts.{{expert}}.{name}.weight" for part, name in _MATRICES.items()}
MIXTRAL: Final = Family(
    "MixtralForCausalLM", read_mixtral, replace(NAMES, layer={**NAMES.layer, "router": _BLOCK + "gate.weight", **_EXPERTS})
)


def family() -> Family:
    """Return the family."""
    return MIXTRAL
