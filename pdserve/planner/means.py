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


LADDER: Final = (1 / 3, 1.0, 10 / 3, 10.0)
"""The times over which a rate is averaged, in times of the smoothing time."""
CHANCE: Final = 3.5
"""A difference of so many standard deviations is no chance: eight of the 17,280 intervals of a day differ as much by chance."""
SMALLEST: Final = 1e-3
"""No piece is smaller: a token is one."""
NOTHING: Final = 0.05
"""Fewer pieces are none: an exponential mean remembers for ever what has ended."""
DOUBT: Final = 1.5
"""A rate over a shorter time is believed less so many standard deviations."""


@dataclass(frozen=True, slots=True)
class ArrivalRate:
    """The rate of pieces that come at random: a mean over long, or over a shorter time that differs by more than chance.

    So a steady rate has little noise, however few pieces come, and a jump is seen within seconds, where many come.
    """

    means: tuple[Mean, ...] = (NO_MEAN,) * len(LADDER)

    def add(self, value: float, interval_s: float, time_s: float) -> ArrivalRate:
        """Return the rate with the value of an interval."""
        return ArrivalRate(
            tuple(mean.add(value, interval_s, step * time_s) for mean, step in zip(self.means, LADDER, strict=True))
        )

    def value(self, piece: float, time_s: float) -> float | None:
        """Return the present rate. None: nothing was added. `piece`: the mean of the squared size of a piece over its mean.

        An exponential mean over t has the variance of a plain one over 2 t. Square roots of counts vary alike for all counts
        (Anscombe's transform, 1948).
        """
        found = self.means[-1].value
        if found is None or piece < SMALLEST:  # the size of a piece is not known yet
            return self.means[LADDER.index(1.0)].value
        for mean, step in reversed(list(zip(self.means, LADDER, strict=True))):
            if mean.value is None:
                continue
            pieces = 2 * step * time_s * mean.weight / (2 - mean.weight) / piece
            if mean.value * pieces < NOTHING:
                found = mean.value
                continue
            new, old = (2 * math.sqrt(rate * pieces + 3 / 8) for rate in (mean.value, found))
            if abs(new - old) > CHANCE:
                believed = new - math.copysign(DOUBT, new - old)
                found = max(0.0, believed**2 / 4 - 3 / 8) / pieces
        return found


NO_RATE: Final = ArrivalRate()


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

    def rise(self, time_s: float, slope_s: float, piece: float) -> float:
        """Return by how much more than chance the value rises within `time_s`, at least 0. `slope_s` is that of `add`.

        The slope of a line through pieces that come at random within W has the variance `12 rate * piece / W^3`.
        """
        if self.level is None:
            return 0.0
        fade_s = max(slope_s, time_s)
        ahead_s = fade_s * (1 - math.exp(-time_s / fade_s))
        noise = math.sqrt(12 * max(self.level, 0.0) * piece / (2 * slope_s) ** 3)
        return max(0.0, ahead_s * (self.slope_per_s - 2 * noise))


NO_TREND: Final = Trend()
