"""Observations from two successive readings of the cluster. Pure.

All counts are cumulative, so the difference of two readings is what happened in between, however often somebody reads. A count
is compared only with one of the same process: a worker's by its incarnation, the router's by its own. What cannot be compared
is missing (None): a new incarnation, a clock that stands, a count that went back, a value that is no finite number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.roofline import START
from pdserve.core.slo import DemandCounts
from pdserve.core.worker import Role, WorkerHello, WorkerLoad
from pdserve.planner.observations import DemandObserved, Missed, Observations, PoolObserved

MIN_INTERVAL_S: Final = 0.05
"""Counts of a shorter time say nothing: a step takes about so long. A rate of it would be zero or huge."""


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """One worker as the router knows it."""

    hello: WorkerHello
    load: WorkerLoad
    ready: bool
    draining: bool


@dataclass(frozen=True, slots=True)
class ClusterReading:
    """The cluster at one moment, as the router tells it."""

    at_s: float
    """The time of the reading, by the reader's clock, which only counts up."""
    router_incarnation: int
    queued_requests: int
    demand: DemandCounts
    workers: tuple[WorkerReading, ...]


def observe(
    before: ClusterReading | None,
    after: ClusterReading,
    members: Mapping[WorkerId, Role] | None = None,
    *,
    slo_class: str | None = None,
) -> Observations:
    """Return what happened between two readings. None: `after` is the first one, so all rates are missing.

    members: the workers that the actuator keeps or starts, with the role that each should have. A worker that the router does
    not have in this role yet is coming. Workers that the actuator removes do not belong here.
    slo_class: the class whose requests tell whether targets are met. None: those of all classes.
    """
    interval_s = 0.0 if before is None else after.at_s - before.at_s
    interval_s = interval_s if 0.0 < interval_s < math.inf else 0.0
    met = _Counts(before, after, interval_s)
    seen = {} if before is None else {(w.hello.worker_id, w.hello.incarnation): w for w in before.workers}
    members = members or {}
    coming = _coming(after.workers, members)
    leaving = _leaving(after.workers, members)
    return Observations(
        now_s=after.at_s,
        interval_s=interval_s,
        demand=_demand(met, after),
        prefill=_pool(Role.PREFILL, after.workers, seen, coming[Role.PREFILL], leaving[Role.PREFILL], interval_s),
        decode=_pool(Role.DECODE, after.workers, seen, coming[Role.DECODE], leaving[Role.DECODE], interval_s),
        ttft_met=met.share("ttft", slo_class),
        tpot_met=met.share("tpot", slo_class),
        ended=met.ended(slo_class),
        missed=met.missed(slo_class),
        refused=met.of_class(slo_class, "refused"),
        first_gap_s=_ratio(met.of_class(slo_class, "first_gap_s"), met.of_class(slo_class, "first_gaps")),
    )


def since_start(reading: ClusterReading) -> Observations:
    """Return what happened since the start of the router and of each worker, as one interval."""
    uptime_s = max(_known(reading.demand.uptime_s) or 0.0, 1.0)
    workers = tuple(replace(worker, load=START) for worker in reading.workers)
    return observe(ClusterReading(reading.at_s - uptime_s, reading.router_incarnation, 0, DemandCounts(), workers), reading)


