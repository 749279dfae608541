"""The settings of the planner: how fast it reacts, how far it looks ahead, and how much room it leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from pdserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """The settings of a planner. Times are in seconds, shares in [0, 1]. Raises `ConfigError`."""

    start_s: float = 120.0
    """The time from the decision to start a worker until it takes requests. The forecast looks so far ahead. Set it to
    what your workers need: loading a large model takes minutes."""
    horizon_s: float = 120.0
    """A backlog is to be served within this time: the time in which a new worker could begin to help."""
    smoothing_s: float = 30.0
    """Rates are means over ten times this time, or over less where that differs by more than chance (`means.py`)."""
    trend_s: float = 300.0
    """The time constant of the trend. What its slope would be by chance is subtracted from it."""
    memory_s: float = 300.0
    """The time constant of what is learned about requests and workers: tokens of a request, rates, shares of cached KV."""
    step_memory_s: float = 3_600.0
    """The times of decode steps with few or many sequences are known for so long a time. An hour sees both."""
    season_s: float = 86_400.0
    """The period of the load that may be learned: a day. 0: no season is learned."""
    season_buckets: int = 288
    """The season is remembered as so many means: of five minutes each, so that a rise is seen before it comes."""
    max_utilisation: float = 0.9
    """The largest share of the time in which a prefill worker may be busy. Waits grow as 1 / (1 - share)."""
    prompt_variation: float = 1.0
    """The variance of the time of a prompt over its squared mean. 1: as of an exponential distribution. The prompts of
    Azure's public trace of conversations (2023) have 0.92."""
    tpot_share: float = 0.93
    """The mean decode step may take this share of the TPOT target. The rest is for workers with more than the mean load; how
    sequences come and go is counted apart (`steps.py`)."""
    kv_share: float = 0.85
    """The largest share of the KV blocks that may be held. The rest is for requests that wait for room, and for growth."""
    sequences_share: float = 0.9
    """The largest share of a worker's sequences that may run, as a mean."""
    tolerance: float = 0.1
    """A pool changes only if the need leaves its size by more than this share. The default is that of Kubernetes' horizontal
    pod autoscaler."""
    downscale_delay_s: float = 300.0
    """A pool shrinks to the largest need of so long a time. The default is that of Kubernetes' horizontal pod autoscaler."""
    flip_delay_s: float = 60.0
    """A pool gives a worker to the other one, which needs it, after so long a time with a smaller need."""
    cooldown_s: float = 30.0
    """The time after a change of a pool in which the planner changes it no more. The default is Ray Serve's upscale delay."""
    max_correction: float = 4.0
    """A pool that misses its targets gets at most so many times the workers that were computed, or so many if one was."""
    min_correction: float = 0.75
    """A pool whose requests meet their targets more often than asked gets at least so many times the workers that were
    computed."""
    correction_growth_s: float = 120.0
    """The correction grows e times in this time while no request meets its target; slower if fewer requests miss it."""
    budget_s: float = 86_400.0
    """The share of requests that may miss their targets is counted over so long a time: a day."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{field.name} must be a number, not {value!r}")
            if not math.isfinite(value) or value < 0 or (value == 0 and field.name not in _MAY_BE_ZERO):
                raise ConfigError(f"{field.name} must be a finite number above 0, not {value}")
            if field.name in _SHARES and value > 1:
                raise ConfigError(f"{field.name} must be at most 1, not {value}")
        if self.season_buckets != int(self.season_buckets):
            raise ConfigError(f"season_buckets must be a whole number, not {self.season_buckets}")
        if self.max_correction < 1:
            raise ConfigError(f"max_correction must be at least 1, not {self.max_correction}")
        if self.flip_delay_s > self.downscale_delay_s:
            said = f"not {self.flip_delay_s} above {self.downscale_delay_s}"
            raise ConfigError(f"flip_delay_s must be at most downscale_delay_s, {said}: a flip is cheaper than a stop")


_SHARES = ("max_utilisation", "tpot_share", "kv_share", "sequences_share")
_MAY_BE_ZERO = ("season_s", "prompt_variation", "tolerance", "downscale_delay_s", "flip_delay_s", "cooldown_s", "start_s")
