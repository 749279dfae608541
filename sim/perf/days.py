"""A day of requests: a trace of an hour, repeated around the clock and thinned by a curve with two peaks.

A request at hour h of the day stays with the probability `share(h)`:

    share(h) = 0.25 + 0.75 * max(bump(h - 11, 2.5), 0.85 * bump(h - 20, 2)),  bump(d, w) = exp(-(d / w)^2 / 2)

with d as the distance around the clock. So the night has a quarter of the load at eleven, and the evening 89 %. Lengths
and gaps are those of the trace. A day may be shortened: each hour then has only `minutes_per_hour` minutes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sim.perf.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class Day:
    """A part of a day, which begins at `begins_h` o'clock. `speedup`: the rate of arrivals divided by the rate of the trace."""

    hours: float = 24.0
    begins_h: float = 3.0
    minutes_per_hour: float = 60.0
    speedup: float = 1.0
    seed: int = 0

    @property
    def length_s(self) -> float:
        """The time in which its requests arrive."""
        return self.hours * self.minutes_per_hour * 60.0

    def hour_of(self, time_s: float) -> float:
        """Return the hour of the day at a time after its begin, [0, 24)."""
        return (self.begins_h + time_s / (60.0 * self.minutes_per_hour)) % 24.0


def share(hour: float) -> float:
    """Return the share of the trace's requests that stay at an hour of the day."""
    return 0.25 + 0.75 * max(_bump(hour - 11.0, 2.5), 0.85 * _bump(hour - 20.0, 2.0))


def _bump(distance_h: float, width_h: float) -> float:
    around_h = min(distance_h % 24.0, -distance_h % 24.0)
    return math.exp(-((around_h / width_h) ** 2) / 2)


def requests_of(trace: Sequence[TraceRequest], day: Day) -> list[TraceRequest]:
    """Return the requests of a day. The trace begins anew whenever it has ended, a mean gap after its last request."""
    rng = random.Random(day.seed)
    span_s = trace[-1].arrived_s * len(trace) / max(1, len(trace) - 1) / day.speedup
    requests: list[TraceRequest] = []
    for again in range(math.ceil(day.length_s / span_s)):
        for request in trace:
            arrived_s = again * span_s + request.arrived_s / day.speedup
            if arrived_s < day.length_s and rng.random() < share(day.hour_of(arrived_s)):
                requests.append(replace(request, arrived_s=arrived_s))
    return requests
