"""Models that pdserve's engine does not read and another engine computes: only the shape of their KV is guessed here.

Lengths, places in pools and the sizes of handoffs are counted with it. No weight is read, and nothing is computed with the
spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdserve.checkpoint.families.family import Family
from pdserve.checkpoint.families.llama import NAMES, llama_spec
from pdserve.checkpoint.numbers import integer
from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import ModelSpec, RopeSpec

_LENGTHS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
"""The names under which published configurations tell their number of positions."""


def unread_family(architecture: str) -> Family:
    """Return a family that reads the shape of any decoder whose configuration has the usual names."""
    return Family(architecture, read_shape, NAMES)


def read_shape(config: Mapping[str, Any]) -> ModelSpec:
    """Return a spec with the model's layers, heads and positions. All layers count as full attention with the same heads.

    Raises `ConfigError` for a configuration that does not tell its number of positions, and KeyError for other settings.
    """
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    length = next((name for name in _LENGTHS if config.get(name)), None)
    if length is None:
        raise ConfigError(f"config.json tells no number of positions: one of {', '.join(_LENGTHS)} is needed")
    head_dim = integer(config, "head_dim", max(1, hidden // heads))
    return llama_spec(
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(config, "intermediate_size", 4 * hidden),
        heads=heads,
        kv_heads=[integer(config, "num_key_value_heads", heads)] * integer(config, "num_hidden_layers"),
        head_dim=head_dim,
        max_position=integer(config, length),
        rope=RopeSpec(10_000.0),
        eps=1e-5,
        tied_head=False,
    )
