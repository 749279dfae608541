"""The settings of the model in a GGUF file. A setting that nothing reads is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from pdserve.checkpoint.gguf.file import GgufFile
from pdserve.core.errors import ConfigError

_ANY: Final = None
_NEUTRAL: Final[Mapping[str, tuple[object, ...] | None]] = {
    "vocab_size": _ANY,  # the embedding shows it
    "tensor_data_layout": _ANY,  # a remark of older converters
    "expert_count": (0,),
    "expert_used_count": _ANY,
    "attention.causal": (True,),
    "rope.scaling.finetuned": _ANY,  # a remark
    "rope.scaling.original_context_length": _ANY,  # only the kinds of scaling that are refused use it
    "rope.scaling.attn_factor": (1.0,),
}
"""Settings that are not read, each with the values that do not change the computation."""


class Metadata:
    """The settings of a file's architecture, by their names without it: `get("block_count")` is `llama.block_count`."""

    def __init__(self, gguf: GgufFile) -> None:
        """Take the settings of a file. Raises `ConfigError` when it does not name its architecture."""
        self.gguf = gguf
        self.architecture = str(gguf.require("general.architecture"))
        prefix = f"{self.architecture}."
        self._unread = {key.removeprefix(prefix) for key in gguf.keys if key.startswith(prefix)}

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting. `default`: it is missing."""
        self._unread.discard(name)
        return self.gguf.get(f"{self.architecture}.{name}", default)

    def require(self, name: str) -> Any:
        """Return a setting. Raises `ConfigError` when it is missing."""
        self._unread.discard(name)
        return self.gguf.require(f"{self.architecture}.{name}")

    def number(self, name: str, default: float | None = None) -> float:
        """Return the shortest number with the same float32: the file stores 1e-5 as 9.999999747378752e-06.

        Raises `ConfigError` when the setting is missing and has no default.
        """
        value = self.require(name) if default is None else self.get(name, default)
        return float(str(np.float32(value)))

    def head_dim(self) -> int:
        """Return the numbers of a head. Raises `ConfigError` when keys, values and rotations do not agree on it."""
        dim = int(self.get("attention.key_length", self.require("embedding_length") // self.require("attention.head_count")))
        if self.get("attention.value_length", dim) != dim:
            raise ConfigError(f"{self.gguf.path}: heads of values other than those of keys, {dim}, are not supported")
        if self.get("rope.dimension_count", dim) != dim:
            raise ConfigError(f"{self.gguf.path}: rotating only part of a head is not supported")
        return dim

    def kv_heads(self) -> int:
        """Return the number of KV heads."""
        return int(self.get("attention.head_count_kv", self.require("attention.head_count")))

    def linear_scaling(self) -> dict[str, Any] | None:
        """Return the rope scaling for config.json. None: there is none. Raises `ConfigError` for a kind that is not known.

        A factor without a kind is linear, as in llama.cpp.
        """
        kind, factor = self.get("rope.scaling.type", "linear"), self.number("rope.scaling.factor", 1.0)
        if kind not in ("none", "linear"):
            raise ConfigError(f"{self.gguf.path}: rope scaling {kind!r} is not supported")
        return None if kind == "none" or factor in (0.0, 1.0) else {"rope_type": "linear", "factor": factor}

    def check_all_read(self) -> None:
        """Raise `ConfigError` for a setting that was not read and could change the computation."""
        for name in sorted(self._unread):
            key = f"{self.architecture}.{name}"
            value = self.gguf.get(key)
            neutral = _NEUTRAL.get(name, ())
            if neutral is not _ANY and value not in neutral:
                raise ConfigError(f"{self.gguf.path}: {key} is {value!r:.100}, and this setting is not supported")
