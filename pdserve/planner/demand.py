"""The demand of both phases: what clients bring now, what they will bring when a new worker is ready, and what waits.

```
demand = max(forecast, measured + backlog / horizon_s)
measured = max(mean tokens/s, mean requests/s * tokens of a request)
forecast = the larger one of trend and season, over start_s
```
Prompt tokens are prefill's demand as far as prefill workers get them and do not have their KV. What decode workers compute
counts as their time (`need.py`). Requests tell of outputs before the outputs come, and of prompts that a full queue refuses:
hence the second part of `measured`. A forecast never lowers a demand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from pdserve.planner.means import NO_MEAN, NO_RATE, NO_TREND, ArrivalRate, Mean, Trend
from pdserve.planner.observations import Observations
from pdserve.planner.settings import PlannerSettings

# A load that repeats, such as that of a day: a mean for each part of it, learned from the last one.
#
# It is used only after a whole season was seen, and only while it was nearer to what came than the trend was.

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


NOTHING: Final = 0.01
"""Fewer tokens a second are none: the means of an idle cluster fall for ever and never reach 0."""
FEWEST: Final = 1e-3
"""Fewer requests a second, one in a quarter of an hour, say nothing of a request's tokens: outputs of old ones go on."""


@dataclass(frozen=True, slots=True)
class Series:
    """One rate: its mean, its trend, and its season."""

    rate: ArrivalRate = NO_RATE
    trend: Trend = NO_TREND
    season: Season = NO_SEASON

    def add(self, value: float, now_s: float, interval_s: float, settings: PlannerSettings) -> Series:
        """Return the series with the value of an interval that ends at `now_s`."""
        return Series(
            self.rate.add(value, interval_s, settings.smoothing_s),
            self.trend.add(value, interval_s, settings.smoothing_s, settings.trend_s),
            self.season.add(value, now_s, interval_s, self.trend, settings),
        )

    def measured(self, piece: float, settings: PlannerSettings) -> float:
        """Return the present rate. `piece` is that of `ArrivalRate.value`. 0: nothing was added yet."""
        return self.rate.value(piece, settings.smoothing_s) or 0.0

    def trending(self, piece: float, settings: PlannerSettings) -> float:
        """Return the rate that the trend predicts for the moment at which a worker is ready that starts now."""
        return self.measured(piece, settings) + self.trend.rise(settings.start_s, settings.trend_s, piece)

    def seasonal(self, now_s: float, settings: PlannerSettings) -> float:
        """Return the rate that the season predicts for the same moment. 0: there is no season."""
        return self.season.ahead(now_s, settings) or 0.0


NO_SERIES: Final = Series()


@dataclass(frozen=True, slots=True)
class Ratio:
    """Tokens of a request, as the quotient of two means: one interval's quotient says nothing where requests are few."""

    tokens: Mean = NO_MEAN
    requests: Mean = NO_MEAN

    def add(
        self, tokens_per_s: float, requests_per_s: float, interval_s: float, is_free: bool, settings: PlannerSettings
    ) -> Ratio:
        """Return the ratio with the rates of an interval. Where requests wait or are refused, it learns nothing."""
        if not is_free and self.value is not None:
            return self
        return Ratio(
            self.tokens.add(tokens_per_s, interval_s, settings.memory_s),
            self.requests.add(requests_per_s, interval_s, settings.memory_s),
        )

    @property
    def value(self) -> float | None:
        """The tokens of a request. None: there was no request yet."""
        tokens, requests = self.tokens.value, self.requests.value
        return tokens / requests if tokens is not None and requests is not None and requests > FEWEST else None


NO_RATIO: Final = Ratio()


