"""Numbers with their units, as the page writes them: three digits, and the unit that fits. Pure."""

from __future__ import annotations

import math
from typing import Final

from pdserve_bench.verdict.data import EstimateData

SCALES: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float) -> str:
    """Write a number with three digits, and a whole number below 100,000 with all of them."""
    if not math.isfinite(value):
        return "unbounded"
    if value == round(value) and abs(value) < 100_000:
        return f"{value:,.0f}"
    if abs(value) >= 1e6:
        return scaled(value).strip()
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def scaled(value: float) -> str:
    """Write a number with three digits and a prefix of SI, after a space."""
    for scale, prefix in SCALES:
        if abs(value) >= scale * 0.9995:
            return f"{_three(value / scale)} {prefix}"
    return f"{_three(value)} "


def _three(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def seconds(value: float) -> str:
    """Write a time in s, ms or us."""
    if abs(value) >= 0.9995:
        return f"{_three(value)} s"
    if abs(value) >= 0.9995e-3 or not value:
        return f"{_three(value * 1e3)} ms"
    return f"{_three(value * 1e6)} us"


def size(value: float) -> str:
    """Write bytes in decimal units."""
    return f"{scaled(value)}B"


def tokens(value: float) -> str:
    """Write a number of tokens."""
    return scaled(value).strip()


def percent(value: float) -> str:
    """Write a share in percent."""
    return f"{100 * value:.3g} %"


def rate(value: float) -> str:
    """Write requests a second."""
    return f"{number(value)} requests/s"


def times(value: float) -> str:
    """Write a ratio. Near 1 it has three decimals, so that it never looks like 1 where it is not."""
    return f"{value:.3f}" if 0.9 < value < 1.1 else number(value)


def ratio_between(found: EstimateData) -> str:
    """Write the ends of an interval of a ratio."""
    return f"{times(found.low)} to {times(found.high)}" if found.high is not None else f"at least {times(found.low)}"


def between(found: EstimateData) -> str:
    """Write the ends of an interval."""
    return f"{number(found.low)} to {number(found.high)}" if found.high is not None else f"at least {number(found.low)}"


def spread(found: EstimateData) -> str:
    """Write a value with its interval. Without a value it writes the interval alone."""
    return between(found) if found.value is None else f"{number(found.value)} ({between(found)})"
