"""A load that repeats, such as that of a day: a mean for each part of it, learned from the last one.

It is used only after a whole season was seen, and only while it was nearer to what came than the trend was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from pdserve.planner.means import NO_MEAN, Mean, Trend
from pdserve.planner.settings import PlannerSettings

_ERROR_BUCKETS: Final = 24
"""The errors of so many buckets decide who forecasts better: two hours of a day, so that a holiday is noticed by noon."""


@dataclass(frozen=True, slots=True)
class Season:
    """The means of the last season, and how well it and the trend forecast. Immutable; its size is that of the settings."""

    means: tuple[float | None, ...] = ()
    """The mean of each bucket. None: most of the bucket was not seen."""
    bucket: int | None = None
    """The number of the bucket that is being filled, counted from time 0."""
    sum: float = 0.0
    seen_s: float = 0.0
    error: Mean = NO_MEAN
    trend_error: Mean = NO_MEAN
    foreseen: tuple[tuple[int, float], ...] = ()
    """The trend's forecasts, by the number of the bucket that they concern."""

    def add(self, value: float, now_s: float, interval_s: float, trend: Trend, settings: PlannerSettings) -> Season:
        """Return the season with the value of an interval that ends at `now_s`. `trend` is that before the interval."""
        if not settings.season_s:
            return self
        number = bucket_of(now_s, settings)
        season = self
        if season.bucket is None or number != season.bucket:
            season = season._next(number, trend, settings)
        return replace(season, sum=season.sum + value * interval_s, seen_s=season.seen_s + interval_s)

    def ahead(self, now_s: float, settings: PlannerSettings) -> float | None:
        """Return the largest mean from now until a worker that starts now is ready. None: the season is not to be used."""
        if not settings.season_s or not self._is_better or len(self.means) != settings.season_buckets or None in self.means:
            return None
        numbers = range(bucket_of(now_s, settings), bucket_of(now_s + settings.start_s, settings) + 1)
        return max(self.means[number % len(self.means)] or 0.0 for number in numbers[: len(self.means)])

    @property
    def _is_better(self) -> bool:
        """Tell whether the season forecast better than the trend of late. Without a comparison it did not."""
        ours, other = self.error.value, self.trend_error.value
        return ours is not None and other is not None and ours < other

    def _next(self, number: int, trend: Trend, settings: PlannerSettings) -> Season:
        """Return the season when bucket `number` begins. The last bucket is learned; those that were skipped are unknown."""
        count = settings.season_buckets
        means: list[float | None] = list(self.means) if len(self.means) == count else [None] * count
        error, trend_error = self.error, self.trend_error
        if self.bucket is not None:
            bucket_s = settings.season_s / count
            mean = self.sum / self.seen_s if self.seen_s > bucket_s / 2 else None
            before, foreseen = means[self.bucket % count], dict(self.foreseen).get(self.bucket)
            if mean is not None and before is not None and foreseen is not None:
                error = error.add(abs(before - mean), 1.0, _ERROR_BUCKETS)
                trend_error = trend_error.add(abs(foreseen - mean), 1.0, _ERROR_BUCKETS)
            means[self.bucket % count] = mean
            for skipped in range(self.bucket + 1, min(number, self.bucket + 1 + count)):
                means[skipped % count] = None
        return Season(tuple(means), number, 0.0, 0.0, error, trend_error, self._foresee(number, trend, settings))

    def _foresee(self, number: int, trend: Trend, settings: PlannerSettings) -> tuple[tuple[int, float], ...]:
        """Return the forecasts of buckets to come, with that of the trend for the time when a worker would be ready."""
        ahead_s = max(settings.start_s, settings.season_s / settings.season_buckets / 2)
        expected = trend.ahead(ahead_s, settings.trend_s)
        kept = tuple(item for item in self.foreseen if item[0] >= number)
        if expected is None:
            return kept
        meant = bucket_of((number + 0.001) * settings.season_s / settings.season_buckets + ahead_s, settings)
        return (*(item for item in kept if item[0] < meant), (meant, expected))


def bucket_of(time_s: float, settings: PlannerSettings) -> int:
    """Return the number of the bucket of a time, counted from time 0 and never reset."""
    return math.floor(time_s / settings.season_s * settings.season_buckets)


NO_SEASON: Final = Season()
