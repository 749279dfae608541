"""The spread of a model's tokens over the experts of its layers, as a worker reports it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

MOST_HOT: Final = 8
"""Layers of which a worker names the hottest expert. A heartbeat stays small, however many experts the model has."""

LayerCounts = tuple[int, Sequence[int]]
"""The number of a layer, and the tokens that chose each of its experts."""


@dataclass(frozen=True, slots=True)
class HotExpert:
    """The expert of a layer that most tokens chose. imbalance: its tokens, divided by the mean of the layer's experts."""

    layer: int
    expert: int
    imbalance: float


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The spread of tokens over experts, since the start of the worker's process."""

    choices: int
    """The tokens of all experts of all layers."""
    imbalance: float
    """The tokens of a layer's hottest expert, divided by the mean of the layer's experts, as a mean over layers. 1: even."""
    worst_imbalance: float
    """The same of the layer in which it is largest."""
    hottest: tuple[HotExpert, ...]
    """The hottest experts of the most uneven layers, at most `MOST_HOT`, the most uneven layer first."""


def expert_load(layers: Iterable[LayerCounts]) -> ExpertLoad | None:
    """Return the spread of these counts; None when no token is counted. Of equal experts and layers the lowest comes first."""
    hot, choices = [], 0
    for layer, counts in layers:
        total = sum(counts)
        if total:
            most = max(counts)
            hot.append(HotExpert(layer, counts.index(most), most * len(counts) / total))
            choices += total
    if not hot:
        return None
    hot.sort(key=lambda one: (-one.imbalance, one.layer))
    mean = sum([one.imbalance for one in hot]) / len(hot)
    return ExpertLoad(choices, mean, hot[0].imbalance, tuple(hot[:MOST_HOT]))
