"""The columns of products, which the ranks of a gang share in torch's steps. They never share a sum.

Each rank has whole rows between products, so norms, activations, routing and sums of experts are computed as by one rank, on
numbers of the same shapes. A rank computes some columns of a product, which are whole sums, and all ranks gather the others.
It computes attention for some KV heads with all of their query heads, because the bits of a head depend on the number of query
heads that are multiplied together, and never on the other KV heads.

So the degrees change no bit, if a product of some columns has the bits of the whole product. The products of oneDNN have. Each
shape is tried when it is laid out, since another machine may have other products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.core.shards import RankShare
from pdserve.engine.layers.linear import Linear, LinearFor, Multiply, Scheme

TRIED_ROWS: Final = (1, 2, 3, 4, 7, 16, 31, 32)
"""The row counts on which columns are tried: those of vectors, those beside them, and that of a tile. MKL, whose products have
other bits for four columns alone than within 100, shows it from 4 rows on."""


class Ranks(Protocol):
    """The place of one rank among all ranks of its gang, and the ways to meet them. All ranks call the same methods in the same
    order."""

    @property
    def share(self) -> RankShare:
        """The share of the model that this rank has."""

    def gather(self, own: Tensor, columns: Sequence[range]) -> Tensor:
        """Return whole rows of which this rank has some columns: own [rows, its columns]. Each rank of the stage calls it.

        columns: those of each rank of the stage, in order. Together they are all columns, each of them once.
        """

    def carry(self, x: Tensor, stage: int) -> Tensor:
        """Return the x [rows, width] of the ranks of a stage. All ranks call it, with an x of the same shape and dtype."""

    def agree(self, sizes: frozenset[int]) -> frozenset[int]:
        """Return the sizes that all ranks of all stages give."""


@dataclass(frozen=True, slots=True)
class Alone:
    """One rank, which has everything. Its methods return what they get."""

    share: RankShare

    def gather(self, own: Tensor, columns: Sequence[range]) -> Tensor:
        """Return `own`, which has all columns."""
        return own

    def carry(self, x: Tensor, stage: int) -> Tensor:
        """Return `x`."""
        return x

    def agree(self, sizes: frozenset[int]) -> frozenset[int]:
        """Return `sizes`."""
        return sizes


class ColumnLinear:
    """A product with one weight, of which each rank of a stage computes some columns."""

    def __init__(self, scheme: Scheme, ranks: Ranks, weight: Tensor, bias: Tensor | None = None) -> None:
        """Lay out the rank's rows of weight [out_features, in_features] and of bias [out_features]."""
        self._ranks = ranks
        self._columns = [one.columns_of(weight.shape[0]) for one in ranks.share.of_stage]
        self._own: Linear | None = None
        if columns := self._columns[ranks.share.rank]:
            rows = slice(columns.start, columns.stop)
            self._own = Linear(scheme, weight[rows].clone(), None if bias is None else bias[rows].clone())

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product of x [rows, in_features], contiguous: [rows, out_features] of the same dtype and device."""
        own = x.new_empty(x.shape[0], 0) if self._own is None else self._own(x)
        return self._ranks.gather(own, self._columns)


class LinearByColumns:
    """Lays out weights as `ColumnLinear`, and tries each shape first. One rank has no use for it: it has all columns."""

    def __init__(self, scheme: Scheme, ranks: Ranks) -> None:
        self._scheme = scheme
        self._ranks = ranks
        self._tried: set[torch.Size] = set()

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Multiply:
        """Return the product. Raises `ConfigError` when some columns of it have other bits than within the whole product."""
        if weight.shape not in self._tried:
            self._try(weight)
            self._tried.add(weight.shape)
        return ColumnLinear(self._scheme, self._ranks, weight, bias)

    def _try(self, weight: Tensor) -> None:
        columns = self._ranks.share.columns_of(weight.shape[0])
        if not columns:
            return
        whole, own = self._scheme.lay_out(weight), self._scheme.lay_out(weight[columns.start : columns.stop].clone())
        random = torch.Generator().manual_seed(0)
        for rows in TRIED_ROWS:
            x = torch.randn(rows, weight.shape[1], generator=random).to(weight.device, weight.dtype)
            if not torch.equal(whole(x)[:, columns.start : columns.stop], own(x)):
                wide, deep = weight.shape
                raise ConfigError(
                    f"tensor_parallel_size {self._ranks.share.degrees.tensor}: columns {columns.start} to {columns.stop - 1} "
                    f"of a product of {wide} by {deep} numbers ({self._scheme.name}) have other bits alone than in the whole "
                    "product on this machine: use tensor_parallel_size 1"
                )


def linear_for(scheme: Scheme, ranks: Ranks) -> LinearFor:
    """Return the way in which a rank lays out the weights of products."""
    if ranks.share.degrees.tensor > 1:
        return LinearByColumns(scheme, ranks)

    def whole(weight: Tensor, bias: Tensor | None = None) -> Multiply:
        return Linear(scheme, weight, bias)

    return whole
