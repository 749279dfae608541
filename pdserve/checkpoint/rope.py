"""Rotary positions, read from config.json in its older or newer spelling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from pdserve.checkpoint.numbers import integer, real
from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import LinearScaling, Llama3Scaling, RopeScaling, RopeSpec, YarnScaling

_COMMON: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
LEAST_TURNS: Final = 1e-9
"""The least `beta_slow`. Published models have 1, and the ramp of a number near 0 would end at infinity."""
_OUTER: Final = ("rope_theta", "partial_rotary_factor")
"""Settings that older configurations have outside of the object with the scaling."""
_OWN: Final[Mapping[str, frozenset[str]]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor",
        "truncate",
    }),
}  # fmt: skip
"""The settings that each kind of scaling has."""


def read_rope(config: Mapping[str, Any], head_dim: int | None = None) -> RopeSpec:
    """Return the rotary positions. A missing `rope_theta` is 10000. Raises `ConfigError` for what is not known, by name.

    head_dim: the numbers of a head, of which `partial_rotary_factor` may rotate a part. None refuses a part of a head.
    """
    rope = rope_settings(config)
    theta = real({"rope_theta": 10000.0, **config, **rope}, "rope_theta")
    kind = _kind(rope)
    for name in rope:
        if name not in _COMMON | _OWN[kind]:
            raise ConfigError(f"rope setting {name} is not supported with rope scaling {kind!r}")
    try:
        scaling = _scaling(kind, rope, config, theta)
    except KeyError as exc:
        raise ConfigError(f"{kind} rope scaling lacks {exc.args[0]}") from exc
    return RopeSpec(theta, scaling, _part(config, rope, head_dim))


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the scaling that are not null. Raises `ConfigError` when they are not one object for all layers.

    transformers 5 writes them and `rope_theta` under `rope_parameters`. Earlier versions wrote `rope_theta` alone and the rest
    under `rope_scaling`, with `type` as the oldest name of `rope_type`.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ConfigError(f"rope parameters other than one object for all layers are not supported, got {rope!r:.200}")
    return {name: value for name, value in rope.items() if value is not None}


def check_spellings(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` when two spellings of the rotary positions give a setting different values.

    A published configuration may hold both spellings for older readers, and neither may be ignored. config: as it was
    published. NaN and spellings of a wrong type are left to `read_rope`.
    """
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    full = newer.get("full_attention", newer) if isinstance(newer, Mapping) else {}
    found: dict[str, Any] = {}
    for spelling in (full, older, {name: config.get(name) for name in _OUTER}):
        for name, value in spelling.items() if isinstance(spelling, Mapping) else ():
            name = "rope_type" if name == "type" else name
            if value is not None and value == value and found.setdefault(name, value) != value:  # NaN differs from itself
                raise ConfigError(f"{name} is {found[name]!r:.100} and {value!r:.100} in two spellings of the rotary positions")


def yarn_size(factor: float, mscale: float = 1.0) -> float:
    """Return the size that YaRN gives to cosines and sines (Peng et al. 2023, section 3.4), with DeepSeek's `mscale`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _kind(rope: Mapping[str, Any]) -> str:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _OWN:
        supported = ", ".join(repr(name) for name in _OWN)
        raise ConfigError(f"rope scaling {kind!r:.100} is not supported; supported: {supported}")
    return kind


def _scaling(kind: str, rope: Mapping[str, Any], config: Mapping[str, Any], theta: float) -> RopeScaling | None:
    match kind:
        case "linear":
            return LinearScaling(real(rope, "factor"))
        case "llama3":
            return _llama3(rope, config)
        case "yarn":
            return _yarn(rope, config, theta)
    return None


def _llama3(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=real(rope, "factor"),
        low_freq_factor=real(rope, "low_freq_factor"),
        high_freq_factor=real(rope, "high_freq_factor"),
        original_max_position=_original(rope, config),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ConfigError(f"high_freq_factor must be above low_freq_factor {scaling.low_freq_factor:g}")
    return scaling


def _yarn(rope: Mapping[str, Any], config: Mapping[str, Any], theta: float) -> YarnScaling:
    if theta <= 1:
        raise ConfigError(f"rope_theta must be above 1 with yarn rope scaling, got {theta:g}")
    original = _original(rope, config)
    factor = real(rope, "factor") if "factor" in rope else integer(config, "max_position_embeddings") / original
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ConfigError(f"truncate must be true or false, got {truncate!r:.100}")
    betas = {name: real({name: default, **rope}, name) for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))}
    if betas["beta_slow"] < LEAST_TURNS:
        raise ConfigError(f"beta_slow must be at least {LEAST_TURNS:g}, got {betas['beta_slow']:g}")
    if betas["beta_fast"] < betas["beta_slow"]:
        raise ConfigError(f"beta_fast must be at least beta_slow {betas['beta_slow']:g}, got {betas['beta_fast']:g}")
    if "attention_factor" in rope:
        size = real(rope, "attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        size = yarn_size(factor, real(rope, "mscale")) / yarn_size(factor, real(rope, "mscale_all_dim"))
    else:
        size = yarn_size(factor)
    return YarnScaling(factor, original, attention_factor=size, truncate=truncate, **betas)


def _original(rope: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Return the positions that the model was made for before scaling. Two settings may say it, and they must agree."""
    name = "original_max_position_embeddings"
    outer = config.get(name)
    original = integer(rope if outer is None else {name: outer, **rope}, name)
    if outer is not None and outer != original:
        raise ConfigError(f"{name} is {outer!r:.100}, and {original} in the rope scaling")
    return original


def _part(config: Mapping[str, Any], rope: Mapping[str, Any], head_dim: int | None) -> int | None:
    """Return the numbers of a head that are rotated. None: all."""
    part = {**config, **rope}.get("partial_rotary_factor")
    if part is None or real({"partial_rotary_factor": part}, "partial_rotary_factor") == 1:
        return None
    if head_dim is None:
        raise ConfigError(f"partial_rotary_factor {part:g} is not supported for this architecture")
    dim = int(head_dim * part)
    if dim % 2 or not 0 < dim <= head_dim:
        raise ConfigError(
            f"partial_rotary_factor {part:g} rotates {dim} of {head_dim} numbers, and rotary positions need pairs"
        )
    return None if dim == head_dim else dim
