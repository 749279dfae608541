"""The settings of one pool of workers: its size, the place of its workers, and the GPUs that they get.

This file does without `from __future__ import annotations`: the checks read the types, which that import turns into text.
"""

from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from pdserve.core.errors import ConfigError
from pdserve.core.settings.autoscaling import PLANNER, PoolCost
from pdserve.core.settings.labels import LabelSelector, check_key
from pdserve.core.settings.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, check_types
from pdserve.plugins import is_path

MOST_WORKERS: Final = 4096  # of a pool without `max_replicas`: larger than any cluster that was ever measured
ROUNDING: Final = 1e-3  # of shares of a GPU: a third of one is 0.3333 to Ray


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """One pool: how many workers it has, what each needs from Ray, and which engine settings differ from the common ones."""

    # The pool has so many workers at the start.
    replicas: NonNegativeInt = 1
    # It never gets fewer by `pdserve scale` or by the planner. None is 1, or 0 if `replicas` is 0.
    min_replicas: NonNegativeInt | None = None
    # It never gets more. None sets no limit, but 0 if `replicas` is 0.
    max_replicas: NonNegativeInt | None = None
    # One worker costs so much in an hour, in any currency. `autoscaling.max_price_per_hour` limits the sum.
    price_per_hour: NonNegativeFloat = 0.0
    # While the sizes are decided automatically, "planner" decides that of this pool, or a function of your own, as in
    # "my_policies:prefill_size". It runs in a process of its own; docs/autoscaling.md says what it gets.
    scaling_policy: str = PLANNER
    # Ray reserves so many CPUs for each worker. 0 reserves none, which lets all workers start on one small machine: workers
    # of 1 CPU each would wait there for ever.
    num_cpus: NonNegativeFloat = 0.0
    # Ray reserves so many GPUs for each worker, or such a share of one, and shows it no other. Above 0, the worker computes on
    # CUDA or does not start. While it is 0 in both pools, the GPUs that are there are divided among the workers (`gpus`).
    num_gpus: NonNegativeFloat = 0.0
    # A node must offer these custom resources of Ray for each worker, such as {big: 1.0}. Empty accepts any node.
    resources: dict[str, PositiveFloat] = field(default_factory=dict)
    # A node must have matching labels. Each name of a label is followed by a value, !value, in(one, other) or !in(one, other),
    # where ! means not: {zone: a} accepts nodes of zone a, and {zone: "!a"} accepts all others. Empty accepts any node.
    labels: dict[str, str] = field(default_factory=dict)
    # A worker is restarted so many times within an hour. After one more death it rests for a minute, then for two, and at last
    # for an hour. Deaths that follow the first one of a poison request do not count.
    max_restarts_per_hour: NonNegativeInt = 6
    # These settings replace those of the section `engine` for this pool, such as {kv_cache_dtype: int8}.
    engine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)
        if self.least > self.replicas:
            raise ConfigError(f"min_replicas is {self.least}, more than replicas ({self.replicas})")
        if self.most < self.replicas:
            raise ConfigError(f"max_replicas is {self.most}, fewer than replicas ({self.replicas})")
        if self.scaling_policy != PLANNER and not is_path(self.scaling_policy):
            raise ConfigError(f"scaling_policy must be {PLANNER}, or module:function of your own, got {self.scaling_policy!r}")
        for name, selector in self.labels.items():
            try:
                check_key(name)
                LabelSelector.parse(selector)
            except ValueError as exc:
                raise ConfigError(f"labels.{name}: {exc}") from exc

    @property
    def least(self) -> int:
        """The pool never gets fewer workers than this while the cluster runs."""
        return min(self.replicas, 1) if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        """The pool never gets more workers than this while the cluster runs."""
        if self.max_replicas is not None:
            return self.max_replicas
        return max(MOST_WORKERS, self.replicas) if self.replicas else 0

    @property
    def offered(self) -> int:
        """A private Ray has room for so many workers of the pool."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def cost(self) -> PoolCost:
        """The sizes that are configured, and what one worker costs."""
        return PoolCost(self.least, self.replicas, self.num_gpus, self.price_per_hour)


class DeviceSettings(Protocol):
    """The settings of an engine that say where it computes."""

    @property
    def device(self) -> str:
        """The device: auto, cpu or cuda."""

    @property
    def gpu_memory_utilization(self) -> float:
        """The share of a GPU's memory that a worker uses."""

    @property
    def kv_cache_memory(self) -> int | None:
        """The bytes of the KV pool. None: a share of the GPU's memory."""


def check_gpus(name: str, gpus: int | None, num_gpus: float, engine: DeviceSettings) -> None:
    """Check that the GPUs, the device and the memory of the pool called `name` agree. Raises `ConfigError`.

    gpus: the limit of the GPUs of all workers, None without one.
    """
    sharing = int(1 / num_gpus + ROUNDING) if 0 < num_gpus < 1 else 1
    if sharing * engine.gpu_memory_utilization > 1 + ROUNDING and engine.kv_cache_memory is None:
        raise ConfigError(
            f"{name}.num_gpus is {num_gpus:g}, so {sharing} workers share a GPU and each takes "
            f"{engine.gpu_memory_utilization:g} of its memory: set engine.gpu_memory_utilization to {1 / sharing:.2g} or less"
        )
    if num_gpus and engine.device == "cpu":
        raise ConfigError(f"{name}.num_gpus is {num_gpus:g} and its engine.device is cpu: set num_gpus to 0 or device to auto")
    if gpus == 0 and (num_gpus or engine.device == "cuda"):
        asks = f"num_gpus is {num_gpus:g}" if num_gpus else "engine.device is cuda"
        raise ConfigError(f"gpus is 0 and {name}.{asks}: leave one of the two out")