class _Counts:
    """The counts of the router in the interval."""

    def __init__(self, before: ClusterReading | None, after: ClusterReading, interval_s: float) -> None:
        self._after = after.demand
        same = before is not None and before.router_incarnation == after.router_incarnation
        self._before = before.demand if before is not None and same and interval_s > 0.0 else None
        self.seconds = None if self._before is None else _seconds(self._before.uptime_s, self._after.uptime_s)

    def grown(self, name: str) -> float | None:
        """Return by how much a count has grown. None: it cannot be compared."""
        if self._before is None or self.seconds is None:
            return None
        return _grown(getattr(self._before, name), getattr(self._after, name))

    def share(self, target: str, slo_class: str | None) -> float | None:
        """Return the share of the requests that met a target. None: it cannot be compared, or there were none."""
        return _share(self.of_class(slo_class, f"{target}_met"), self.of_class(slo_class, f"{target}_missed"))

    def of_class(self, slo_class: str | None, name: str) -> float | None:
        """Return by how much a count of a class has grown. None as a class: those of all. None: it cannot be compared."""
        before, after, names = self._before, self._after, self._names(slo_class)
        if before is None or names is None:
            return None
        return _sum([_grown(getattr(before.of_class(one), name), getattr(after.of_class(one), name)) for one in names])

    def _names(self, slo_class: str | None) -> list[str] | None:
        """Return the classes that are meant. None: nothing can be compared."""
        if self._before is None or self.seconds is None:
            return None
        return [one.slo_class for one in self._after.classes] if slo_class is None else [slo_class]

    def ended(self, slo_class: str | None) -> float | None:
        """Return how many requests of a class ended and had a target. None: it cannot be compared."""
        names = self._names(slo_class)
        return None if names is None else _sum([self._ended_of(name) for name in names])

    def _ended_of(self, name: str) -> float | None:
        """Return the ended requests of one class. Those that left before their second token have no TPOT."""
        ended = [
            _sum([self.of_class(name, f"{target}_met"), self.of_class(name, f"{target}_missed")]) for target in ("ttft", "tpot")
        ]
        return None if None in ended else max(one or 0.0 for one in ended)

    def missed(self, slo_class: str | None) -> Missed:
        """Return why requests of a class missed their targets. What cannot be compared counts as 0."""

        def of(name: str) -> float:
            return self.of_class(slo_class, name) or 0.0

        return Missed(
            queue=of("late_by_queue"),
            prefill_queue=of("late_by_prefill_queue"),
            prefill=of("late_by_prefill"),
            colocated=of("late_by_colocated"),
            transfer=of("slow_by_transfer"),
            first_decode=of("slow_by_first_decode"),
            steps=of("slow_by_steps"),
            failure=of("late_by_failure") + of("slow_by_failure"),
        )

    def rate(self, *names: str) -> float | None:
        """Return by how much these counts have grown together in a second."""
        return _ratio(_sum([self.grown(name) for name in names]), self.seconds)


def _demand(met: _Counts, after: ClusterReading) -> DemandObserved:
    return DemandObserved(
        requests_per_s=met.rate("requests", "refused"),
        prompt_tokens_per_s=met.rate("prompt_tokens"),
        output_tokens_per_s=met.rate("output_tokens"),
        queued_requests=_known(after.queued_requests),
        queued_prompt_tokens=_known(after.demand.queued_prompt_tokens),
        longest_wait_s=_known(after.demand.longest_wait_s),
        refused_per_s=met.rate("refused"),
        prefill_share=_at_most_1(_ratio(met.grown("prefill_prompt_tokens"), met.grown("placed_prompt_tokens"))),
    )


def _coming(workers: Iterable[WorkerReading], members: Mapping[WorkerId, Role]) -> dict[Role, int]:
    """Count the workers of each role that are asked for, load, are not ready yet, or change into the role."""
    coming = dict.fromkeys(Role, 0)
    linked = {}
    for worker in workers:
        linked[worker.hello.worker_id] = worker.hello.role
        coming[worker.hello.role] += not worker.ready and not worker.draining
    for worker_id, role in members.items():
        coming[role] += linked.get(worker_id) is not role
    return coming


def _leaving(workers: Iterable[WorkerReading], members: Mapping[WorkerId, Role]) -> dict[Role, int]:
    """Count the workers of each role that drain. A worker that comes back in its other role counts there, as coming."""
    leaving = dict.fromkeys(Role, 0)
    for worker in workers:
        role = worker.hello.role
        leaving[role] += worker.draining and members.get(worker.hello.worker_id, role) is role
    return leaving


_Seen = Mapping[tuple[WorkerId, Incarnation], WorkerReading]


def _pool(
    role: Role, workers: Iterable[WorkerReading], seen: _Seen, coming: int, leaving: int, interval_s: float
) -> PoolObserved:
    of_role = sorted((w for w in workers if w.hello.role is role), key=lambda w: w.hello.worker_id)
    ready = [w for w in of_role if w.ready and not w.draining]
    spans = [
        span
        for w in ready
        if (old := seen.get((w.hello.worker_id, w.hello.incarnation))) is not None
        and (span := _Span.of(role, old.load, w.load, interval_s)) is not None
    ]
    counting = [s for s in spans if s.decode_steps > 0.0] if role is Role.DECODE else []
    queried, hit = _total(spans, lambda s: s.queried), _total(spans, lambda s: s.hit)
    return PoolObserved(
        ready=len(ready),
        coming=coming,
        leaving=leaving,
        tokens_per_s=math.fsum(s.tokens / s.seconds for s in spans) if spans else None,
        busy_tokens_per_s=_ratio(_total(spans, lambda s: s.tokens), _total(spans, lambda s: s.busy_s)),
        utilisation=_mean([min(1.0, s.busy_s / s.seconds) for s in spans]),
        step_s=_ratio(_total(counting, lambda s: s.decode_s), _total(counting, lambda s: s.decode_steps))
        or _mean([_step_s(role, w.load) for w in ready]),
        step_sequences=_ratio(
            _total(counting, lambda s: s.tokens), _total(counting, lambda s: s.decode_steps + s.prompt_steps)
        ),
        sequences=_mean([_known(w.load.running_sequences) for w in ready]),
        max_sequences=_mean([_known(w.hello.slots(w.load)) for w in ready]),
        kv_used=_mean([_kv_used(w.load) for w in ready]),
        queued_tokens=_sum([_known(w.load.queued_tokens) for w in ready]) if ready else None,
        cached_share=None if queried is None or hit is None else _share(hit, queried - hit),
        prompt_share=_mean([min(1.0, s.prompt_s / s.seconds) for s in spans]),
    )


