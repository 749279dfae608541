"""Means that forget, and a trend. Both take intervals of any length, so their constants are times and not counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Mean:
    """An exponentially weighted mean. Its first values count fully: it does not begin at 0."""

    total: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float | None:
        """The mean. None: nothing was added yet."""
        return self.total / self.weight if self.weight > 0 else None

    def add(self, value: float, interval_s: float, time_s: float) -> Mean:
        """Return the mean with the value of an interval. What is older than `time_s` has lost two thirds of its weight."""
        kept = math.exp(-interval_s / time_s)
        return Mean(self.total * kept + value * (1 - kept), self.weight * kept + (1 - kept))


NO_MEAN: Final = Mean()


@dataclass(frozen=True, slots=True)
class Trend:
    """Holt's linear trend: a level and a slope, each an exponentially weighted mean.

    A steady rise is followed without lag. With `slope_s` at least four times `level_s` it does not swing after a step.
    """

    level: float | None = None
    slope_per_s: float = 0.0

    def add(self, value: float, interval_s: float, level_s: float, slope_s: float) -> Trend:
        """Return the trend with the value of an interval."""
        if self.level is None:
            return Trend(value)
        expected = self.level + self.slope_per_s * interval_s
        level = expected + (1 - math.exp(-interval_s / level_s)) * (value - expected)
        seen = (level - self.level) / interval_s
        return Trend(level, self.slope_per_s + (1 - math.exp(-interval_s / slope_s)) * (seen - self.slope_per_s))

    def ahead(self, time_s: float, damping_s: float) -> float | None:
        """Return the value that is expected after `time_s`, at least 0. The slope fades with `damping_s`: no rise goes on."""
        if self.level is None:
            return None
        return max(0.0, self.level + self.slope_per_s * damping_s * (1 - math.exp(-time_s / damping_s)))


NO_TREND: Final = Trend()
