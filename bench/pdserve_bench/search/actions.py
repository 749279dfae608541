"""The next step of a search, as data. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pdserve_bench.layout import Layout


@dataclass(frozen=True, slots=True)
class RunAction:
    """Shape the cluster, where it has another layout, and run one rate until it is decided."""

    layout: Layout
    rate_per_s: float
    min_yes_s: float
    """The least time after the cluster is warm until the answer may be yes."""
    max_s: float
    """The longest run. It may end earlier, and does when its test decides."""


@dataclass(frozen=True, slots=True)
class StopAction:
    """The search is over."""

    complete: bool
    reason: str
    """The reason, as a sentence for the operator."""


Action: TypeAlias = RunAction | StopAction
