"""A GGUF file's metadata and tensors, typed. The only file that imports `gguf`.

`gguf` is not imported before a file is read: it takes a while, and most starts find the converted copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.core.errors import ConfigError

MAGIC = b"GGUF"


class GgufFile:
    """Memory-mapped; tensors are dequantised when asked for, one at a time."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` when the file is not a readable GGUF."""
        self.path = path
        try:
            with path.open("rb") as head:
                magic = head.read(len(MAGIC))
            if magic != MAGIC:
                raise ConfigError(f"{path} is not a GGUF file: it starts with {magic!r}")
            self._reader = _open(path)
        except OSError as exc:
            raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
        except (ArithmeticError, LookupError, TypeError, ValueError) as exc:  # what numpy raises where it is cut short
            raise ConfigError(f"{path} is not a complete GGUF file: {exc}") from exc
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Outermost dimension first, as numpy and torch write it (GGUF itself says innermost first)."""
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Dequantised, float32, C-contiguous, of `shape(name)`. Raises `ConfigError` for an unknown quantisation."""
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as exc:
            raise ConfigError(f"{self.path}: {name} is quantised as {tensor.tensor_type.name}, which is not supported") from exc
        return np.ascontiguousarray(values, dtype=np.float32).reshape(self.shape(name))

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value as plain Python (str, int, float, bool or a list of them)."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self.path} lacks the metadata {key}")
        return value


def _open(path: Path) -> Any:
    """gguf's own reader goes on past the end, where numbers have no bytes: a damaged count made it loop for ever."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> NDArray[Any]:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"it ends at byte {len(self.data)} and should have {end}")
            values: NDArray[Any] = super()._get(offset, dtype, count, override_order)
            return values

    return Reader(path)
