"""The Llama model of a GGUF file in the terms of `families.llama`: config.json, and the names and layout of the tensors."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pdserve.checkpoint.families.llama import LLAMA, NAMES
from pdserve.checkpoint.gguf_file import GgufFile
from pdserve.core.errors import ConfigError

_GLOBAL: Final = {"token_embd.weight": NAMES.embedding, "output_norm.weight": NAMES.norm, "output.weight": NAMES.head}
_LAYER: Final = {
    "attn_norm.weight": NAMES.layer["attention_norm"],
    "attn_q.weight": NAMES.layer["q"],
    "attn_k.weight": NAMES.layer["k"],
    "attn_v.weight": NAMES.layer["v"],
    "attn_output.weight": NAMES.layer["attention_out"],
    "ffn_norm.weight": NAMES.layer["mlp_norm"],
    "ffn_gate.weight": NAMES.layer["gate"],
    "ffn_up.weight": NAMES.layer["up"],
    "ffn_down.weight": NAMES.layer["down"],
}
_ROPE_FACTORS: Final = "rope_freqs.weight"
_LLAMA3_FACTORS: Final = (8.0, 32.0)  # Llama 3.1 and 3.3; Llama 3.2
_LLAMA3_REST: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def check_supported(gguf: GgufFile) -> None:
    """Raise `ConfigError` that names the feature, if the file has one that a plain Llama decoder lacks."""
    architecture = gguf.require("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{gguf.path}: architecture {architecture!r} is not supported; supported: 'llama'")
    if gguf.get("llama.expert_count", 0):
        raise ConfigError(f"{gguf.path}: a mixture of experts is not supported")
    scaling = gguf.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ConfigError(f"{gguf.path}: rope scaling {scaling!r} is not supported")
    head_dim = _head_dim(gguf)
    if gguf.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(f"{gguf.path}: rotating only part of a head is not supported")


def tensor_map(gguf: GgufFile) -> dict[str, str]:
    """Return the GGUF name of each Hugging Face name, in the file's order.

    Raises `ConfigError` for missing or unknown tensors.
    """
    expected = dict(_GLOBAL)
    for layer in range(gguf.require("llama.block_count")):
        expected |= {f"blk.{layer}.{name}": published.format(layer=layer) for name, published in _LAYER.items()}
    present = [name for name in gguf.tensor_names if name != _ROPE_FACTORS]
    unknown = [name for name in present if name not in expected]
    missing = sorted(set(expected) - set(present) - {"output.weight"})  # it is absent where the head is tied
    if unknown or missing:
        raise ConfigError(f"{gguf.path} is not a plain Llama: unknown tensors {unknown[:3]}, missing {missing[:3]}")
    return {expected[name]: name for name in present}


def read_tensor(gguf: GgufFile, name: str) -> NDArray[np.float32]:
    """Return one tensor in Hugging Face's layout.

    llama.cpp rotates neighbouring rows (2i, 2i+1) of a head, while Hugging Face rotates rows (i, i + head_dim/2) of its
    halves. So GGUF stores the rows of q and k interleaved, and this function puts them back.
    """
    weight = gguf.tensor(name)
    if name.endswith("attn_q.weight"):
        return _halves(weight, gguf.require("llama.attention.head_count"))
    if name.endswith("attn_k.weight"):
        return _halves(weight, _num_kv_heads(gguf))
    return weight


def _halves(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Sort the interleaved rows of each head into two halves. weight and result: [num_heads * head_dim, in]."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def hf_config(gguf: GgufFile) -> dict[str, Any]:
    """Return config.json, with the older names of the rope settings, which every reader knows."""
    return {
        "architectures": [LLAMA.architecture],
        "model_type": "llama",
        "vocab_size": gguf.shape("token_embd.weight")[0],
        "hidden_size": gguf.require("llama.embedding_length"),
        "intermediate_size": gguf.require("llama.feed_forward_length"),
        "num_hidden_layers": gguf.require("llama.block_count"),
        "num_attention_heads": gguf.require("llama.attention.head_count"),
        "num_key_value_heads": _num_kv_heads(gguf),
        "head_dim": _head_dim(gguf),
        "max_position_embeddings": gguf.require("llama.context_length"),
        "rope_theta": _shortest(gguf.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(gguf),
        "rms_norm_eps": _shortest(gguf.require("llama.attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensor_names,
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": gguf.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def _num_kv_heads(gguf: GgufFile) -> int:
    return int(gguf.get("llama.attention.head_count_kv", gguf.require("llama.attention.head_count")))


def _head_dim(gguf: GgufFile) -> int:
    default = gguf.require("llama.embedding_length") // gguf.require("llama.attention.head_count")
    return int(gguf.get("llama.attention.key_length", default))


def _shortest(value: float) -> float:
    """Return the shortest number with the same float32: the file stores 1e-5 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(gguf: GgufFile) -> dict[str, Any] | None:
    """Return the parameters of Llama 3.1's rope scaling; None: the model has none.

    A GGUF file holds only the result of the scaling, one factor for each frequency. So all published parameters are
    tried. Raises `ConfigError` when none of them gives the factors.
    """
    if _ROPE_FACTORS not in gguf.tensor_names:
        return None
    stored = gguf.tensor(_ROPE_FACTORS)
    theta = gguf.get("llama.rope.freq_base", 10000.0)
    for factor in _LLAMA3_FACTORS:
        if np.allclose(stored, _llama3_factors(theta, _head_dim(gguf), factor), rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3_REST}
    raise ConfigError(f"{gguf.path}: its rope factors match no known Llama 3 model")


def _llama3_factors(theta: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    """Return the divisor of each rotation frequency: [head_dim / 2], float64.

    Llama 3.1 divides the frequencies of long wavelengths by `factor`, keeps those of short ones, with a ramp between.
    """
    low, high = _LLAMA3_REST["low_freq_factor"], _LLAMA3_REST["high_freq_factor"]
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_REST["original_max_position_embeddings"] / wavelength  # turns within the context of the first training
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))
