"""The watch over one router's core. It sees each event and the core's decision, and counts independently the lost workers and
the failures of each request: so it knows which costs of a request are allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pdserve.core.errors import ErrorCode
from pdserve.core.ids import Incarnation, RequestId
from pdserve.core.speculation import NO_COUNTS, DraftCounts
from router.core import events as ev
from router.core.live_request import LiveRequest
from router.core.registry import Worker
from router.core.router_core import RouterCore

MAX_ENDED: Final = 3
"""The most workers that a request may end: two deaths make it a suspect, and the third is on the worker where it ran alone."""


@dataclass(slots=True)
class _Seen:
    """The record of one request. `lost` are all its losses of workers, `ended` are the losses that it has caused."""

    request: LiveRequest
    losses: list[Incarnation] = field(default_factory=list)
    """The workers that were lost with the request on them, and have not come back as the same process."""
    lost: int = 0
    failures: int = 0
    refusals: int = 0
    ended: int = 0
    drafts: DraftCounts = NO_COUNTS
    """The drafts of all attempts that came to their last token."""


class CoreWatch:
    """Watches a core from its start. `report` takes each violation as a sentence. `ended_by` names the request that has ended a
    worker, by the worker's incarnation."""

    def __init__(self, core: RouterCore, report: Callable[[str], None], ended_by: Mapping[Incarnation, str]) -> None:
        self._core = core
        self._handle = core.handle
        self._report = report
        self._ended_by = ended_by
        self._seen: dict[RequestId, _Seen] = {}
        self._failures = 0
        self._drains: dict[ev.LinkId, float] = {}
        self.drained_s: list[float] = []
        """How long each departed worker had drained, as far as the router knew."""
        self.lost = 0
        """The workers that were lost, and not by a drain or a flip."""
        self.migrations = 0
        self.unplaced = 0
        """The requests that were accepted and then found no worker."""
        self.met: set[Incarnation] = set()
        """The workers that have joined."""
        core.handle = self.handle  # type: ignore[method-assign]

    def handle(self, event: ev.Event, *, now_s: float) -> list[ev.Effect]:
        """Let the core handle an event, and check the effects. Only requests of clients are checked."""
        bucket = self._core.recovery.bucket
        workers, taken, failing = list(self._core.registry), bucket.taken, self._failing(event)
        if isinstance(event, ev.StepRows):
            self._told(event)
        effects = self._handle(event, now_s=now_s)
        if isinstance(event, ev.Submit):
            request = self._core.requests.get(event.request_id)
            if request is not None:
                self._seen[event.request_id] = _Seen(request)
        elif isinstance(event, ev.WorkerJoined):
            self._joined(event.hello.incarnation)
        elif isinstance(event, ev.Tick):
            for worker in self._core.registry:
                if worker.draining:
                    self._drains.setdefault(worker.link, now_s)
        if bucket.taken != taken and (failing is None or bucket.taken > taken + 1):
            self._report(f"{type(event).__name__} took {bucket.taken - taken} retries out of the bucket")
        for worker in workers:
            if self._core.registry.get(worker.link) is not worker:
                self._lost(worker, now_s)
        for effect in effects:
            if isinstance(effect, ev.SendDrain | ev.SendFlip):
                self._drains.setdefault(effect.link, now_s)
            elif isinstance(effect, ev.SendBind):
                self._bound(effect)
            elif isinstance(effect, ev.EmitDone | ev.EmitFailed):
                self._end(effect, failing)
        return effects

    def _told(self, event: ev.StepRows) -> None:
        """Count the drafts that a worker tells with the last token of an attempt."""
        worker = self._core.registry.get(event.link)
        for row in event.rows if worker is not None else ():
            work = worker.work.get(row.handle)  # type: ignore[union-attr, call-overload]
            seen = None if work is None else self._seen.get(work.request.request_id)
            if seen is not None and row.finish_reason and row.speculation.num_drafts:
                seen.drafts = seen.drafts.plus(DraftCounts.told(row.speculation))

    def _joined(self, incarnation: Incarnation) -> None:
        """A worker that dials again has not died, only its link has."""
        self.met.add(incarnation)
        for seen in self._seen.values():
            seen.losses = [lost for lost in seen.losses if lost != incarnation]

    def _bound(self, effect: ev.SendBind) -> None:
        """Only requests that have passed their own trial may run beside one that is on trial."""
        worker = self._core.registry.get(effect.link)
        tried = None if worker is None or worker.alone_for is None else self._seen.get(worker.alone_for)
        if worker is None or tried is None or tried.request.trial_from is None:
            return
        for work in worker.work.values():
            request = work.request
            if request is not tried.request and request.probe is None and not request.cleared:
                self._report(f"{request.request_id} runs beside {tried.request.request_id}, which is on trial")

    def _failing(self, event: ev.Event) -> _Seen | None:
        """Return the request that a worker reports as failed or refused. None: the event is no such report."""
        if not isinstance(event, ev.RequestFailed | ev.NoRoom | ev.Refused):
            return None
        worker = self._core.registry.get(event.link)
        work = None if worker is None else worker.work.get(event.handle)
        seen = None if work is None else self._seen.get(work.request.request_id)
        if seen is None or not isinstance(event, ev.RequestFailed):
            if seen is not None:
                seen.refusals += 1
            return None
        seen.failures += 1
        self._failures += 1
        return seen

    def _lost(self, worker: Worker, now_s: float) -> None:
        if (since_s := self._drains.pop(worker.link, None)) is not None:
            self.drained_s.append(now_s - since_s)
        self.lost += not worker.draining
        incarnation = worker.hello.incarnation
        for work in worker.work.values():
            seen = self._seen.get(work.request.request_id)
            if seen is None:
                continue
            seen.losses.append(incarnation)
            seen.lost += 1
            if self._ended_by.get(incarnation) == work.request.request_id and not worker.draining:
                seen.ended += 1
                if seen.ended > MAX_ENDED:
                    self._report(f"{work.request.request_id} has ended {seen.ended} workers")

    def _end(self, effect: ev.EmitDone | ev.EmitFailed, failing: _Seen | None) -> None:
        seen = self._seen.pop(effect.request_id, None)
        if seen is None:
            return
        name, attempts = effect.request_id, effect.report.attempts
        if (effect.report.speculation or NO_COUNTS) != seen.drafts:
            self._report(f"{name} is told {effect.report.speculation}, and workers have told {seen.drafts}")
        self.migrations += effect.report.migrations
        reasons = seen.lost + seen.failures + seen.refusals
        if attempts > 1 + reasons:
            self._report(f"{name} had {attempts} attempts, and {reasons} reasons for another one")
        if seen.request.charged > seen.failures:
            self._report(f"{name} was charged {seen.request.charged} attempts for {seen.failures} failures")
        if seen.failures > self._core.recovery._max_attempts:
            self._report(f"{name} was tried again after {seen.failures} failures")
        if isinstance(effect, ev.EmitFailed):
            self.unplaced += effect.error.code is ErrorCode.UNAVAILABLE
            self._failed(effect, seen, failing)

    def _failed(self, effect: ev.EmitFailed, seen: _Seen, failing: _Seen | None) -> None:
        name, error = effect.request_id, effect.error
        if error.code is ErrorCode.POISON_REQUEST:
            last = self._ended_by.get(seen.losses[-1], name) if seen.losses else name
            if len(seen.losses) < MAX_ENDED:
                self._report(f"{name} is called poison, and {len(seen.losses)} workers were lost that had it")
            elif last != name:
                self._report(f"{name} is called poison, and {last} has ended the worker on which it was tried")
        elif error.code is ErrorCode.REPLICA_LOST and failing is not seen and seen.request.remaining_tokens > 0:
            self._report(f"{name} was failed by the loss of a worker: {error.message}")
        elif "no more are allowed" in error.message and seen.failures < self._core.recovery._max_attempts:
            self._report(f"{name} was refused an attempt after {seen.failures} failures: {error.message}")
        elif "retries are used up" in error.message and self._failures <= self._core.recovery.bucket._burst:
            self._report(f"{name} was refused a retry after {self._failures} failures of all: {error.message}")
