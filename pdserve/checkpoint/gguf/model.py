"""The model of a GGUF file as a checkpoint: its config.json and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdserve.checkpoint.gguf.architecture import Architecture, Array
from pdserve.checkpoint.gguf.file import GgufFile
from pdserve.checkpoint.gguf.gemma import GEMMA3
from pdserve.checkpoint.gguf.llama import LLAMA
from pdserve.checkpoint.gguf.metadata import Metadata
from pdserve.core.errors import ConfigError

ARCHITECTURES: Final[Mapping[str, Architecture]] = {"llama": LLAMA, "gemma3": GEMMA3}
"""The architectures by the names that GGUF files give them."""


class GgufModel:
    """The model of one file in the terms of its family. A tensor is read when it is asked for."""

    def __init__(self, gguf: GgufFile) -> None:
        """Find the architecture. Raises `ConfigError` for an unknown architecture, and for a part of a model."""
        self._metadata = Metadata(gguf)
        name = self._metadata.architecture
        if name not in ARCHITECTURES:
            supported = ", ".join(map(repr, ARCHITECTURES))
            raise ConfigError(f"{gguf.path}: architecture {name!r} is not supported; supported: {supported}")
        if (parts := gguf.get("split.count", 1)) > 1:
            raise ConfigError(f"{gguf.path} is one of {parts} parts of a model: merge them with `llama-gguf-split --merge`")
        self._architecture = ARCHITECTURES[name]

    def config(self) -> dict[str, Any]:
        """Return config.json. Raises `ConfigError` for a setting of the file that is not supported, by name."""
        return self._architecture.full_config(self._metadata)

    def tensor_names(self) -> dict[str, str]:
        """Return the GGUF name of each name of the checkpoint, in the file's order.

        Raises `ConfigError` for missing or unknown tensors.
        """
        return self._architecture.tensor_map(self._metadata)

    def tensor(self, gguf_name: str) -> Array:
        """Return one tensor in the layout of the checkpoint."""
        return self._architecture.restore(self._metadata, gguf_name, self._metadata.gguf.tensor(gguf_name))
