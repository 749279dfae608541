"""The load that clients have brought since the start of the router.

It costs a few additions for each request, and none for each token: tokens of live requests are counted when somebody asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pdserve.core.slo import ClassDemand, DemandCounts
from pdserve.core.worker import Role
from router.api.answer import Report
from router.core.live_request import LiveRequest


class Demand:
    """Counts requests, their tokens, and the targets that they met. The counts never go back. Probes are not counted."""

    def __init__(self) -> None:
        self._requests = self._prompt_tokens = self._ended_tokens = self._refused = 0
        self._placed = {Role.PREFILL: 0, Role.DECODE: 0}
        self._ended: Counter[tuple[str, str, bool | None]] = Counter()
        """The requests that ended, by class, target and whether they met it. None: the class has no such target."""

    def admitted(self, request: LiveRequest) -> None:
        """Count a request that was admitted. One that is shed later was admitted as well."""
        self._requests += 1
        self._prompt_tokens += request.new_prompt_tokens

    def placed(self, request: LiveRequest, role: Role) -> None:
        """Count a prompt that a worker of this role computes. A replay is computed anew, so it counts again."""
        if request.probe is None:
            self._placed[role] += request.new_prompt_tokens

    def count_refusal(self) -> None:
        """Count a request that was refused because of the load."""
        self._refused += 1

    def ended(self, report: Report, *, cancelled: bool) -> None:
        """Count the output of a request that has ended, and its targets. A cancelled one says something about targets only if
        it had missed one before."""
        self._ended_tokens += report.output_tokens
        if not cancelled or report.ttft_met is False or report.tpot_met is False:
            self._ended[report.slo_class, "ttft", report.ttft_met] += 1
            self._ended[report.slo_class, "tpot", report.tpot_met] += 1

    def snapshot(
        self, live: Iterable[LiveRequest], waiting: Iterable[LiveRequest], *, now_s: float, uptime_s: float
    ) -> DemandCounts:
        """Return the counts, with the live requests of clients and those of them that wait."""
        new_since_s = now_s
        queued_tokens = 0
        for request in waiting:
            queued_tokens += request.new_prompt_tokens
            if not request.replay:  # a replay was served before, so its arrival says nothing about the queue
                new_since_s = min(new_since_s, request.times.arrived_s)
        classes = tuple(self._of_class(name) for name in sorted({name for name, _, _ in self._ended}))
        return DemandCounts(
            uptime_s=uptime_s,
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._ended_tokens + sum([request.output.next_index for request in live]),
            refused=self._refused,
            queued_prompt_tokens=queued_tokens,
            longest_wait_s=now_s - new_since_s,
            ttft_met=sum(one.ttft_met for one in classes),
            ttft_missed=sum(one.ttft_missed for one in classes),
            tpot_met=sum(one.tpot_met for one in classes),
            tpot_missed=sum(one.tpot_missed for one in classes),
            placed_prompt_tokens=sum(self._placed.values()),
            prefill_prompt_tokens=self._placed[Role.PREFILL],
            classes=classes,
        )

    def _of_class(self, name: str) -> ClassDemand:
        return ClassDemand(name, *[self._ended[name, target, met] for target in ("ttft", "tpot") for met in (True, False)])
