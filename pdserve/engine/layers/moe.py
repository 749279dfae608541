"""A mixture of experts in torch: the router of `MoeSpec`, the gathered rows of each expert, and the sum of their results.

The choice, the router's scores and the weights of a row are functions of this row alone. An expert multiplies the rows of all
tokens that chose it. `Rows` cuts them into calls as it cuts a batch, so in batch-invariant mode the number of these rows
changes no bits. The results of a row are summed in float32: first the result of the shared expert, then the results of its
experts, in ascending order. The reference sums experts in this order too. To sum them in the order of their weights would cost
a second gather and gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.core.model_spec import MoeSpec
from pdserve.engine.layers.elementwise import exp_fixed
from pdserve.engine.layers.linear import Linear, scheme_for
from pdserve.engine.layers.ranks import Ranks
from pdserve.engine.layers.rows import Rows, Sample

MOST_ROWS: Final = 1024
"""Rows that one call of an expert multiplies. This bounds its memory, however many tokens choose one expert. It is a multiple
of every row count of `rows.py`."""
LEAST_SUM: Final = 1e-20
"""DeepSeek-V3 adds this number to the sum by which it divides weights. It changes no sum that is above 1e-12."""

GatherColumns = Callable[[Tensor, int], Tensor]
"""Function of own [rows, columns of one rank] and of a width that returns the rows of all ranks, [rows, width]."""
Expert = Callable[[Tensor], Tensor]
"""A gated MLP as a function of rows [rows, hidden], which returns rows of the same shape and dtype."""


class Grouped(Protocol):
    """The routed experts of a layer, which are computed at once and on their device."""

    @property
    def counts(self) -> Tensor:
        """The tokens that chose each expert, since the model was loaded: [experts] int64."""

    def route(self, outputs: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what `route` returns for the first columns of outputs [rows, at least experts] float32."""

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, total: Tensor, real: Tensor | None = None) -> Tensor:
        """Return total plus the weighted results of the experts of each row: [rows, hidden] in the dtype of x [rows, hidden].

        experts, weights: the result of `route`. total: [rows, hidden] float32. real: [] int64, see `MoeMlp.__call__`.
        """


