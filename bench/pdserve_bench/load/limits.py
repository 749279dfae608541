"""The limits of one run of the load generator. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from pdserve.core.errors import ConfigError

MAX_CONCURRENCY = 1 << 16
"""The most requests at the same time. A process has not more sockets towards one port."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """The limits of one run. A run ends when the first of them is reached, and all requests that were sent have ended.

    Raises `ConfigError`, which names the field and its limit, when a value is out of range.
    """

    duration_s: float | None = None
    """The time in which measured requests are sent. None: until `num_requests` were sent or the workload ends."""
    num_requests: int | None = None
    """The most measured requests. None: as many as the workload has, or as `duration_s` allows."""
    max_concurrency: int | None = None
    """The most requests at the same time. None: open loop, every request is sent at its time. With a limit, a request that
    waits for a place is planned for the moment at which it gets one, so this wait is not lag."""
    warmup_requests: int = 0
    """The first requests of the workload, which are sent but not measured."""
    warmup_s: float = 0.0
    """Requests that are planned before this time are sent but not measured."""
    request_timeout_s: float = 600.0
    """The longest time of one request, its connection included."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"{one.name}: {value} is not a finite number")
        for name, low in (("duration_s", 0.0), ("request_timeout_s", 0.0)):
            value = getattr(self, name)
            if value is not None and value <= low:
                raise ConfigError(f"{name}: {value:g} is not above 0")
        for name, low in (("num_requests", 1), ("max_concurrency", 1), ("warmup_requests", 0), ("warmup_s", 0.0)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name}: {value:g} is below {low:g}")
        if self.max_concurrency is not None and self.max_concurrency > MAX_CONCURRENCY:
            raise ConfigError(f"max_concurrency: {self.max_concurrency} is above {MAX_CONCURRENCY}")
