"""The scaling of rotary positions, read from config.json in its older or newer spelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.checkpoint.numbers import integer, real
from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import Llama3Scaling


def read_rope(config: Mapping[str, Any], default_theta: float = 10000.0) -> tuple[float, Llama3Scaling | None]:
    """Return (theta, scaling); scaling None: positions are not scaled. Raises `ConfigError` for an unknown scaling.

    transformers 5 writes both under `rope_parameters`. Before, `rope_theta` stood alone, and `rope_scaling` held the rest,
    with `type` as the oldest name of `rope_type`.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ConfigError(f"rope parameters other than one object for all layers are not supported, got {rope!r}")
    theta = real({"rope_theta": default_theta, **config, **rope}, "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(f"rope scaling {kind!r} is not supported; supported: 'default', 'llama3'")
    try:
        scaling = Llama3Scaling(
            factor=real(rope, "factor"),
            low_freq_factor=real(rope, "low_freq_factor"),
            high_freq_factor=real(rope, "high_freq_factor"),
            original_max_position=integer(rope, "original_max_position_embeddings"),
        )
    except KeyError as exc:
        raise ConfigError(f"llama3 rope scaling lacks {exc.args[0]}") from exc
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ConfigError(f"high_freq_factor must be above low_freq_factor {scaling.low_freq_factor:g}")
    return theta, scaling
