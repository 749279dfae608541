"""The facts about a model that are read without loading its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pdserve.checkpoint import origin
from pdserve.checkpoint.families.family import TensorNames
from pdserve.checkpoint.families.registry import FAMILIES, family_of
from pdserve.checkpoint.families.unread import unread_family
from pdserve.checkpoint.fingerprint import fingerprint
from pdserve.checkpoint.layout import check_directory, read_json
from pdserve.checkpoint.numbers import token_id
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KvSpec
from pdserve.core.model_spec import ModelSpec

_DTYPES: Final = ("bfloat16", "float32")
KV_ALIASES: Final = {"fp8": "fp8_e4m3"}
"""Further names of dtypes of KV, as vLLM knows them."""
KV_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp8_e4m3": "fp8_e4m3", "int8": "int8", "int4": "int4"}
"""The dtypes in which KV may be stored: the name in the configuration, and the name in a `KvGroup`."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A decoder: what it computes (`spec`), how its tensors are called, its special ids, its identity."""

    name: str
    architecture: str
    spec: ModelSpec
    tensors: TensorNames
    eos_token_ids: tuple[int, ...]
    fingerprint: str

    @classmethod
    def load(cls, directory: Path, family: str | None = None, *, load_format: str = "auto", foreign: bool = False) -> ModelCard:
        """Read a directory in Hugging Face layout. Raises `ConfigError` that names the file and the setting.

        family: the setting `engine.model_family`. None takes the built-in family of the model's architecture.
        foreign: another engine computes the model, so an architecture without a family is none of our concern.
        load_format: the setting `engine.load_format`. "dummy" needs no file of weights, and gives another fingerprint.
        """
        dummy = load_format == "dummy"
        check_directory(directory, weights=not dummy)
        path = directory / "config.json"
        config = read_json(path)
        try:
            name, architecture = origin.model_name(directory), _architecture(config)
            unread = foreign and family is None and architecture not in FAMILIES
            reader = unread_family(architecture) if unread else family_of(architecture, family)
            spec, eos = reader.read(config), _eos_ids(directory, config)
            return cls(name, architecture, spec, reader.tensors, eos, fingerprint(directory, config, dummy=dummy))
        except KeyError as exc:
            raise ConfigError(f"{path} lacks {exc.args[0]}") from exc
        except (ArithmeticError, TypeError, ValueError) as exc:
            raise ConfigError(f"{path} holds a value of the wrong type or size: {exc}") from exc
        except ConfigError as exc:
            raise exc if str(directory) in exc.message else ConfigError(f"{path}: {exc.message}") from exc

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.spec.vocab_size

    @property
    def max_position(self) -> int:
        """The number of positions that the model was made for."""
        return self.spec.max_position

    def kv_layout(self, block_size: int, dtype: str, kv_cache_dtype: str = "auto") -> KvSpec:
        """Return the layout of KV in blocks of `block_size` tokens. Both dtypes have the names of the configuration.

        Raises `ConfigError` for an unknown dtype, or for one in which a block of this model is not a whole number of words.
        """
        return self.spec.kv_spec(block_size, resolve_kv_dtype(kv_cache_dtype, dtype))


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
    kv_cache_dtype = KV_ALIASES.get(kv_cache_dtype, kv_cache_dtype)
    if kv_cache_dtype not in KV_DTYPES:
        raise ConfigError(f"kv_cache_dtype must be one of auto, {', '.join(KV_DTYPES)}, got {kv_cache_dtype!r}")
    return KV_DTYPES[kv_cache_dtype]


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or ["(none)"]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise ConfigError(f"architectures must be a list of names, got {architectures!r:.100}")
    return architectures[0]


def _eos_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a request, ascending. They come from config.json, from the language model inside it, and from
    generation_config.json."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    inner = config.get("text_config") or {}
    eos = {index for source in (config, inner, generation) for index in _eos_of(source)}
    return tuple(sorted(eos))


def _eos_of(config: Mapping[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    if value is None:
        return []
    return [token_id("eos_token_id", one) for one in (value if isinstance(value, list) else [value])]
