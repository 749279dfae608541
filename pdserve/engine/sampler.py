"""From logits to token ids, one row at a time, in float64 and in an order fixed by token id.

Filters apply in the order temperature, top-k, top-p, min-p, each to what the one before left, renormalised. What is
kept is laid out by ascending id and the draw `uniform(seed, output_index)` is inverted through its cumulative sum,
so a row's token depends on its logits and its `SampleSpec` alone. numpy sums on one thread, so neither does the
number of threads matter. Equal probabilities at the edge of a filter: lower ids are kept first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.core.batch import SampleSpec
from pdserve.core.sampling import SamplingParams, uniform
from pdserve.engine.models.api import Draws

Ids = NDArray[np.int64]
Reals = NDArray[np.float64]


def sample(
    logits: Tensor, specs: Sequence[SampleSpec], best: Sequence[int] | None = None, draw: Draws | None = None
) -> list[int]:
    """logits: [rows, vocab] float32, a row for each spec; rows with banned ids are changed in place.

    best and draw: as in `Logits`.
    """
    assert logits.shape[0] == len(specs)
    token_ids = list(best) if best is not None else None
    for i, spec in enumerate(specs):
        if banned := [token for token in spec.banned_ids if 0 <= token < logits.shape[1]]:
            logits[i, banned] = -torch.inf
            if token_ids is not None:
                token_ids[i] = int(logits[i].argmax())
    if token_ids is None:
        token_ids = logits.argmax(dim=-1).tolist()  # the lowest id among equals
    drawn = [i for i, spec in enumerate(specs) if not spec.params.greedy]
    if drawn:
        tokens = (draw or partial(_draw_each, logits))(drawn, [specs[i] for i in drawn])
        for i, token in zip(drawn, tokens, strict=True):
            token_ids[i] = token
    return token_ids


def _draw_each(logits: Tensor, rows: list[int], specs: list[SampleSpec]) -> list[int]:
    return [_draw(logits[row].double().cpu().numpy(), spec) for row, spec in zip(rows, specs, strict=True)]


def distribution(logits: Reals, params: SamplingParams) -> tuple[Ids, Reals]:
    """The ids that may be drawn, ascending, and their probabilities up to a common factor. Temperature above 0."""
    ids: Ids = np.arange(len(logits), dtype=np.int64)
    with np.errstate(over="ignore"):  # a tiny temperature: -inf is what is meant
        weights = np.exp((logits - logits.max()) / params.temperature)
    if 0 < params.top_k < len(ids):
        ids, weights = _keep(_top_k(weights, params.top_k), ids, weights)
    if params.top_p < 1.0:
        ids, weights = _keep(_top_p(weights, params.top_p), ids, weights)
    if params.min_p > 0.0:
        ids, weights = _keep(np.flatnonzero(weights >= params.min_p * weights.max()), ids, weights)
    return ids, weights


def _draw(logits: Reals, spec: SampleSpec) -> int:
    ids, weights = distribution(logits, spec.params)
    cumulative = np.cumsum(weights)
    target = uniform(spec.params.seed, spec.output_index) * cumulative[-1]
    index = int(np.searchsorted(cumulative, target, side="right"))  # the first with cumulative > target: its weight is > 0
    return int(ids[min(index, _last_positive(weights))])


def _last_positive(weights: Reals) -> int:
    """Where a target rounded up to the whole sum ends."""
    return int(np.flatnonzero(weights)[-1])


def _keep(chosen: Ids, ids: Ids, weights: Reals) -> tuple[Ids, Reals]:
    return ids[chosen], weights[chosen]


def _top_k(weights: Reals, k: int) -> Ids:
    """Indices of the k largest, ascending; the lowest of those equal to the k-th."""
    edge = np.partition(weights, -k)[-k]
    above = np.flatnonzero(weights > edge)
    level = np.flatnonzero(weights == edge)[: k - len(above)]
    return np.sort(np.concatenate((above, level)))


def _top_p(weights: Reals, p: float) -> Ids:
    """Indices, ascending, of the fewest largest whose share reaches p; at least one.

    What has less than (1 - p) / n of the whole cannot be among them: all such together have less than 1 - p. So
    only the others are sorted; the bound is halved to stay clear of rounding.
    """
    total = weights.sum()
    candidates = np.flatnonzero(weights >= 0.5 * (1.0 - p) * total / len(weights))
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    count = int(np.searchsorted(np.cumsum(weights[order]), p * total, side="left")) + 1
    return np.sort(order[:count])