@dataclass(frozen=True, slots=True)
class Traffic:
    """The planner's memory of the traffic of clients."""

    requests: Series = NO_SERIES
    prompt: Series = NO_SERIES
    output: Series = NO_SERIES
    prompt_ratio: Ratio = NO_RATIO
    output_ratio: Ratio = NO_RATIO
    cached: Mean = NO_MEAN
    """The share of the prompt tokens whose KV prefill workers had."""
    placed: Mean = NO_MEAN
    """The share of the prompt tokens that prefill workers get."""

    def add(self, observed: Observations, settings: PlannerSettings) -> Traffic:
        """Return the traffic with an interval. The rates of its demand must be known."""
        demand, now_s, interval_s = observed.demand, observed.now_s, observed.interval_s
        requests = demand.requests_per_s or 0.0
        prompt, output = demand.prompt_tokens_per_s or 0.0, demand.output_tokens_per_s or 0.0
        share, placed = observed.prefill.cached_share, demand.prefill_share
        is_free = not demand.queued_requests and not demand.refused_per_s
        return Traffic(
            self.requests.add(requests, now_s, interval_s, settings),
            self.prompt.add(prompt, now_s, interval_s, settings),
            self.output.add(output, now_s, interval_s, settings),
            self.prompt_ratio.add(prompt, requests, interval_s, is_free, settings),
            self.output_ratio.add(output, requests, interval_s, is_free, settings),
            self.cached if share is None else self.cached.add(min(share, 1.0), interval_s, settings.memory_s),
            self.placed if placed is None else self.placed.add(min(placed, 1.0), interval_s, settings.smoothing_s),
        )


NO_TRAFFIC: Final = Traffic()


@dataclass(frozen=True, slots=True)
class PhaseDemand:
    """The demand of one phase, in tokens a second that workers have to compute."""

    measured: float
    trend: float
    season: float
    """0: no season is known, or the trend forecasts better."""
    backlog_tokens: float
    total: float
    request_tokens: float | None
    """The tokens of a request. None: there was no request yet."""
    elsewhere: float | None = None
    """Prompt tokens a second that the other pool computes. None: nobody has told where prompts are computed."""


def prompt_demand(traffic: Traffic, observed: Observations, settings: PlannerSettings) -> PhaseDemand:
    """Return the demand of the prefill pool: the prompt tokens that its workers get and whose KV they do not have."""
    uncached, share = 1 - (traffic.cached.value or 0.0), traffic.placed.value
    computed = uncached if share is None else uncached * share
    waiting = (observed.demand.queued_prompt_tokens or 0.0) * computed + (observed.prefill.queued_tokens or 0.0)
    ratio = traffic.prompt_ratio.value
    demand = _demand(traffic, traffic.prompt, ratio, computed, waiting, observed.now_s, settings)
    return replace(
        demand,
        request_tokens=None if ratio is None else ratio * uncached,  # those that stay on decode workers are the shorter ones
        elsewhere=None
        if share is None
        else (1 - share) * traffic.prompt.measured((ratio or 0.0) * (1 + settings.prompt_variation), settings),
    )


def output_demand(traffic: Traffic, observed: Observations, settings: PlannerSettings) -> PhaseDemand:
    """Return the demand of the decode pool: the tokens that requests will generate."""
    tokens = traffic.output_ratio.value
    waiting = (observed.demand.queued_requests or 0.0) * (tokens or 0.0)
    return _demand(traffic, traffic.output, tokens, 1.0, waiting, observed.now_s, settings)


def _demand(
    traffic: Traffic,
    series: Series,
    ratio: float | None,
    computed: float,
    waiting: float,
    now_s: float,
    settings: PlannerSettings,
) -> PhaseDemand:
    """Return a demand. `ratio`: tokens of a request; `computed`: the share of them that is computed; `waiting`: tokens."""
    tokens, requests = ratio or 0.0, traffic.requests
    piece = tokens * (1 + settings.prompt_variation)
    measured = computed * max(series.measured(piece, settings), tokens * requests.measured(1.0, settings))
    trend = computed * max(series.trending(piece, settings), tokens * requests.trending(1.0, settings))
    season = computed * max(series.seasonal(now_s, settings), tokens * requests.seasonal(now_s, settings))
    total = max(trend, season, measured + waiting / settings.horizon_s)
    return PhaseDemand(
        measured, trend, season, waiting, total if total > NOTHING else 0.0, None if ratio is None else ratio * computed
    )
