"""Fair slots: a request of a client that has nothing on a decode worker does not wait until the first of a burst ends there.

Turns order who waits, but slots come back only as requests end, and those of a burst end together. So at a tick, the first of
the queue may take the place of a request that runs: of the client that has most on a worker where its own has nothing, or of
the connection or the call that has most where the client is its own. Who has at most an eighth of a worker is no burst, and
nobody loses the last request.

Who gives way loses no token: it is replayed in the same attempt, as in a migration, and gets the next slot before all who are
new. It needs no less KV than who takes its place, so nothing else has to give way as well. Each request is helped once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from router.core.dispatcher import Dispatcher
from router.core.events import Effects
from router.core.live_request import LiveRequest
from router.core.migration import movable
from router.core.placer import Placer
from router.core.registry import Worker
from router.core.request_machine import RequestEvent
from router.core.requests import Requests
from router.core.story import StoryKind
from router.core.turns import Path
from router.core.waiting import line_of

BURST_SHARE: Final = 8
"""A flow with more than this part of a worker's slots gives way. With less, many calls of a few choices each would take slots
from each other all the time, and a light request finds that some call ends soon."""
MAX_FIRSTS: Final = 4
"""At most so many requests are looked at in a tick of 0.1 s. The others come next, one after the other."""
MAX_LOOKS: Final = 4
"""At most so many workers are looked at for a request in a tick, with all that runs there, and others in the next one. A tick
then takes 5 ms if each worker runs 256 sequences."""


class FairSlots:
    """Gives slots of those who have many to those who have none. A tick calls it."""

    def __init__(self, requests: Requests, dispatcher: Dispatcher, placer: Placer) -> None:
        self._requests = requests
        self._dispatcher = dispatcher
        self._placer = placer
        self._helped: dict[str, LiveRequest] = {}
        self._looks = 0

    def share(self, workers: Sequence[Worker], now_s: float) -> Effects:
        """Let the first request of each line that waits take a slot, if its client has none on one of the decode workers."""
        waiting = self._requests.waiting
        self._helped = {key: request for key, request in self._helped.items() if waiting.holds(request)}
        firsts = [first.request for kind in waiting.kinds() for first in waiting.firsts(kind)]
        firsts = [one for one in firsts if one.client and not one.replay and one.request_id not in self._helped]
        start = self._looks % max(1, len(firsts))
        for request in [*firsts[start:], *firsts[:start]][:MAX_FIRSTS]:
            self._looks += 1
            if waiting.holds(request):
                yield from self._help(request, workers, now_s)

    def _help(self, request: LiveRequest, workers: Sequence[Worker], now_s: float) -> Effects:
        start = self._looks * MAX_LOOKS % max(1, len(workers))
        for worker in [*workers[start:], *workers[:start]][:MAX_LOOKS]:
            if worker.serves and worker.alone_for is None and worker.hello.max_model_len >= request.max_len:
                gives_way = self._giving_way(request, worker)
                if gives_way is not None:
                    self._helped[request.request_id] = request
                    yield from self._requests.alone(gives_way, self._give_way(gives_way, worker, request, now_s), now_s)
                    return

    def _giving_way(self, request: LiveRequest, worker: Worker) -> LiveRequest | None:
        """Return the request of the largest flow on a worker that costs least to replay. None: nobody has to give way. Nobody
        does for a class of lower priority than its own, or an urgent one for another."""
        running = [work.request.client for work in worker.work.values()]
        priority, urgent = line_of(request).priority, request.slo.urgent
        lesser = [
            work
            for work in worker.work.values()
            if work.request.slo.priority <= priority >= work.request.spec.priority and (urgent or not work.request.slo.urgent)
        ]
        flow = largest_beside(
            request.client,
            running,
            [work.request.client for work in lesser],
            more_than=max(1, worker.slots // BURST_SHARE),
        )
        if not flow:
            return None
        need = self._placer.need_tokens(request)
        some = [
            work.request
            for work in lesser
            if work.request.client[: len(flow)] == flow
            and movable(work)
            and not work.request.suspect
            and self._placer.need_tokens(work.request) >= need
        ]
        return min(some, key=lambda one: (one.migrations, one.work_len + len(one.emitted)), default=None)

    def _give_way(self, request: LiveRequest, worker: Worker, to: LiveRequest, now_s: float) -> Effects:
        request.machine.move(RequestEvent.MIGRATED)
        request.migrations += 1
        request.story.note(now_s, StoryKind.MIGRATED, worker=worker.hello.worker_id, emitted=len(request.emitted))
        yield from self._requests.withdraw(request)
        request.start_over()
        yield from self._requests.alone(to, self._dispatcher.place_first(to, now_s), now_s)
        self._requests.wait(request)


def largest_beside(path: Path, running: Sequence[Path], lesser: Sequence[Path], *, more_than: int) -> Path:
    """Return the flow of which most of `lesser` runs, a part of `running`, among those beside `path`, of which nothing runs.
    Empty: something of it runs, as far as it differs from the others, or no other flow has more than so many requests."""
    for level, name in enumerate(path):
        beside = {one[level] for one in running if one[:level] == path[:level] and len(one) > level}
        if name not in beside:
            counts = Counter(one[level] for one in lesser if one[:level] == path[:level] and len(one) > level)
            flow, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
            return (*path[:level], flow) if count > more_than else ()
        if len(beside) > 1:
            return ()
    return ()
