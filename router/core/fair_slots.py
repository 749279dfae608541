"""Fair slots: a request of a client that has nothing on a decode worker does not wait until the first of a burst ends there.

Turns order the waiting requests, but slots come back only as requests end, and the requests of a burst end together. So at a
tick, the first waiting request may take the slot of a running request. It takes the slot on a worker where its own client runs
nothing, from the client that runs the most there. Where only its own client runs requests, connections are compared in the same
way, and then calls. A client with at most an eighth of a worker is no burst, and no client loses its last request.

The request that gives way loses no token: it is replayed in the same attempt, as in a migration, and gets the next slot before
all new requests. It needs at least as much KV as the request that takes its slot, so no further request has to give way. Each
waiting request is helped once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from router.core.dispatcher import Dispatcher
from router.core.events import Effects
from router.core.live_request import LiveRequest, StoryKind
from router.core.migration import movable
from router.core.placer import Placer
from router.core.registry import Worker
from router.core.request_machine import RequestEvent
from router.core.requests import Requests
from router.core.turns import Path
from router.core.waiting import line_of

BURST_SHARE: Final = 8
"""A flow with more than this part of a worker's slots gives way. With less, many calls of a few choices each would take slots
from each other all the time, and a light request finds that some call ends soon."""
MAX_FIRSTS: Final = 4
"""The most requests that one tick of 0.1 s looks at. The next ticks look at the other requests."""
MAX_LOOKS: Final = 4
"""The most workers that a tick looks at for one request, with all requests that run there. The next tick looks at other
workers. A tick then takes 5 ms if each worker runs 256 sequences."""


class FairSlots:
    """Gives slots of clients that have many to clients that have none. A tick calls it."""

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
        firsts = [first for first in firsts if first.client and not first.replay and first.request_id not in self._helped]
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
        """Return the request of the largest flow on a worker that costs least to replay. None: nobody has to give way. A
        request never gives way to a class of lower priority, and a request of an urgent class never gives way to a class that
        is not urgent."""
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
            and movable(work, self._requests.registry)
            and not work.request.suspect
            and self._placer.need_tokens(work.request) >= need
        ]
        return min(some, key=lambda other: (other.migrations, other.work_len + len(other.emitted)), default=None)

    def _give_way(self, request: LiveRequest, worker: Worker, to: LiveRequest, now_s: float) -> Effects:
        request.machine.move(RequestEvent.MIGRATED)
        request.migrations += 1
        request.story.note(now_s, StoryKind.MIGRATED, worker=worker.hello.worker_id, emitted=len(request.emitted))
        yield from self._requests.withdraw(request)
        request.start_over()
        yield from self._requests.alone(to, self._dispatcher.place_first(to, now_s), now_s)
        self._requests.wait(request)


def largest_beside(path: Path, running: Sequence[Path], lesser: Sequence[Path], *, more_than: int) -> Path:
    """Return the flow with the most requests of `lesser`, which is a part of `running`, if the flow of `path` runs nothing. The
    first level at which running flows differ from `path` is compared. Empty: the flow of `path` runs beside others at that
    level, or no other flow has more than `more_than` requests."""
    for level, name in enumerate(path):
        beside = {client[level] for client in running if client[:level] == path[:level] and len(client) > level}
        if name not in beside:
            counts = Counter(client[level] for client in lesser if client[:level] == path[:level] and len(client) > level)
            flow, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
            return (*path[:level], flow) if count > more_than else ()
        if len(beside) > 1:
            return ()
    return ()
