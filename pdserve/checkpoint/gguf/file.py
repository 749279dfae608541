"""The metadata and tensors of a GGUF file, with types. Only this module imports `gguf`.

It imports `gguf` only when a file is read: the import takes a while, and most starts find the converted copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.core.errors import ConfigError

MAGIC = b"GGUF"


class GgufFile:
    """One GGUF file, mapped into memory. A tensor is dequantised when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises `ConfigError` when it is not a readable and complete GGUF file."""
        self.path = path
        try:
            with path.open("rb") as head:
                magic = head.read(len(MAGIC))
            if magic != MAGIC:
                raise ConfigError(f"{path} is not a GGUF file: it starts with {magic!r}")
            self._reader = _open(path)
        except OSError as exc:
            raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
        except (ArithmeticError, LookupError, TypeError, ValueError) as exc:  # numpy raises these when the file is cut short
            raise ConfigError(f"{path} is not a complete GGUF file: {exc}") from exc
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The names of all tensors, in the file's order."""
        return tuple(self._tensors)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of all metadata."""
        return tuple(self._reader.fields)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, outermost dimension first, as in numpy and torch. GGUF itself writes innermost first.

        Raises `ConfigError` when the file lacks the tensor.
        """
        if name not in self._tensors:
            raise ConfigError(f"{self.path} lacks the tensor {name}")
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return a dequantised tensor: `shape(name)`, float32, C-contiguous.

        Raises `ConfigError` for an unknown quantisation.
        """
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as exc:
            raise ConfigError(f"{self.path}: {name} is quantised as {tensor.tensor_type.name}, which is not supported") from exc
        return np.ascontiguousarray(values, dtype=np.float32).reshape(self.shape(name))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a metadata value as plain Python: str, int, float, bool or a list of them. `default`: the key is missing."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """Return a metadata value, as `get` does. Raises `ConfigError` when the key is missing."""
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self.path} lacks the metadata {key}")
        return value


def _open(path: Path) -> Any:
    """Open the file with a reader that stops at the end of the file.

    gguf's own reader goes on past the end, where it reads empty numbers; a damaged count made it loop for ever.
    """
    from gguf import GGUFReader

    class GgufReader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> NDArray[Any]:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"it ends at byte {len(self.data)} and should have {end}")
            values: NDArray[Any] = super()._get(offset, dtype, count, override_order)
            return values

    return GgufReader(path)
