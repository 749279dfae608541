"""Llama models in GGUF files."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pdserve.checkpoint.families.llama import LLAMA as FAMILY
from pdserve.checkpoint.gguf.architecture import Architecture, Array
from pdserve.checkpoint.gguf.metadata import Metadata
from pdserve.core.errors import ConfigError

LAYER: Final = {
    "attn_norm.weight": "attention_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_output.weight": "attention_out",
    "ffn_norm.weight": "mlp_norm",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
}
_ROPE_FACTORS: Final = "rope_freqs.weight"
_LLAMA3_FACTORS: Final = (8.0, 32.0)  # Llama 3.1 and 3.3; Llama 3.2
_LLAMA3_REST: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _config(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of a Llama, with the older names of the rope settings, which every reader knows."""
    if metadata.get("expert_count", 0):
        raise ConfigError(f"{metadata.gguf.path}: a mixture of experts is not supported")
    return {
        "model_type": "llama",
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata),
        "hidden_act": "silu",
        "mlp_bias": False,
    }


def _restore(metadata: Metadata, name: str, weight: Array) -> Array:
    """Return one tensor in Hugging Face's layout.

    llama.cpp rotates neighbouring rows (2i, 2i+1) of a head, while Hugging Face rotates rows (i, i + head_dim/2) of its
    halves. So GGUF stores the rows of q and k interleaved, and this function puts them back.
    """
    if name.endswith("attn_q.weight"):
        return _halves(weight, metadata.require("attention.head_count"))
    if name.endswith("attn_k.weight"):
        return _halves(weight, metadata.kv_heads())
    return weight


def _halves(weight: Array, num_heads: int) -> Array:
    """Sort the interleaved rows of each head into two halves. weight and result: [num_heads * head_dim, in]."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    """Return the parameters of linear or of Llama 3.1's rope scaling; None: the model has none.

    A GGUF file holds only the result of Llama 3.1's scaling, one factor for each frequency. So all published parameters are
    tried. Raises `ConfigError` when none of them gives the factors.
    """
    gguf, linear = metadata.gguf, metadata.linear_scaling()
    if _ROPE_FACTORS not in gguf.tensor_names:
        return linear
    if linear is not None:
        raise ConfigError(f"{gguf.path}: rope factors together with linear rope scaling are not supported")
    stored = gguf.tensor(_ROPE_FACTORS)
    theta = metadata.get("rope.freq_base", 10000.0)
    for factor in _LLAMA3_FACTORS:
        if np.allclose(stored, llama3_factors(theta, metadata.head_dim(), factor), rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3_REST}
    raise ConfigError(f"{gguf.path}: its rope factors match no known Llama 3 model")


def llama3_factors(theta: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    """Return the divisor of each rotation frequency: [head_dim / 2], float64.

    Llama 3.1 divides the frequencies of long wavelengths by `factor`, keeps the frequencies of short wavelengths, and uses a
    ramp in between.
    """
    low, high = _LLAMA3_REST["low_freq_factor"], _LLAMA3_REST["high_freq_factor"]
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_REST["original_max_position_embeddings"] / wavelength  # turns within the context of the first training
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))


LLAMA: Final = Architecture(FAMILY, LAYER, _config, _restore, extra=(_ROPE_FACTORS,))
