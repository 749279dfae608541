"""Gemma 3 models in GGUF files.

The file does not say everything that the model computes. What llama.cpp adds by itself (`src/models/gemma3.cpp`) is added
here too: the theta of the local layers, that every sixth layer is global, and the scale of the scores.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from pdserve.checkpoint.families.gemma import GEMMA3 as FAMILY
from pdserve.checkpoint.gguf.architecture import Architecture, Array
from pdserve.checkpoint.gguf.llama import LAYER
from pdserve.checkpoint.gguf.metadata import Metadata
from pdserve.core.errors import ConfigError

_NORMS: Final = {
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
    "post_attention_norm.weight": "post_attention_norm",
    "post_ffw_norm.weight": "post_mlp_norm",
}
_LOCAL_THETA: Final = 10000.0
_PATTERN: Final = 6
_LAYERS_27B: Final = 62  # only this size scales scores by the hidden size of a head instead of its dimension


def _config(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of a Gemma 3, with the older names of the rope settings. They scale the global layers only."""
    window = metadata.get("attention.sliding_window", 0)
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window or metadata.require("context_length"),  # no layer has it, but transformers wants a number
        "layer_types": ["sliding_attention" if local and window else "full_attention" for local in _locals(metadata)],
        "rope_theta": metadata.number("rope.freq_base"),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", _LOCAL_THETA),
        "rope_scaling": metadata.linear_scaling(),
        "query_pre_attn_scalar": _scalar(metadata),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
    }


def _locals(metadata: Metadata) -> list[bool]:
    """Return for each layer whether it is local. The file may list that, or say which layers are global, as every n-th."""
    pattern, count = metadata.get("attention.sliding_window_pattern", _PATTERN), metadata.require("block_count")
    if not isinstance(pattern, list):
        return [pattern == 0 or (layer + 1) % pattern > 0 for layer in range(count)]
    if len(pattern) != count:
        raise ConfigError(f"{metadata.gguf.path}: its sliding_window_pattern is of {len(pattern)} layers, and it has {count}")
    return [bool(local) for local in pattern]


def _scalar(metadata: Metadata) -> int:
    if metadata.require("block_count") == _LAYERS_27B:
        return int(metadata.require("embedding_length") // metadata.require("attention.head_count"))
    return metadata.head_dim()


def _restore(metadata: Metadata, name: str, weight: Array) -> Array:
    """Return one tensor in Hugging Face's layout. GGUF stores the norms with the 1 that Gemma adds to their weights already
    added.

    Rotations need no change: both sides rotate the halves of a head.
    """
    return weight - np.float32(1) if name.endswith("norm.weight") else weight


GEMMA3: Final = Architecture(FAMILY, {**LAYER, **_NORMS}, _config, _restore)
