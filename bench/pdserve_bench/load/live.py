"""The figures of the last seconds of a run that goes on. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

import numpy as np

from pdserve_bench.layout import Slo
from pdserve_bench.load.failures import NEVER_SENT
from pdserve_bench.load.watch import RunProgress
from pdserve_bench.row import BenchRow

WINDOW_S: Final = 10.0
MAX_ROWS: Final = 2_000
"""The most rows of the window that figures are computed of, the latest ones. A view must cost the run next to nothing."""
MAX_GAPS: Final = 5_000


@dataclass(frozen=True, slots=True)
class Live:
    """The state of a run, and figures of the requests that ended in the last `WINDOW_S`. None: there are none."""

    elapsed_s: float
    sent: int
    done: int
    failed: int
    running: int
    requests_per_s: float
    tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p99_s: float | None
    goodput_per_s: float
    lag_p99_s: float | None
    eta_s: float | None
    """The time until the run ends. None: it is unknown."""


class LiveFigures:
    """The rows of the last seconds."""

    def __init__(self, slo_of: Callable[[str], Slo], *, duration_s: float | None = None, requests: int | None = None) -> None:
        """Take what a request must meet, and what ends the run, warm-up included."""
        self._slo_of = slo_of
        self._duration_s = duration_s
        self._requests = requests
        self._rows: deque[BenchRow] = deque(maxlen=MAX_ROWS)

    def add(self, row: BenchRow) -> None:
        """Take a row of a request that has ended."""
        self._rows.append(row)

    def of(self, progress: RunProgress) -> Live:
        """Return the figures of this moment."""
        now_s = progress.now_s
        while self._rows and self._rows[0].ended_s < now_s - WINDOW_S:
            self._rows.popleft()
        rows = [row for row in self._rows if row.error not in NEVER_SENT]
        good = [row for row in rows if row.ok]
        begin_s = now_s - WINDOW_S if len(self._rows) < MAX_ROWS else self._rows[0].ended_s
        span_s = max(now_s - max(begin_s, 0.0), 1e-3)
        ttfts_s = [row.ttft_s for row in good if row.ttft_s is not None]
        gaps_s = list(islice(chain.from_iterable(row.gaps_s for row in reversed(good)), MAX_GAPS))
        met = sum(self._slo_of(row.slo_class).met(row.ttft_s, row.tpot_s) for row in good)
        return Live(
            elapsed_s=now_s,
            sent=progress.sent,
            done=progress.done,
            failed=progress.failed,
            running=len(progress.running),
            requests_per_s=len(good) / span_s,
            tokens_per_s=sum(row.output_tokens for row in good) / span_s,
            ttft_p50_s=_percentile(ttfts_s, 50),
            ttft_p99_s=_percentile(ttfts_s, 99),
            itl_p99_s=_percentile(gaps_s, 99),
            goodput_per_s=met / span_s,
            lag_p99_s=_percentile([row.send_lag_s for row in rows], 99),
            eta_s=self._eta_s(progress),
        )

    def _eta_s(self, progress: RunProgress) -> float | None:
        ended = progress.done + progress.failed
        by_time = None if self._duration_s is None else max(0.0, self._duration_s - progress.now_s)
        by_count = None
        if self._requests is not None and ended:
            by_count = progress.now_s * max(0, self._requests - ended) / ended
        known = [one for one in (by_time, by_count) if one is not None]
        return min(known) if known else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
