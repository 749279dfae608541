"""The load that clients have brought since the start of the router.

It costs a few additions for each request, and none for each token: tokens of live requests are counted when somebody asks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Final

from pdserve.core.errors import DeadlineExceeded, Overloaded, PdserveError
from pdserve.core.report import Report
from pdserve.core.slo import ClassDemand, DemandCounts
from pdserve.core.worker import Role
from router.core.live_request import LiveRequest, Times
from router.core.request_machine import RequestState

_WAITED: Final = (DeadlineExceeded, Overloaded)
"""The errors of requests that failed because they waited, and not because an attempt failed."""


class Demand:
    """Counts requests, their tokens, and the targets that they met. The counts never go back. Probes are not counted."""

    def __init__(self) -> None:
        self._requests = self._prompt_tokens = self._ended_tokens = self._refused = 0
        self._placed = {Role.PREFILL: 0, Role.DECODE: 0}
        self._classes: dict[str, Counter[str]] = {}
        """The counts of each class of which a request has ended or was refused, by the names of `ClassDemand`."""
        self._first_gap_s: defaultdict[str, float] = defaultdict(float)
        """The sum of the times between the first token and the first decoded token, by class."""

    def admitted(self, request: LiveRequest) -> None:
        """Count a request that was admitted. A request that is shed later was admitted as well."""
        self._requests += 1
        self._prompt_tokens += request.new_prompt_tokens

    def placed(self, request: LiveRequest, role: Role) -> None:
        """Count a prompt that a worker of this role computes. A replay is computed anew, so it counts again."""
        if request.probe is None:
            self._placed[role] += request.new_prompt_tokens

    def count_refusal(self, slo_class: str) -> None:
        """Count a request of a class that was refused because of the load."""
        self._refused += 1
        self._classes.setdefault(slo_class, Counter())["refused"] += 1

    def ended(self, request: LiveRequest, report: Report, error: PdserveError | None) -> None:
        """Count the output of a request that has ended, its targets, and why it missed them. A cancelled request counts for
        targets only if it had missed a target before."""
        self._ended_tokens += report.output_tokens
        if request.machine.state is RequestState.CANCELLED and report.ttft_met is not False and report.tpot_met is not False:
            return
        counts = self._classes.setdefault(report.slo_class, Counter())
        for target, met in (("ttft", report.ttft_met), ("tpot", report.tpot_met)):
            if met is not None:
                counts[f"{target}_{'met' if met else 'missed'}"] += 1
        if report.ttft_met is False:
            counts[late_by(request, report, error)] += 1
        if report.tpot_met is False:
            counts[slow_by(request, report)] += 1
        if (gap_s := request.times.first_gap_s) is not None:
            counts["first_gaps"] += 1
            self._first_gap_s[report.slo_class] += gap_s

    def snapshot(
        self, live: Iterable[LiveRequest], waiting: Iterable[LiveRequest], *, now_s: float, uptime_s: float
    ) -> DemandCounts:
        """Return the counts, with the number of clients' live requests and the number of waiting requests among them."""
        new_since_s = now_s
        queued_tokens = 0
        for request in waiting:
            queued_tokens += request.new_prompt_tokens
            if not request.replay:  # a replay was served before, so its arrival says nothing about the queue
                new_since_s = min(new_since_s, request.times.arrived_s)
        classes = tuple(
            ClassDemand(name, **counts, first_gap_s=self._first_gap_s[name]) for name, counts in sorted(self._classes.items())
        )
        return DemandCounts(
            uptime_s=uptime_s,
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._ended_tokens + sum([request.output.next_index for request in live]),
            refused=self._refused,
            queued_prompt_tokens=queued_tokens,
            longest_wait_s=now_s - new_since_s,
            ttft_met=sum(counts.ttft_met for counts in classes),
            ttft_missed=sum(counts.ttft_missed for counts in classes),
            tpot_met=sum(counts.tpot_met for counts in classes),
            tpot_missed=sum(counts.tpot_missed for counts in classes),
            placed_prompt_tokens=sum(self._placed.values()),
            prefill_prompt_tokens=self._placed[Role.PREFILL],
            classes=classes,
        )


def late_by(request: LiveRequest, report: Report, error: PdserveError | None) -> str:
    """Return what took most of the time to the first token, as the name of a count of `ClassDemand`. A request that failed
    without a token was late by its failure, unless all it did was to wait."""
    times = request.times
    if times.first_token_s is None and request.machine.state is RequestState.FAILED and not isinstance(error, _WAITED):
        return "late_by_failure"
    parts = _parts(times, times.arrived_s + report.total_s if times.first_token_s is None else times.first_token_s)
    return max(parts, key=parts.__getitem__)


def _parts(times: Times, end_s: float) -> defaultdict[str, float]:
    """Return what took the time until `end_s`, in the order in which it began. That is at most the first token, or the KV."""
    parts, since_s = defaultdict[str, float](float), times.arrived_s
    if times.leader is not None and times.freed_s is not None:  # a sibling waited for all that its leader waited for
        parts, since_s = _parts(times.leader, times.freed_s), times.freed_s
    if times.had_room_s is None:
        parts["late_by_queue"] += end_s - since_s
        return parts
    attempt = times.drew_first or times.attempt
    prompt_s, started_s = attempt.prefill_sent_s, attempt.prefill_started_s
    bound_s = min([at_s for at_s in (attempt.bind_sent_s, prompt_s) if at_s is not None], default=end_s)  # before a rebind
    parts["late_by_queue"] += times.had_room_s - since_s
    parts["late_by_failure"] += bound_s - times.had_room_s
    if prompt_s is None:
        parts["late_by_colocated"] += end_s - bound_s
        return parts
    parts["late_by_queue"] += prompt_s - bound_s
    parts["late_by_prefill_queue"] += (end_s if started_s is None else started_s) - prompt_s
    parts["late_by_prefill"] += 0.0 if started_s is None else end_s - started_s
    return parts


def slow_by(request: LiveRequest, report: Report) -> str:
    """Return what made the tokens slow, as the name of a count of `ClassDemand`. The steps did where they alone are too slow. A
    request that failed while its tokens were in time missed its target by the failure."""
    times, slo, gaps = request.times, request.slo, report.output_tokens - 1
    if slo.tpot_met(report.tpot_s):
        return "slow_by_failure"
    if report.attempts > 1 and times.drew_first is not times.attempt:  # the stream paused for another attempt
        return "slow_by_failure"
    gap_s = times.first_gap_s
    if gap_s is None or (gaps > 1 and not slo.tpot_met((gaps * report.tpot_s - gap_s) / (gaps - 1))):
        return "slow_by_steps"
    if report.rebinds:
        return "slow_by_failure"
    return "slow_by_transfer" if times.transfer_gap_s > gap_s / 2.0 else "slow_by_first_decode"
