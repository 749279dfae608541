"""The observers of a run: its progress, its figures while it goes on, and its refusal if the generator was late."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final, TypeAlias

import numpy as np

from pdserve_bench.layout import Slo
from pdserve_bench.load.target import NEVER_SENT, LoadAnswer
from pdserve_bench.row import BenchRow

MAX_REASONS: Final = 32
"""The most reasons whose first message is kept."""
MAX_MESSAGE_CHARS: Final = 300


LoadWatch: TypeAlias = Callable[[BenchRow], bool]
"""The generator calls it with each finished row, in the order in which requests end.

True ends the run: nothing more is sent, and what still runs is cut off (`BenchRow.cut`).
"""


def watch_nothing(row: BenchRow) -> bool:
    """Let the run go on to its end."""
    return False


@dataclass(slots=True)
class RunProgress:
    """The state of a run, for a view. The generator changes it; everybody else only reads it."""

    now_s: float = 0.0
    """The time since the start of the run."""
    sent: int = 0
    done: int = 0
    failed: int = 0
    held: int = 0
    """Requests that had to wait for a place under `max_concurrency`, so that the load was less than was planned."""
    running: dict[int, LoadAnswer] = field(default_factory=dict)
    """The requests that run, by number. Their times are those of the generator's clock."""
    messages: dict[str, str] = field(default_factory=dict)
    """The first message of each reason of a failure, in one line of bounded length."""

    def explain(self, reason: str, message: str) -> None:
        """Keep the message if it is the first one of its reason."""
        if message and reason not in self.messages and len(self.messages) < MAX_REASONS:
            self.messages[reason] = one_line(message)


def one_line(message: str) -> str:
    """Return the beginning of a message from elsewhere, without characters that command a terminal."""
    begin = message[: 4 * MAX_MESSAGE_CHARS]
    line = " ".join("".join(char if char.isprintable() else " " for char in begin).split())
    return line if len(line) <= MAX_MESSAGE_CHARS else line[:MAX_MESSAGE_CHARS] + "..."


# The figures of the last seconds of a run that goes on. Pure.


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


# The lag of the generator, and the refusal of a run in which the generator was the limit. Pure.
#
# A generator that sends late measures its own machine: a server looks better under load than it is. So a run whose lag is not
# small against what it measures is refused, and says so itself (0043).


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
