"""The limits and the targets of a plan. All of them come from the operator's configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from pdserve.core.errors import ConfigError

MOST_WORKERS: Final = 10_000
"""The largest pool that is planned. It bounds the work of a plan; a hundred times what one router was measured with."""
_ROUNDING: Final = 1e-9
"""The share by which a sum of costs may exceed its limit: 3 x 0.1 is no more than 0.3."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The limits of one pool, and the cost of one of its workers. A pool whose limit is 0 stays empty. Raises `ConfigError`."""

    min_workers: int = 1
    max_workers: int = 1
    cpus: float = 0.0
    gpus: float = 0.0
    """CPUs and GPUs of one worker, with those of all its ranks."""
    price_per_hour: float = 0.0
    """The cost of one worker for an hour, in the unit of `Limits.max_price_per_hour`."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_workers <= self.max_workers:
            said = f"min_workers is {self.min_workers} and max_workers is {self.max_workers}"
            raise ConfigError(f"{said}: 0 <= min_workers <= max_workers must hold")
        if self.max_workers > MOST_WORKERS:
            raise ConfigError(f"max_workers must be at most {MOST_WORKERS}, not {self.max_workers}")
        for name in ("cpus", "gpus", "price_per_hour"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} must be a finite number, at least 0, not {value}")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of both pools together. None: no such limit. Raises `ConfigError` if the minima alone exceed a limit."""

    prefill: PoolLimits = PoolLimits()
    decode: PoolLimits = PoolLimits()
    max_workers: int | None = None
    max_cpus: float | None = None
    max_gpus: float | None = None
    max_price_per_hour: float | None = None
    can_flip: bool = False
    """A worker of one pool may change into the other one."""

    def __post_init__(self) -> None:
        for name in ("max_workers", "max_cpus", "max_gpus", "max_price_per_hour"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must be a finite number, at least 0, or unset, not {value}")
        for name in self.exceeded(self.prefill.min_workers, self.decode.min_workers):
            minima = f"prefill.min_workers {self.prefill.min_workers} and decode.min_workers {self.decode.min_workers}"
            raise ConfigError(f"{name} {getattr(self, name)} is below what {minima} need: raise it, or lower a minimum")

    def exceeded(self, prefill: float, decode: float) -> tuple[str, ...]:
        """Return the names of the limits that so many workers of both pools exceed."""
        return tuple(name for name, limit, used in self._uses(prefill, decode) if used > limit * (1 + _ROUNDING))

    def _uses(self, prefill: float, decode: float) -> list[tuple[str, float, float]]:
        """Return the name, the limit and the use of each limit that is set."""
        uses = (
            ("max_workers", self.max_workers, prefill + decode),
            ("max_cpus", self.max_cpus, prefill * self.prefill.cpus + decode * self.decode.cpus),
            ("max_gpus", self.max_gpus, prefill * self.prefill.gpus + decode * self.decode.gpus),
            (
                "max_price_per_hour",
                self.max_price_per_hour,
                prefill * self.prefill.price_per_hour + decode * self.decode.price_per_hour,
            ),
        )
        return [(name, limit, used) for name, limit, used in uses if limit is not None]


@dataclass(frozen=True, slots=True)
class Targets:
    """The service that the pools are sized for. None: no such target. Raises `ConfigError`."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    attainment: float = 0.99
    """The share of the requests that should meet their targets."""

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a finite number above 0, or unset, not {value}")
        if not 0 < self.attainment < 1:
            raise ConfigError(f"attainment must be above 0 and below 1, not {self.attainment}: no size promises every request")


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """The number of workers of each pool."""

    prefill: int
    decode: int
