"""The limits, targets and settings of the planner, from the configuration of a cluster. Pure."""

from __future__ import annotations

from pdserve.config import ClusterConfig, PoolConfig
from pdserve.core.errors import ConfigError
from pdserve.core.settings.constants import GONE
from pdserve.planner.limits import Limits, PoolLimits, PoolSizes, Targets
from pdserve.planner.planner import PlannerSettings


def limits_of(config: ClusterConfig) -> Limits:
    """Return the limits of both pools. `can_flip` is False here: the workers say whether they can change their role."""
    return Limits(
        prefill=_pool(config, config.prefill),
        decode=_pool(config, config.decode),
        max_workers=config.autoscaling.max_workers,
        max_cpus=config.autoscaling.max_cpus,
        max_gpus=config.autoscaling.max_gpus,
        max_price_per_hour=config.autoscaling.max_price_per_hour,
    )


def targets_of(config: ClusterConfig) -> Targets:
    """Return the targets of the class for which the pools are sized."""
    one = config.router.classes()[config.slo_class]
    return Targets(one.ttft_s, one.tpot_s, config.autoscaling.attainment)


def planner_settings(config: ClusterConfig) -> PlannerSettings:
    """Return the finer settings of the planner. Raises `ConfigError` that names the setting."""
    given = config.autoscaling.planner
    known = {
        name: field for name, field in PlannerSettings.__dataclass_fields__.items() if f"autoscaling.planner.{name}" not in GONE
    }
    for name, value in given.items():
        if reason := GONE.get(f"autoscaling.planner.{name}"):
            raise ConfigError(f"autoscaling.planner.{name} is gone, and need not be replaced: {reason}; remove it")
        if name not in known:
            raise ConfigError(f"unknown setting autoscaling.planner.{name}; known here: {', '.join(sorted(known))}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"autoscaling.planner.{name} must be a number, got {value!r}")
    try:
        return PlannerSettings(**given)
    except (ConfigError, OverflowError) as exc:
        raise ConfigError(f"autoscaling.planner.{exc}") from exc


def obstacle_of(prefill: int | None, decode: int | None, present: PoolSizes, limits: Limits) -> str:
    """Return which limit an order exceeds, by the name of its setting. Empty: none.

    None: the pool keeps its present size, which may be under its minimum after workers were lost.
    """
    for name, size, pool in (("prefill", prefill, limits.prefill), ("decode", decode, limits.decode)):
        if size is None:
            continue
        if size < pool.min_workers:
            return f"{name}: {size} is under {name}.min_replicas ({pool.min_workers})"
        if size > pool.max_workers:
            return f"{name}: {size} is over {name}.max_replicas ({pool.max_workers})"
    sizes = sizes_of(prefill, decode, present)
    for setting in limits.exceeded(sizes.prefill, sizes.decode):
        most = getattr(limits, setting)
        return f"prefill {sizes.prefill} and decode {sizes.decode} together are over autoscaling.{setting} ({most:g})"
    return ""


def sizes_of(prefill: int | None, decode: int | None, present: PoolSizes) -> PoolSizes:
    """Return the sizes of an order. None: the pool keeps its present size."""
    return PoolSizes(present.prefill if prefill is None else prefill, present.decode if decode is None else decode)


def _pool(config: ClusterConfig, pool: PoolConfig) -> PoolLimits:
    """Return the limits of one pool. A private Ray has no more resources than it was started with."""
    needs = pool.num_cpus or pool.num_gpus or pool.resources
    most = min(pool.most, pool.offered) if config.address == "local" and needs else pool.most
    cost = config.cost_of(pool)
    return PoolLimits(pool.least, most, cost.cpus, cost.gpus, cost.price_per_hour)
