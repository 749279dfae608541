"""The attainment of targets by class in the last minutes. Pure: times are passed in.

Counts are kept in buckets of `BUCKET_S`, of which the last `BUCKETS` are shown, so what is remembered is bounded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from pdserve.core.report import RequestRecord
from pdserve.observe.snapshot import ClassSnapshot

BUCKET_S: Final = 10.0
BUCKETS: Final = 30
WINDOW_S: Final = BUCKET_S * BUCKETS
"""Five minutes: long enough for a rate of rare misses, and short enough to show that a change helped."""


@dataclass(slots=True)
class _Bucket:
    number: int
    classes: dict[str, ClassSnapshot] = field(default_factory=dict)


class Attainment:
    """Counts ended and refused requests by class. There are as many classes as the router's settings name."""

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque(maxlen=BUCKETS)

    def finished(self, record: RequestRecord, now_s: float) -> None:
        """Count one ended request. A request that was shed has also ended."""
        report = record.report
        one = self._of(report.slo_class, now_s)
        if record.refusal:
            one.shed += 1
        if record.counts:
            one.requests += 1
            one.good += record.good
            one.ttft_met += report.ttft_met is True
            one.ttft_missed += report.ttft_met is False
            one.tpot_met += report.tpot_met is True
            one.tpot_missed += report.tpot_met is False

    def refused(self, slo_class: str, now_s: float) -> None:
        """Count one request that was refused at submit."""
        self._of(slo_class, now_s).refused += 1

    def classes(self, now_s: float) -> tuple[ClassSnapshot, ...]:
        """Return the sums of the last `WINDOW_S` by class, in the order of the names."""
        oldest = _number(now_s) - BUCKETS
        sums: dict[str, ClassSnapshot] = {}
        for bucket in self._buckets:
            if bucket.number > oldest:
                for name, one in bucket.classes.items():
                    sums.setdefault(name, ClassSnapshot(name)).add(one)
        return tuple(sums[name] for name in sorted(sums))

    def _of(self, slo_class: str, now_s: float) -> ClassSnapshot:
        number = _number(now_s)
        if not self._buckets or self._buckets[-1].number != number:
            self._buckets.append(_Bucket(number))
        return self._buckets[-1].classes.setdefault(slo_class, ClassSnapshot(slo_class))


def _number(now_s: float) -> int:
    return int(now_s // BUCKET_S)
