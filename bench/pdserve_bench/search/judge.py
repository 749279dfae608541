"""The test of a rate as the load generator sees it: an iterator around the workload, and a watch of the rows. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from pdserve_bench.layout import Slo
from pdserve_bench.row import BenchRow
from pdserve_bench.search.trial import Trial
from pdserve_bench.workload.request import BenchRequest

SLACK_S: Final = 0.05
"""The time by which a request may end later than its targets say: the generator sends a little late, and messages travel."""


class Judge:
    """It tells a trial of each request and of its end. It ends the run when the trial has decided."""

    def __init__(self, trial: Trial, slo: Slo) -> None:
        """Judge requests by the targets."""
        self.trial = trial
        self._slo = slo
        self._numbers: dict[int, int] = {}

    def requests(self, requests: Iterator[BenchRequest]) -> Iterator[BenchRequest]:
        """Yield the requests, and note those whose times are known. Later turns of a session are noted when they end."""
        for request in requests:
            if request.send_at_s is not None and not request.after and request.send_at_s < self.trial.settings.max_s:
                due_s = request.send_at_s + self._longest_s(request.max_tokens)
                self._numbers[request.number] = self.trial.plan(request.send_at_s, due_s)
            yield request

    def watch(self, row: BenchRow) -> bool:
        """Take a row. Return True when the run is decided. Rows that the end of the run cut off tell nothing."""
        if row.cut:
            return True
        number = self._numbers.pop(row.number, None)
        if number is None:
            number = self.trial.plan(row.planned_s)
        good = row.ok and self._slo.met(row.ttft_s, row.tpot_s)
        return self.trial.end(number, row.ended_s, good) is not None

    def _longest_s(self, max_tokens: int) -> float:
        """Return the longest stay of a request that meets its targets. Infinite: one of the targets is missing."""
        if self._slo.ttft_s is None or self._slo.tpot_s is None:
            return math.inf
        return self._slo.ttft_s + self._slo.tpot_s * max(0, max_tokens - 1) + SLACK_S
