"""Settings that the configurations of several families share, and the refusal of settings that a family does not read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from pdserve.checkpoint.numbers import integer
from pdserve.checkpoint.rope import check_spellings
from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import Activation

MOST_LAYERS: Final = 4096
_ACTIVATIONS: Final[Mapping[str, Activation]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_NEUTRAL: Final[Mapping[str, Collection[object]]] = {
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "compression_config": (),
    "dual_chunk_attention_config": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "n_routed_experts": (),
    "no_rope_layer_interval": (),
    "no_rope_layers": (),
    "num_experts": (),
    "num_local_experts": (),
    "qk_layernorm": (False,),
    "qkv_bias": (False,),
    "quantization_config": (),
    "residual_multiplier": (1,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "sliding_window": (),
    "sliding_window_pattern": (),
    "text_config": (),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
"""Settings that change what a model computes, each with the values that change nothing. Null and empty are neutral too."""


def check_settings(config: Mapping[str, Any], *reads: str) -> None:
    """Raise `ConfigError` for a setting that would change what is computed and that the family does not read.

    It also refuses rotary positions in two spellings that contradict each other. config: as it was published, without
    defaults. reads: the names of the settings that the family reads.
    """
    for name, neutral in _NEUTRAL.items():
        value = config.get(name)
        if name not in reads and value not in (None, {}, []) and value not in neutral:
            raise ConfigError(f"{name} is not supported")
    if "layer_types" not in reads and any(kind != _FULL for kind in _layer_types(config) or ()):
        raise ConfigError(f"layer_types other than {_FULL!r} are not supported for this architecture")
    check_spellings(config)


def flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a setting that is true or false; missing and null are the default. Raises `ConfigError`."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r:.100}")
    return default if value is None else value


def must_be(config: Mapping[str, Any], name: str, *allowed: object) -> None:
    """Raise `ConfigError` for a setting that is neither missing nor null nor allowed."""
    value = config.get(name)
    if value is not None and value not in allowed:
        supported = ", ".join(repr(one) for one in allowed)
        raise ConfigError(f"{name} {value!r:.100} is not supported; supported: {supported}")


def layer_count(config: Mapping[str, Any]) -> int:
    """Return the number of layers. Raises `ConfigError` above `MOST_LAYERS`, before anything is made for each layer."""
    layers = integer(config, "num_hidden_layers")
    if layers > MOST_LAYERS:
        raise ConfigError(f"num_hidden_layers {layers} is over the limit of {MOST_LAYERS}")
    return layers


def expert_count(config: Mapping[str, Any]) -> int:
    """Return the number of experts, which has two names. Raises `ConfigError` when they contradict each other."""
    published, newer = config.get("num_experts"), config.get("num_local_experts")
    if published is not None and newer is not None and published != newer:
        raise ConfigError(f"num_experts is {published!r:.100} and num_local_experts {newer!r:.100}")
    return integer(config, "num_local_experts" if published is None else "num_experts")


def activation(config: Mapping[str, Any], name: str = "hidden_act") -> Activation:
    """Return the function of the gate; missing means silu. Raises `ConfigError`."""
    must_be(config, name, *_ACTIVATIONS)
    return _ACTIVATIONS[config.get(name) or "silu"]


def window_of(config: Mapping[str, Any]) -> int | None:
    """Return the window of all layers. Raises `ConfigError`, also for `layer_types`, which would contradict it."""
    if config.get("layer_types") is not None:
        raise ConfigError("layer_types is not supported for this architecture")
    return None if config.get("sliding_window") is None else integer(config, "sliding_window")


def windows_of(config: Mapping[str, Any], slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Return the window of each layer, None for a layer that sees all positions. Raises `ConfigError`.

    slides: says of the number of a layer that it has the window `sliding_window`; `layer_types` goes before it.
    """
    count, kinds = layer_count(config), _layer_types(config)
    if kinds is None:
        kinds = [_SLIDING if slides(layer) else _FULL for layer in range(count)]
    if len(kinds) != count:
        raise ConfigError(f"layer_types has {len(kinds)} names for {count} layers")
    if _SLIDING not in kinds:
        return (None,) * count
    window = integer(config, "sliding_window")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _layer_types(config: Mapping[str, Any]) -> list[str] | None:
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or any(kind not in (_FULL, _SLIDING) for kind in kinds):
        raise ConfigError(f"layer_types must be a list of {_FULL!r} and {_SLIDING!r}, got {kinds!r:.200}")
    return kinds
