"""The writer of weights as safetensors. It keeps only a bounded part of them in memory at a time."""

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

SHARD_BYTES: Final = 1 << 30  # the writer copies a shard once, so it needs up to 2 GiB of memory
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

Read = Callable[[str], NDArray[np.float32]]


def write_shards(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], read: Read, done: Callable[[int], None], *, limit: int = SHARD_BYTES
) -> None:
    """Write the float32 tensors of `shapes` in order. `read(name)` gets each one, and `done(bytes)` is called after it.

    Tensors that fit `limit` bytes become one file. Others become numbered files and an index, named as on Hugging Face.
    Raises `ConfigError` when a file cannot be written.
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
        except SafetensorError as exc:  # the library raises this when the disk is full
            raise ConfigError(f"cannot write {directory / file}: {exc}; set XDG_CACHE_HOME to a folder with room") from exc
        where |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(size_bytes(shape) for shape in shapes.values())
        (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2))


def size_bytes(shape: tuple[int, ...]) -> int:
    """Return the size of a float32 tensor."""
    return 4 * math.prod(shape)


def _plan(shapes: Mapping[str, tuple[int, ...]], limit: int) -> list[list[str]]:
    """Divide the names, in order, into shards of at most `limit` bytes. A tensor that is larger than `limit` has a shard of its
    own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        if shards[-1] and filled + size_bytes(shape) > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size_bytes(shape)
    return shards
