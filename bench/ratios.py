"""Ratios of interleaved runs, and how sure their median is."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

DRAWS: Final = 2000


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of the rounds' ratios with its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Return the median of `above / below`, taken round by round. Its interval is a bootstrap: rounds are drawn again 2,000
    times.
    """
    of_rounds = [a / b for a, b in zip(above, below, strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(of_rounds, k=len(of_rounds))) for _ in range(DRAWS))
    outside = DRAWS // 40
    return Ratio(statistics.median(of_rounds), medians[outside], medians[-1 - outside])
