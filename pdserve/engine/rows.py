"""How per-token work is cut into calls: all rows at once, or tiles of a fixed number of rows.

Matrix products and vectorised loops pick their kernels, their thread split and their scalar tails by shape, so the
last bits of a row depend on how many rows are computed with it. When every call has the same shape that cause is
gone, and what is left (the row's place in the tile, its neighbours) does not touch its bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import Tensor

TILE_ROWS: Final = 32
"""A multiple of every vector width in use, times any row width, leaves no scalar tail."""

RowFunction = Callable[..., tuple[Tensor, ...]]
"""Tensors of equal first dimension in, tensors of that first dimension out; row i depends on rows i only."""


class Rows(Protocol):
    def padded(self, count: int) -> int:
        """Rows that a batch of `count` must be padded to."""

    def apply(self, function: RowFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`function` over the padded rows of `inputs`."""


class WholeRows:
    """One call, whatever the batch: fast."""

    def padded(self, count: int) -> int:
        return count

    def apply(self, function: RowFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        return function(*inputs)


class TiledRows:
    """One call for each TILE_ROWS rows: a row's bits do not depend on its batch."""

    def padded(self, count: int) -> int:
        return -(-count // TILE_ROWS) * TILE_ROWS

    def apply(self, function: RowFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        assert inputs[0].shape[0] % TILE_ROWS == 0
        tiles = [function(*tile) for tile in zip(*(torch.split(x, TILE_ROWS) for x in inputs), strict=True)]
        if len(tiles) == 1:
            return tiles[0]
        return tuple(torch.cat(parts) for parts in zip(*tiles, strict=True))
