"""How per-token work is cut into calls: all rows at once, or tiles of row counts that are known to give the same bits.

Matrix products and vectorised loops pick their kernels, their thread split and their scalar tails by shape, so the
last bits of a row depend on how many rows are computed with it. Its place among them and its neighbours do not touch
its bits. So one row count for every call is batch-invariant, but a lone token then costs as much as a full tile. Most
kernels sum in one order for many row counts (MKL's float32 products: all multiples of 4; oneDNN's bfloat16 ones: all), so
the counts of `CANDIDATES` are tried when a model is loaded, on its own functions: those that give the bits of tiles of
TILE_ROWS are used too. A different order shows in about half of all numbers, so a few rows decide it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

import torch
from torch import Tensor

TILE_ROWS: Final = 32
"""A multiple of every vector width in use, times any row width, leaves no scalar tail."""
CANDIDATES: Final = (1, 2, *range(4, TILE_ROWS, 4), 64, 128)
PROBE_ROWS: Final = max(CANDIDATES)

RowFunction = Callable[..., tuple[Tensor, ...]]
"""Tensors of equal first dimension in, tensors of that first dimension out; row i depends on rows i only."""
Sample = tuple[RowFunction, tuple[Tensor, ...]]
"""A function of rows, and inputs of PROBE_ROWS rows to try it on."""


class Rows(Protocol):
    def settle(self, samples: Iterable[Sample]) -> None:
        """Once, before the first batch: every function that `apply` will be asked for."""

    def padded(self, count: int) -> int:
        """Rows that a batch of `count` must be padded to."""

    def apply(self, function: RowFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`function` over the padded rows of `inputs`."""


class WholeRows:
    """One call, whatever the batch: fast."""

    def settle(self, samples: Iterable[Sample]) -> None:
        pass

    def padded(self, count: int) -> int:
        return count

    def apply(self, function: RowFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        return function(*inputs)


class TiledRows:
    """Calls of row counts that give the same bits: a row's bits do not depend on its batch."""

    def __init__(self) -> None:
        self.sizes: tuple[int, ...] = (TILE_ROWS,)

    def settle(self, samples: Iterable[Sample]) -> None:
        same = set(CANDIDATES)
        for function, inputs in samples:
            expected = _tiled(function, inputs, [TILE_ROWS] * (PROBE_ROWS // TILE_ROWS))
            same = {size for size in same if _has_bits(function, inputs, expected, size)}
        self.sizes = tuple(sorted({*same, TILE_ROWS}))

    def padded(self, count: int) -> int:
        return sum(cut(count, self.sizes))

    def apply(self, function: RowFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        sizes = cut(inputs[0].shape[0], self.sizes)
        assert sum(sizes) == inputs[0].shape[0]
        return _tiled(function, inputs, sizes)


def cut(count: int, sizes: tuple[int, ...]) -> list[int]:
    """Row counts of calls that take `count` rows: large ones first, and what is left below TILE_ROWS in one.

    sizes: ascending, with TILE_ROWS, and above it multiples of it only. What they add up to is cut into no more than itself.
    """
    pieces = []
    while count > TILE_ROWS:
        pieces.append(max(size for size in sizes if size <= count))
        count -= pieces[-1]
    if count > 0:
        pieces.append(min(size for size in sizes if size >= count))
    return pieces


def _tiled(function: RowFunction, inputs: tuple[Tensor, ...], sizes: list[int]) -> tuple[Tensor, ...]:
    if len(sizes) == 1:
        return function(*inputs)
    tiles = [function(*tile) for tile in zip(*(torch.split(x, sizes) for x in inputs), strict=True)]
    return tuple(torch.cat(parts) for parts in zip(*tiles, strict=True))


def _has_bits(function: RowFunction, inputs: tuple[Tensor, ...], expected: tuple[Tensor, ...], size: int) -> bool:
    """Whether the last `size` rows come out as expected when they are computed alone."""
    found = function(*(x[-size:] for x in inputs))
    return all(torch.equal(a, b[-size:]) for a, b in zip(found, expected, strict=True))
