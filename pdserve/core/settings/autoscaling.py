"""The settings of the pools' sizes while a cluster runs: who decides them, and within which limits.

This file does without `from __future__ import annotations`: the checks read the types, which that import turns into text.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from msgspec import Meta

from pdserve.core.errors import ConfigError
from pdserve.core.settings.types import NonNegativeFloat, PositiveFloat, PositiveInt, check_types

PLANNER: Final = "planner"
"""The value of `scaling_policy` of a pool whose size the planner decides."""


@dataclass(frozen=True, slots=True)
class AutoscalingConfig:
    """The planner: whether it decides the sizes of the pools, for which service, and what both pools may cost together."""

    # True lets the planner decide the sizes. Otherwise they stay as configured, until `pdserve scale` changes them.
    enabled: bool = False
    # The planner decides this often, from what happened in between.
    interval_s: PositiveFloat = 10.0
    # The pools are sized for the targets of this class of requests. None takes `router.default_class`.
    slo_class: str | None = None
    # A policy of your own (`scaling_policy` of a pool) is ended and started again if it does not answer within this time.
    policy_timeout_s: PositiveFloat = 1.0
    # This share of the requests should meet the targets.
    attainment: Annotated[float, Meta(gt=0, lt=1)] = 0.99
    # Both pools together have at most so many workers, those that start or leave included. None sets no such limit.
    max_workers: PositiveInt | None = None
    # The same for the GPUs that they reserve (`num_gpus` of the pools).
    max_gpus: NonNegativeFloat | None = None
    # The same for what they cost in an hour (`price_per_hour` of the pools), in any currency.
    max_price_per_hour: NonNegativeFloat | None = None
    # Finer settings of the planner, such as {downscale_delay_s: 600}; docs/autoscaling.md lists them.
    planner: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)

    def check_affordable(self, prefill: "PoolCost", decode: "PoolCost") -> None:
        """Check that the smallest pools and the configured ones respect the limits of both together. Raises `ConfigError`."""
        for name in ("min_replicas", "replicas"):
            counts = [min(getattr(pool, name), 1 << 53) for pool in (prefill, decode)]  # a larger one has no float
            gpus = prefill.gpus * counts[0] + decode.gpus * counts[1]
            price = prefill.price_per_hour * counts[0] + decode.price_per_hour * counts[1]
            for limit, amount in (("max_workers", sum(counts)), ("max_gpus", gpus), ("max_price_per_hour", price)):
                most = getattr(self, limit)
                if most is not None and amount > most:
                    raise ConfigError(
                        f"autoscaling.{limit} is {most:g}, but prefill.{name} ({counts[0]}) and decode.{name} ({counts[1]}) "
                        f"together take {amount:g}"
                    )

    def limits(self, pool: "PoolCost") -> bool:
        """Tell whether a limit of both pools together limits this pool."""
        costs = ((self.max_workers, 1.0), (self.max_gpus, pool.gpus), (self.max_price_per_hour, pool.price_per_hour))
        return any(most is not None and cost > 0 for most, cost in costs)


@dataclass(frozen=True, slots=True)
class PoolCost:
    """One pool as `AutoscalingConfig` sees it: its sizes, and what one worker costs."""

    min_replicas: int
    replicas: int
    gpus: float
    price_per_hour: float
