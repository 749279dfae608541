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

from dataclasses import dataclass, replace
from typing import Final

from pdserve.planner.means import NO_MEAN, NO_RATE, NO_TREND, ArrivalRate, Mean, Trend
from pdserve.planner.observations import Observations
from pdserve.planner.season import NO_SEASON, Season
from pdserve.planner.settings import PlannerSettings

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
