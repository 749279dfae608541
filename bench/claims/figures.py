"""The figures of one claim: samples by name, their medians, and the intervals of ratios between them. Pure.

The samples of a measured figure are in the order of the rounds. All figures of one claim that are compared have been measured
in the same rounds, so a ratio is taken round by round. A counted figure (blocks, bytes) has one sample and no interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from bench.ratios import Ratio, ratio

MIN_ROUNDS: Final = 3
"""The fewest rounds from which an interval is taken. With one round the interval would have no width and would prove
anything."""


class MissingFigures(Exception):
    """A figure is missing, has too few samples, or has a sample that is no positive number."""


@dataclass
class Figures:
    """Measured samples and counted numbers, both by name."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Add the sample of one more round."""
        self.samples.setdefault(name, []).append(float(value))

    def count(self, name: str) -> float:
        """Return a counted number. Raises `MissingFigures`."""
        value = self.counts.get(name, math.nan)
        if not math.isfinite(value):
            raise MissingFigures(f"{name} was not counted")
        return value

    def of(self, name: str) -> Sequence[float]:
        """Return the samples of a figure. Raises `MissingFigures`."""
        values = self.samples.get(name, [])
        if len(values) < MIN_ROUNDS:
            raise MissingFigures(f"{name} has {len(values)} of at least {MIN_ROUNDS} rounds")
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise MissingFigures(f"{name} has a sample that is no positive number")
        return values

    def median(self, name: str) -> float:
        """Return the median of a figure. Raises `MissingFigures`."""
        return statistics.median(self.of(name))

    def ratio(self, above: str, below: str) -> Ratio:
        """Return the ratio of two figures, round by round, with its interval. Raises `MissingFigures`."""
        one, other = self.of(above), self.of(below)
        if len(one) != len(other):
            raise MissingFigures(f"{above} has {len(one)} rounds and {below} has {len(other)}")
        return ratio(one, other)

    def interval(self, name: str) -> Ratio:
        """Return the median of a figure with its interval. Raises `MissingFigures`."""
        values = self.of(name)
        return ratio(values, [1.0] * len(values))

    def to_dict(self) -> dict[str, Mapping[str, object]]:
        """Return plain data for a file. Samples keep six significant digits."""
        return {
            "samples": {name: [float(f"{value:.6g}") for value in values] for name, values in self.samples.items()},
            "counts": {name: float(f"{value:.6g}") for name, value in self.counts.items()},
        }
