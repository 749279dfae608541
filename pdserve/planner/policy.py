"""The data of a scaling policy of the operator's own, which decides the size of one pool instead of the planner.

docs/autoscaling.md explains it to those who write one. A field that is added gets a default. A field that is removed, or gets
another meaning, raises `VERSION`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.core.worker import Role
from pdserve.planner.limits import Targets
from pdserve.planner.observations import Observations, PoolObserved

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class ScalingContext:
    """The argument of a scaling policy: the pool whose size it decides, and the whole cluster in the last interval."""

    role: Role
    """The pool whose size is asked for."""
    workers: int
    """The size that the pool should have now."""
    min_workers: int
    """The limits of the pool. A size outside of them is brought within them, so a policy need not look at them."""
    max_workers: int
    observations: Observations
    targets: Targets
    """The targets of the class for which the pools are sized."""
    version: int = VERSION

    @property
    def pool(self) -> PoolObserved:
        """The pool of the role in the last interval."""
        return self.observations.prefill if self.role is Role.PREFILL else self.observations.decode


@dataclass(frozen=True, slots=True)
class PolicySize:
    """The answer of a pool's policy. `workers` None: it gave none, so the pool keeps its size."""

    name: str
    """The policy as the setting names it."""
    workers: int | None = None
    fault: str = ""
    """The reason why there is no size, such as "it raised ZeroDivisionError: division by zero"."""