@dataclass(frozen=True, slots=True)
class _Span:
    """The counts of one worker in the interval, all of one incarnation."""

    seconds: float
    tokens: float
    busy_s: float
    prompt_s: float
    """The time that prompts added to the steps."""
    prompt_steps: float
    decode_s: float
    """The time of steps without a prompt."""
    decode_steps: float
    """The number of those steps. 0: none, or the worker does not count them."""
    queried: float
    hit: float

    @classmethod
    def of(cls, role: Role, old: WorkerLoad, new: WorkerLoad, interval_s: float) -> _Span | None:
        """Return the difference of two loads. None: a clock stands, or a count went back or is no number."""
        seconds = _seconds(old.uptime_s, new.uptime_s) if interval_s > 0.0 else None
        tokens = (
            _grown(old.computed_prompt_tokens, new.computed_prompt_tokens)
            if role is Role.PREFILL
            else _grown(old.output_tokens, new.output_tokens)
        )
        prompt_s = _grown(old.prompt_busy_s, new.prompt_busy_s)
        busy_s = _sum([prompt_s, _grown(old.decode_busy_s, new.decode_busy_s)])
        queried = _grown(old.prefix_queried_tokens, new.prefix_queried_tokens)
        hit = _grown(old.prefix_hit_tokens, new.prefix_hit_tokens)
        if seconds is None or tokens is None or prompt_s is None or busy_s is None or queried is None or hit is None:
            return None
        if new.running_sequences > 0:
            decodes_s = (_grown(old.prompt_steps, new.prompt_steps) or 0.0) * (_known(new.decode_step_s) or 0.0)
            prompt_s = max(0.0, prompt_s - decodes_s)
        prompt_steps, decode_steps = (
            _grown(getattr(old, one), getattr(new, one)) or 0.0 for one in ("prompt_steps", "decode_steps")
        )
        decode_s = _grown(old.decode_busy_s, new.decode_busy_s) or 0.0
        return cls(seconds, tokens, busy_s, prompt_s, prompt_steps, decode_s, decode_steps, queried, hit)


def _step_s(role: Role, load: WorkerLoad) -> float | None:
    """Return the time of a decode step, or of a full step of a prefill worker. None: there was none of late."""
    if role is Role.DECODE:
        return _known(load.decode_step_s) or None
    return _ratio(_known(load.max_num_batched_tokens), _known(load.prompt_tokens_per_s)) or None


def _kv_used(load: WorkerLoad) -> float | None:
    blocks = load.blocks
    share = _ratio(_known(blocks.held + blocks.quarantined), _known(blocks.total))
    return _at_most_1(share)


def _known(value: float) -> float | None:
    """Return a value. None: it is negative or no finite number."""
    return float(value) if 0.0 <= value < math.inf else None


def _grown(old: float, new: float) -> float | None:
    return _known(new - old) if _known(old) is not None else None


def _seconds(old_s: float, new_s: float) -> float | None:
    grown = _grown(old_s, new_s)
    return grown if grown is not None and grown >= MIN_INTERVAL_S else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else _known(part / whole)


def _share(part: float | None, rest: float | None) -> float | None:
    """Return part / (part + rest). None: one is missing, or both are 0."""
    if part is None or rest is None or part < 0.0 or rest < 0.0:
        return None
    return _ratio(part, part + rest)


def _at_most_1(share: float | None) -> float | None:
    return None if share is None else min(1.0, share)


def _sum(values: list[float | None]) -> float | None:
    """Return the sum. None: a value is missing."""
    found = [value for value in values if value is not None]
    return math.fsum(found) if len(found) == len(values) else None


def _total(spans: list[_Span], read: Callable[[_Span], float]) -> float | None:
    return math.fsum(map(read, spans)) if spans else None


def _mean(values: list[float | None] | list[float]) -> float | None:
    """Return the mean of the values that are there. None: there are none."""
    found = [value for value in values if value is not None]
    return math.fsum(found) / len(found) if found else None
