"""The cut of per-token work into calls: all rows at once, or tiles whose row counts are known to give the same bits.

Matrix products and vectorised loops choose their kernel, thread split and scalar tail by shape. So the last bits of a row
depend on the number of rows that are computed with it, but not on its place among them or on its neighbours. One row count for
every call is batch-invariant, but then a single token costs as much as a full tile. Most kernels sum in one order for many row
counts (MKL's float32 products for all multiples of 4, oneDNN's bfloat16 products for all counts). So when a model is loaded,
the counts of `CANDIDATES` are tried on its own functions, and the counts that give the same bits as tiles of TILE_ROWS are used
too. A different order shows in about half of all numbers, so a few rows are enough to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

import torch
from torch import Tensor

TILE_ROWS: Final = 32
"""Rows of the standard tile: a multiple of every vector width in use, so rows of any width leave no scalar tail."""
CANDIDATES: Final = (1, 2, *range(4, TILE_ROWS, 4), 64, 128)
PROBE_ROWS: Final = max(CANDIDATES)

RowFunction = Callable[..., tuple[Tensor, ...]]
"""Function of tensors with equal first dimension that returns tensors of that first dimension. Row i depends on rows i
only."""
Sample = tuple[RowFunction, tuple[Tensor, ...]]
"""A row function, and inputs of PROBE_ROWS rows to try it on."""


class Rows(Protocol):
    """A way to cut the rows of a batch into calls of a row function."""

    def settle(self, samples: Iterable[Sample]) -> None:
        """Choose the row counts. It is called once before the first batch, with every function that `apply` will get."""

    def padded(self, count: int) -> int:
        """Return the number of rows that a batch of `count` rows must be padded to."""

    def apply(self, function: RowFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the result of `function` for the padded rows of `inputs`."""


class WholeRows:
    """Computes each batch in one call. This is fast, and the last bits may depend on the batch."""

    def settle(self, samples: Iterable[Sample]) -> None:
        """Do nothing: there is nothing to choose."""

    def padded(self, count: int) -> int:
        """Return `count`: no padding is needed."""
        return count

    def apply(self, function: RowFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call `function` once."""
        return function(*inputs)


class TiledRows:
    """Computes each batch in calls of row counts that give the same bits, so a row's bits do not depend on its batch."""

    def __init__(self, agree: Callable[[frozenset[int]], frozenset[int]] = lambda sizes: sizes) -> None:
        """agree: returns the row counts that all ranks of a gang have found, which must pad a batch alike."""
        self.sizes: tuple[int, ...] = (TILE_ROWS,)
        self._agree = agree

    def settle(self, samples: Iterable[Sample]) -> None:
        """Keep the row counts of `CANDIDATES` that give the same bits as tiles of TILE_ROWS for every function.

        All counts are tried on every function, because the ranks of a gang must call each function as often.
        """
        same = set(CANDIDATES)
        for function, inputs in samples:
            expected = _tiled(function, inputs, [TILE_ROWS] * (PROBE_ROWS // TILE_ROWS))
            same &= {size for size in CANDIDATES if _has_bits(function, inputs, expected, size)}
        self.sizes = tuple(sorted(self._agree(frozenset({*same, TILE_ROWS}))))

    def padded(self, count: int) -> int:
        """Return the sum of the row counts that a batch of `count` rows is cut into."""
        return sum(cut(count, self.sizes))

    def apply(self, function: RowFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call `function` on each tile and join the results. Asserts that the inputs are padded."""
        sizes = cut(inputs[0].shape[0], self.sizes)
        assert sum(sizes) == inputs[0].shape[0]
        return _tiled(function, inputs, sizes)


def cut(count: int, sizes: tuple[int, ...]) -> list[int]:
    """Return the row counts of the calls for `count` rows: large calls first, then one call for the last rows.

    Only the last call may be larger than its rows, so the sum is at least `count`. Cutting this sum again gives the same sum.
    sizes: the allowed counts, ascending; they contain TILE_ROWS, and all larger counts are multiples of it.
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
    """Tell whether the last `size` rows get their expected bits when they are computed alone."""
    found = function(*(x[-size:] for x in inputs))
    return all(torch.equal(a, b[-size:]) for a, b in zip(found, expected, strict=True))
