"""Writing weights as safetensors, a bounded part in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from pdserve.core.errors import ConfigError

SHARD_BYTES: Final = 1 << 30  # the writer copies a shard once: up to 2 GiB of memory
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

Read = Callable[[str], NDArray[np.float32]]


def write_shards(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], read: Read, done: Callable[[int], None], *, limit: int = SHARD_BYTES
) -> None:
    """Write float32 tensors `shapes`, each got from `read(name)`, in order; `done(bytes)` after each tensor.

    One file when they fit `limit` bytes, else numbered files and an index, as Hugging Face names them.
    """
    shards = _plan(shapes, limit)
    where: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            tensors[name] = read(name)
            done(tensors[name].nbytes)
        try:
            save_file(tensors, directory / file, metadata={"format": "pt"})
        except SafetensorError as exc:  # how the library says that the disk is full
            raise ConfigError(f"cannot write {directory / file}: {exc}; set XDG_CACHE_HOME to a folder with room") from exc
        where |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(size_bytes(shape) for shape in shapes.values())
        (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2))


def size_bytes(shape: tuple[int, ...]) -> int:
    """Of a tensor in float32."""
    return 4 * math.prod(shape)


def _plan(shapes: Mapping[str, tuple[int, ...]], limit: int) -> list[list[str]]:
    """Names in order, cut before the tensor that would exceed the limit; a larger tensor stands alone."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        if shards[-1] and filled + size_bytes(shape) > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size_bytes(shape)
    return shards
