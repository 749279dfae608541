"""Intervals of a run's figures: a percentile bootstrap over blocks of consecutive requests. Pure.

Requests that follow each other share a queue, so they are not independent, and drawing them one by one would give intervals
that are too narrow. Whole blocks of them are drawn instead, with replacement and around the end (the circular block bootstrap
of Politis and Romano, 1992). A draw is a weight for each request, which says how often it was drawn; a statistic turns weights
into its figure, so a request may have any number of values, such as gaps. Draws come in batches, as rows of a matrix.

With some hundred requests an interval holds the truth somewhat less often than its level says: 90 to 93 % instead of 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from pdserve_bench.report.columns import Floats, Ints

REPLICATES: Final = 1000
"""The number of draws. The ends of a 95 % interval are then between the 25th and 26th value from each end."""
LEVEL: Final = 0.95
MAX_WEIGHED: Final = 200_000_000
"""The most values that the draws of one interval weigh, about 2 s of one core. More values get fewer draws."""
MIN_REPLICATES: Final = 200
BATCH: Final = 1 << 18
"""The values that a batch of draws weighs: 2 MiB for each of its arrays, which stay in the cache of a core."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its interval. NaN: it cannot be computed."""

    estimate: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Tell whether the value is in the interval."""
        return self.low <= value <= self.high


class Statistic(Protocol):
    """A figure of `requests` requests, for any weights of them."""

    @property
    def requests(self) -> int:
        """The number of requests, which is the number of weights."""
        ...

    @property
    def values(self) -> int:
        """The number of values that one draw weighs."""
        ...

    def __call__(self, weights: Ints) -> Floats:
        """Return the figure of each draw. NaN: its weights are on no value. weights: [draws, requests]. Returns: [draws]."""
        ...


class BootstrapMean:
    """The sum of amounts over the sum of bases: a mean where each base is 1, and a rate where they are times."""

    def __init__(self, amounts: Floats, bases: Floats) -> None:
        """Take the amounts and the bases. Both: [requests]."""
        self._amounts = amounts
        self._bases = bases
        self.requests = self.values = len(amounts)

    def __call__(self, weights: Ints) -> Floats:
        """Return the weighted ratios. weights: [draws, requests]. Returns: [draws]."""
        return _over(weights @ self._amounts, weights @ self._bases)


class Percentile:
    """A percentile that interpolates linearly, as numpy's does, over values that belong to requests."""

    def __init__(self, values: Floats, owner: Ints, requests: int, percent: float) -> None:
        """Take the values and the index of the request of each. Both: [values], without NaN."""
        order = np.argsort(values, kind="stable")
        self._sorted = values[order]
        self._owner = owner[order]
        self._share = percent / 100
        self.requests = requests
        self.values = len(values)

    def __call__(self, weights: Ints) -> Floats:
        """Return the percentiles of the values, each as often as its request was drawn. weights: [draws, requests]."""
        if not self.values:
            return np.full(len(weights), np.nan)
        counts = np.cumsum(weights[:, self._owner], axis=1)
        ranks = np.maximum(counts[:, -1] - 1, 0) * self._share
        below, above = (self._at(counts, rank) for rank in (np.floor(ranks), np.ceil(ranks)))
        got: Floats = below + (above - below) * (ranks - np.floor(ranks))
        return np.where(counts[:, -1] > 0, got, np.nan)

    def _at(self, counts: Ints, ranks: Floats) -> Floats:
        """Return the value of each draw at a rank, counted from 0."""
        places = np.array([np.searchsorted(row, rank, side="right") for row, rank in zip(counts, ranks, strict=True)])
        found: Floats = self._sorted[np.minimum(places, self.values - 1)]
        return found


def mean_of(values: Floats) -> BootstrapMean:
    """Return the mean of one value for each request. NaN stands for requests without one."""
    told = ~np.isnan(values)
    return BootstrapMean(np.where(told, values, 0.0), told.astype(np.float64))


def percentile_of(values: Floats, percent: float) -> Percentile:
    """Return a percentile of one value for each request. NaN stands for requests without one."""
    owner = np.flatnonzero(~np.isnan(values))
    return Percentile(values[owner], owner, len(values), percent)


def interval(statistic: Statistic, *, seed: int, level: float = LEVEL) -> Interval:
    """Return the figure with its interval. seed: the same one gives the same interval."""
    return _between(figure(statistic), _replicates(statistic, seed), level)


def figure(statistic: Statistic) -> float:
    """Return the figure of the run itself, in which every request weighs the same."""
    return float(statistic(np.ones((1, statistic.requests), dtype=np.int64))[0])


def compare(of_b: Statistic, of_a: Statistic, *, seed: int, level: float = LEVEL) -> tuple[Interval, Interval]:
    """Return the ratio b / a and the difference b - a of a figure of two runs, each drawn by itself."""
    count = min(_count(of_a), _count(of_b))
    draws_a, draws_b = _replicates(of_a, seed, count), _replicates(of_b, seed + 1, count)
    a, b = figure(of_a), figure(of_b)
    ratio = _between(b / a if a else math.nan, _over(draws_b, draws_a), level)
    return ratio, _between(b - a, draws_b - draws_a, level)


def draws(requests: int, replicates: int, seed: int, batch: int) -> Iterator[Ints]:
    """Yield the weights of at most `batch` draws at a time: [draws, requests]. Those of each draw add up to `requests`."""
    rng = np.random.default_rng(seed)
    length = block_length(requests)
    blocks = -(-requests // length)
    for begin in range(0, replicates, batch):
        count = min(batch, replicates - begin)
        begins = rng.integers(0, requests, size=(count, blocks))
        drawn = ((begins[:, :, None] + np.arange(length)) % requests).reshape(count, -1)[:, :requests]
        places = (drawn + requests * np.arange(count)[:, None]).ravel()
        yield np.bincount(places, minlength=count * requests).reshape(count, requests)


def block_length(requests: int) -> int:
    """Return the number of requests in a block: the square root of all. It grows with the run, as blocks must, and is longer
    than the usual cube root, because the requests of one burst stay in the queue together for long."""
    return max(1, math.isqrt(requests))


def _count(statistic: Statistic) -> int:
    return max(MIN_REPLICATES, min(REPLICATES, MAX_WEIGHED // max(1, statistic.values)))


def _replicates(statistic: Statistic, seed: int, count: int | None = None) -> Floats:
    count = _count(statistic) if count is None else count
    if not statistic.values:
        return np.full(count, np.nan)
    batch = max(1, BATCH // max(statistic.requests, statistic.values))
    return np.concatenate([statistic(weights) for weights in draws(statistic.requests, count, seed, batch)])


def _over(above: Floats, below: Floats) -> Floats:
    """Divide; NaN where the divisor is 0 or NaN."""
    ratios: Floats = np.divide(above, below, out=np.full(len(below), np.nan), where=below != 0)
    return ratios


def _between(estimate: float, replicates: Floats, level: float) -> Interval:
    """Return the interval between the percentiles of the draws. It is unknown if draws without the figure could decide it."""
    told = replicates[~np.isnan(replicates)]
    if math.isnan(estimate) or len(told) < level * len(replicates):
        return Interval(estimate, math.nan, math.nan)
    low, high = np.percentile(told, (50 * (1 - level), 50 * (1 + level)))
    return Interval(estimate, float(low), float(high))
