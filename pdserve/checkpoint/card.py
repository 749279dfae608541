"""The facts about a model that are read without loading its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pdserve.checkpoint import origin
from pdserve.checkpoint.fingerprint import fingerprint
from pdserve.checkpoint.layout import check_directory, read_json
from pdserve.checkpoint.rope import Llama3Scaling, read_rope
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KvSpec, gqa_group

_ARCHITECTURES: Final = ("LlamaForCausalLM",)
_DTYPES: Final = ("bfloat16", "float32")
KV_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp8_e4m3": "fp8_e4m3", "int8": "int8", "int4": "int4"}
"""The dtypes in which KV may be stored: the name in the configuration, and the name in a `KvGroup`."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A decoder of the Llama family: its shape, its special ids, its identity."""

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    fingerprint: str

    @classmethod
    def load(cls, directory: Path) -> ModelCard:
        """Read a directory in Hugging Face layout. Raises `ConfigError` that names the file and the setting."""
        check_directory(directory)
        path = directory / "config.json"
        config = read_json(path)
        try:
            return cls(
                name=origin.model_name(directory), **_shape(config), **_ids(directory, config),
                fingerprint=fingerprint(directory, config),
            )  # fmt: skip
        except KeyError as exc:
            raise ConfigError(f"{path} lacks {exc.args[0]}") from exc
        except (ArithmeticError, TypeError, ValueError) as exc:
            raise ConfigError(f"{path} holds a value of the wrong type or size: {exc}") from exc
        except ConfigError as exc:
            raise exc if str(directory) in exc.message else ConfigError(f"{path}: {exc.message}") from exc

    def kv_layout(self, block_size: int, dtype: str, kv_cache_dtype: str = "auto") -> KvSpec:
        """Return the layout of KV in blocks of `block_size` tokens. Both dtypes have the names of the configuration.

        Raises `ConfigError` for an unknown dtype, or for one in which a block of this model is not a whole number of words.
        """
        stored = resolve_kv_dtype(kv_cache_dtype, dtype)
        return KvSpec((gqa_group(self.num_layers, self.num_kv_heads, self.head_dim, block_size, stored),))


def resolve_dtype(dtype: str) -> str:
    """Return the dtype that a configured name means: "auto" is bfloat16. Raises `ConfigError` for an unknown name."""
    if dtype == "auto":
        return "bfloat16"
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype must be one of auto, {', '.join(_DTYPES)}, got {dtype!r}")
    return dtype


def resolve_kv_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """Return the dtype of KV that the configured names mean. `kv_cache_dtype` "auto" takes the model's `dtype`.

    Raises `ConfigError` for an unknown name.
    """
    computed = resolve_dtype(dtype)
    if kv_cache_dtype == "auto":
        return computed
    if kv_cache_dtype not in KV_DTYPES:
        raise ConfigError(f"kv_cache_dtype must be one of auto, {', '.join(KV_DTYPES)}, got {kv_cache_dtype!r}")
    return KV_DTYPES[kv_cache_dtype]


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    _check_plain(config)
    num_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    theta, scaling = read_rope(config)
    return {
        "architecture": config["architectures"][0],
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": int(config["hidden_size"]),
        "intermediate_size": int(config["intermediate_size"]),
        "num_layers": int(config["num_hidden_layers"]),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": int(config.get("head_dim") or config["hidden_size"] // num_heads),
        "max_position": int(config["max_position_embeddings"]),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_norm_eps": float(config["rms_norm_eps"]),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def _check_plain(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a feature that the engine lacks, because it would otherwise serve wrong tokens."""
    architectures = config.get("architectures") or ["(none)"]
    if architectures[0] not in _ARCHITECTURES:
        raise ConfigError(f"architecture {architectures[0]} is not supported; supported: {', '.join(_ARCHITECTURES)}")
    for name in ("attention_bias", "mlp_bias", "quantization_config"):
        if config.get(name):
            raise ConfigError(f"{name} is not supported")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act {activation!r} is not supported; supported: 'silu'")


def _ids(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special ids. The ids that end a request are those of config.json and of generation_config.json together."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    eos = {index for source in (config, generation) for index in _as_list(source.get("eos_token_id"))}
    bos = config.get("bos_token_id", generation.get("bos_token_id"))
    return {"eos_token_ids": tuple(sorted(eos)), "bos_token_id": None if bos is None else int(bos)}


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list) else [int(value)]
