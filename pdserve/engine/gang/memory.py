"""Memory that all ranks of a gang have mapped."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

import torch
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import ModelSpec, MoeSpec
from pdserve.core.shards import Degrees, RankShare
from pdserve.engine.native import library

MOST_TIMEOUT_S: Final = 1e9
"""A longer time, also an infinite one, is as good as this."""


class SharedMemory:
    """A piece of memory that another process maps by its descriptor. Pages that nobody has touched cost nothing."""

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        """Make `nbytes` of zeroed memory, or map those of a descriptor. Raises `ConfigError` when the machine cannot."""
        try:
            self.descriptor = os.memfd_create("pdserve-gang") if descriptor is None else descriptor
            if descriptor is None:
                os.ftruncate(self.descriptor, nbytes)
            self._map = mmap.mmap(self.descriptor, nbytes)
        except (OSError, OverflowError) as exc:
            raise ConfigError(f"{nbytes} B that ranks share are more than this machine can give: {exc}") from exc
        if descriptor is not None:
            self.close_descriptor()
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        """[nbytes] uint8. It keeps the memory mapped."""

    def close_descriptor(self) -> None:
        """Close the descriptor, which nobody can map from now on. The memory stays mapped."""
        os.close(self.descriptor)

    @property
    def address(self) -> int:
        """The address in this process."""
        return self.bytes.data_ptr()


def gang_layout(
    spec: ModelSpec, degrees: Degrees, *, rows: int, table_blocks: int, groups: int, timeout_s: float
) -> library.NativeGang:
    """Return the description of a gang's meeting place, without its memory, for steps of at most `rows` tokens.

    A sequence has at most `table_blocks` blocks in each of `groups` KV groups. A rank that waits longer than `timeout_s` gives
    the gang up.
    """
    slots = max((layer.mlp.experts_per_token for layer in spec.layers if isinstance(layer.mlp, MoeSpec)), default=0)
    # Of 4 bytes, with room for rounding. Each sequence has a row at least.
    words = 64 + 5 * rows + groups * (2 * rows + rows * table_blocks + 4)
    widths = (max(layer.attention.out_width, layer.mlp.intermediate) for layer in spec.layers)
    gathered = max(widths) if RankShare(spec, degrees).gathers else 0
    return library.NativeGang(
        0, degrees.tensor, 0, degrees.pipeline, rows, rows * (1 + slots), spec.hidden_size, spec.vocab_size, gathered,
        4 * words, int(1000 * min(timeout_s, MOST_TIMEOUT_S)), None,
    )  # fmt: skip


def gang_bytes(layout: library.NativeGang) -> int:
    """Return the bytes of a gang's meeting place."""
    loaded = library.load()
    assert loaded is not None
    nbytes: int = loaded.pdserve_gang_bytes(ctypes.byref(layout))
    return nbytes


def place_of(layout: library.NativeGang, share: RankShare, memory: SharedMemory) -> library.NativeGang:
    """Return the place of one rank in a gang, with the memory as this process has mapped it."""
    own = library.NativeGang.from_buffer_copy(layout)
    own.rank, own.stage, own.memory = share.rank, share.stage, memory.address
    return own


def lose(gang: library.NativeGang) -> None:
    """End a gang: its ranks leave their steps, and compute no other."""
    loaded = library.load()
    assert loaded is not None
    loaded.pdserve_gang_lose(ctypes.byref(gang))