def route(spec: MoeSpec, outputs: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the experts of each row, ascending, and their weights: [rows, experts_per_token] int64 and float32.

    outputs: [rows, experts] float32, the products of the router. bias: [experts] float32, the correction of the choice. Among
    equal scores the lowest expert is chosen. A row with NaN gets valid experts and weights of NaN.
    """
    scores = _scores(spec, outputs)
    experts = choose(spec, scores if bias is None else scores + bias)
    weights = scores.gather(1, experts)
    if spec.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    return experts, weights * spec.scale


def _scores(spec: MoeSpec, outputs: Tensor) -> Tensor:
    """Return the score of each expert, [rows, experts]. It does not depend on the row's place (see elementwise.py)."""
    if spec.score == "sigmoid":
        return sigmoid_fixed(outputs)
    grown = exp_fixed((outputs - outputs.amax(-1, keepdim=True)).contiguous())
    return grown / grown.sum(-1, keepdim=True)


def sigmoid_fixed(x: Tensor) -> Tensor:
    """Return the sigmoid of float32 numbers so that the result of an element does not depend on its place."""
    return 1.0 / exp_fixed(x.neg().contiguous()).add_(1.0)


def choose(spec: MoeSpec, ranks: Tensor) -> Tensor:
    """Return the experts of each row that rank highest, ascending: [rows, experts_per_token] int64. ranks: [rows, experts]."""
    if spec.top_groups == spec.groups:
        return _top(ranks, spec.experts_per_token)
    grouped = ranks.reshape(ranks.shape[0], spec.groups, -1)
    if spec.group_score == "best":
        of_groups = grouped.amax(-1)
    else:
        of_groups = grouped.topk(2, dim=-1).values.sum(-1)
    size = spec.experts // spec.groups
    groups = _top(of_groups, spec.top_groups)
    candidates = grouped.gather(1, groups.unsqueeze(-1).expand(-1, -1, size)).flatten(1)
    chosen = _top(candidates, spec.experts_per_token)
    return groups.gather(1, chosen // size) * size + chosen % size


def _top(ranks: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest numbers of each row, ascending. `torch.topk` does not promise the lowest index
    among equal numbers, so the numbers are sorted stably. NaN counts as the largest number."""
    return ranks.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(-1).values


class MoeMlp:
    """The mixture of experts of one layer. It takes a whole batch, because it gathers rows from all of it."""

    def __init__(
        self,
        spec: MoeSpec,
        router: Tensor,
        bias: Tensor | None,
        experts: Sequence[Expert],
        shared: Expert | None,
        rows: Rows,
        grouped: Grouped | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Lay out the router.

        router: [experts, hidden], and one row more where the spec has a shared gate. bias: [experts] float32. rows: the way to
        cut rows into calls. It must be settled with `samples` before the first call. grouped: it computes the experts, and
        `experts` is empty. ranks: each has some whole experts, and `experts` are those of this one. None: `experts` are all.
        """
        assert router.shape[0] == spec.experts + spec.shared_gate
        self._own = range(spec.experts) if ranks is None else ranks.share.experts(spec)
        assert len(experts) == (len(self._own) if grouped is None else 0)
        self._ranks = ranks
        self._spec = spec
        self._rows = rows
        self._router = Linear(scheme_for(router.device, torch.float32), router.float())
        self._bias = bias
        self._experts = experts
        self._shared = shared
        self._counts = np.zeros(spec.experts, np.int64)
        self._grouped = grouped

    @property
    def counts(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The tokens that chose each expert, since the model was loaded. The engine thread owns them.

        It waits for the device.
        """
        return self._counts if self._grouped is None else self._grouped.counts.cpu().numpy()

    @property
    def recordable(self) -> bool:
        """True when no step waits for the device, so that it can be recorded."""
        return self._grouped is not None

    def samples(self, rows: Tensor) -> Iterator[Sample]:
        """Yield each function of rows once, with random rows [PROBE_ROWS, hidden] as inputs. All experts have equal shapes, so
        the first stands for all of them."""
        yield self._before, (rows,)
        if self._grouped is None:
            yield self._expert(self._own.start), (rows,)

    def __call__(self, normed: Tensor, tokens: int, real: Tensor | None = None) -> Tensor:
        """Return the result [padded rows, hidden] of normed [padded rows, hidden], in its dtype.

        Only the first `tokens` rows go to experts and are counted. The others are padding. real: [] int64 on the device, the
        rows that count in a recorded step; it takes the place of `tokens`.
        """
        experts, weights, total = self._rows.apply(self._before, normed)
        if self._grouped is not None:
            assert tokens == normed.shape[0], "whole batches have no padding"
            return self._grouped(normed, experts, weights, total, real)
        chosen = experts[:tokens].flatten()
        order = chosen.argsort(stable=True)
        places, factors = order // self._spec.experts_per_token, weights[:tokens].flatten()[order].unsqueeze(-1)
        counts = torch.bincount(chosen, minlength=self._spec.experts).cpu().numpy()
        self._counts += counts
        pieces = list(_pieces(counts.tolist()))
        for (_, start, end), product in zip(pieces, self._products(pieces, normed, places), strict=True):
            # The rows of a piece ascend, and each is there once.
            total.index_add_(0, places[start:end], product.float() * factors[start:end])
        return total.to(normed.dtype)

    def _before(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the experts of each row, their weights, and the float32 result of the shared expert, or zeros."""
        outputs = self._router(normed.float())
        if self._grouped is not None:
            experts, weights = self._grouped.route(outputs, self._bias)
        else:
            experts, weights = route(self._spec, outputs[:, : self._spec.experts], self._bias)
        if self._shared is None:
            return experts, weights, torch.zeros_like(normed, dtype=torch.float32)
        shared = self._shared(normed).float()
        if self._spec.shared_gate:
            shared = shared * sigmoid_fixed(outputs[:, self._spec.experts :])
        return experts, weights, shared

    def _products(self, pieces: list[tuple[int, int, int]], normed: Tensor, places: Tensor) -> Iterator[Tensor]:
        """Yield the result of the expert of each piece, [rows of the piece, hidden]."""
        if self._ranks is None:
            yield from (self._product(expert, normed[places[start:end]]) for expert, start, end in pieces)
            return
        # Each rank first computes its experts, at the same time as the others, and then they take turns.
        own = [self._product(expert, normed[places[start:end]]) for expert, start, end in pieces if expert in self._own]
        rest, hidden = iter(own), normed.shape[1]
        experts = [one.experts(self._spec) for one in self._ranks.share.of_stage]
        for expert, start, end in pieces:
            product = next(rest) if expert in self._own else normed.new_empty(end - start, 0)
            yield self._ranks.gather(product, [range(hidden if expert in held else 0) for held in experts])

    def _product(self, expert: int, gathered: Tensor) -> Tensor:
        """Return the result of an expert for gathered rows. They are padded with zeros, which are dropped afterwards."""
        count = gathered.shape[0]
        padded = F.pad(gathered, (0, 0, 0, self._rows.padded(count) - count))
        (result,) = self._rows.apply(self._expert(expert), padded)
        return result[:count]

    def _expert(self, number: int) -> Callable[[Tensor], tuple[Tensor]]:
        return lambda rows: (self._experts[number - self._own.start](rows),)


def _pieces(counts: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield each piece of at most MOST_ROWS of the rows that are sorted by expert: the expert, the start, and the end."""
    start = 0
    for expert, count in enumerate(counts):
        end = start + count
        for first in range(start, end, MOST_ROWS):
            yield expert, first, min(first + MOST_ROWS, end)
        start = end
