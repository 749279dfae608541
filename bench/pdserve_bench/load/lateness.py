"""The lag of the generator, and the refusal of a run in which the generator was the limit. Pure.

A generator that sends late measures its own machine: a server looks better under load than it is. So a run whose lag is not
small against what it measures is refused, and says so itself (0043).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from pdserve_bench.load.failures import NEVER_SENT
from pdserve_bench.row import BenchRow

MAX_LAG_S: Final = 0.01
MAX_LAG_OF_TTFT: Final = 0.05
"""The largest share of the median TTFT that the lag may have."""


def lag_p99_s(rows: Sequence[BenchRow]) -> float | None:
    """Return the lag that 99 % of the measured requests stay below. None: none was sent."""
    lags_s = [row.send_lag_s for row in rows if not row.warm_up and row.error not in NEVER_SENT]
    return float(np.percentile(lags_s, 99)) if lags_s else None


def refusal(rows: Sequence[BenchRow]) -> str:
    """Return why a run does not count, in one line that says what to do. Empty: it counts."""
    lag_s = lag_p99_s(rows)
    if lag_s is None:
        return ""
    ttfts_s = [row.ttft_s for row in rows if row.counts and row.ok and row.ttft_s is not None]
    ttft_s = float(np.median(ttfts_s)) if ttfts_s else math.inf
    if lag_s > MAX_LAG_S:
        limit = f"{MAX_LAG_S * 1000:.0f} ms"
    elif lag_s > MAX_LAG_OF_TTFT * ttft_s:
        limit = f"{MAX_LAG_OF_TTFT:.0%} of the median TTFT, {ttft_s * 1000:.2f} ms"
    else:
        return ""
    return (
        f"the generator was late: the p99 of its send lag is {lag_s * 1000:.2f} ms, above {limit}. Run it on a machine or "
        "on cores that the servers do not use, lower the rate, or take the figures as they are with --allow-late"
    )
