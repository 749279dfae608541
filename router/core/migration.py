"""Migration: running requests leave a worker that is to be empty: it drains, changes its role, or will run one request alone.

A request moves as a replay from its prompt and the tokens that the client has, in the same attempt: its only cost is a pause.
So that the pause stays short, a request that decodes stays and is served where it is until another worker has room for it at
once, and only a few move at a time: a worker that leaves does not flood the others with prompts. A request that finds no room
is served to its end, or until the worker's `drain_timeout_s`. So is one whose output no other worker can take up.

A prompt that is not computed yet pauses nobody, and may take minutes, so all of them move at once, and are computed from the
beginning. If the prefill worker is to be empty, the request keeps its room: it is placed again in the event that frees the
room. It stays only where nobody else may compute it. If the decode worker is to be empty, it moves as if it decoded. A handoff
is over in a moment, and finishes.
"""

from __future__ import annotations

from typing import Final

from pdserve.core.errors import Unavailable
from pdserve.core.ids import RequestId
from pdserve.core.worker import Role
from router.core.dispatcher import Dispatcher
from router.core.events import Effects, EffectsThen, LinkId
from router.core.live_request import LiveRequest, RemoteWork, StoryKind
from router.core.placer import Placer
from router.core.registry import Registry, Worker
from router.core.request_machine import RequestEvent, RequestState
from router.core.requests import Requests
from router.core.waiting import placed_again

_S, _E = RequestState, RequestEvent

MOVES_EACH: Final = 4
"""The most moved requests that wait for their next token at a time, for each worker that takes them. Their prompts together
take a step or two, and a batch of 64 has moved after 16 turns, which is seconds."""
FINISH_TOKENS: Final = 8
"""A request with at most this many tokens left ends sooner where it is than its prompt is computed elsewhere."""
MAX_LOOKS: Final = 32
"""After this many requests without room, the others are looked at when there is room again, or at a tick. Each event that opens
room may make this many looks in all. The draining workers share these looks, and a different worker begins each time."""


class Migration:
    """Moves requests off the workers that are to be empty."""

    def __init__(self, requests: Requests, dispatcher: Dispatcher, placer: Placer) -> None:
        self._requests = requests
        self._dispatcher = dispatcher
        self._placer = placer
        self._sources: list[LinkId] = []
        self._first = 0
        self._at_once = 0
        self._moving: dict[RequestId, LiveRequest] = {}
        """The requests that have moved and whose next token has not come yet."""

    def look(self) -> None:
        """Find the workers that are to be empty, and how many requests the others can take at once. A tick does this: a look at
        each event would cost more than it gains."""
        registry = self._requests.registry
        self._sources = [w.link for w in registry if w.work and (w.draining or w.alone_for is not None)]
        self._at_once = MOVES_EACH * sum(w.serves for w in registry.of_role(Role.DECODE)) if self._sources else 0

    def migrate(self, now_s: float) -> Effects:
        """Move as many requests as have room elsewhere now."""
        if not self._sources:
            return
        self._forget_moved()
        looks, start = MAX_LOOKS, self._first % len(self._sources)
        for link in [*self._sources[start:], *self._sources[:start]]:
            worker = self._requests.registry.get(link)
            if worker is not None:
                looks = yield from self._empty(worker, looks, now_s)
            if not looks:
                return
            self._first += 1

    def _forget_moved(self) -> None:
        for request in list(self._moving.values()):
            if request.machine.terminal or len(request.emitted) > len(request.resumed):
                del self._moving[request.request_id]

    def _empty(self, worker: Worker, looks: int, now_s: float) -> EffectsThen[int]:
        """Move the requests of one worker. Return how many of the looks are left."""
        for work in list(worker.work.values()):
            request = work.request
            if not looks:
                return 0
            if request.probe is not None or (not worker.draining and request.cleared):
                continue
            if work.role is Role.PREFILL and request.machine.state is _S.PREFILLING:
                action = self._compute_elsewhere(request, worker, now_s)
            elif work.role is Role.DECODE and (request.machine.state is _S.PREFILLING or self._may_pause(work)):
                action = self._migrate(request, worker, now_s)
            else:
                continue
            looks -= not (yield from self._requests.alone(request, action, now_s))
        return looks

    def _may_pause(self, work: RemoteWork) -> bool:
        """Tell whether a request decodes that may wait for its next token now."""
        return movable(work, self._requests.registry) and len(self._moving) < self._at_once

    def _migrate(self, request: LiveRequest, worker: Worker, now_s: float) -> EffectsThen[bool]:
        """Move one request if another worker has room for it now. False: none has, and nothing has changed."""
        resumed = request.resumed
        request.resume_after(tuple(request.emitted))  # what follows is asked about the replay
        try:
            pick = self._placer.place(request, now_s=now_s, turn=placed_again(request))
        except Unavailable:
            pick = None
        if pick is None:
            request.resume_after(resumed)
            return False
        if request.machine.state is _S.DECODING:
            self._moving[request.request_id] = request
        yield from self._set_out(request, worker, now_s)
        yield self._dispatcher.bind(request, pick, now_s)
        return True

    def _compute_elsewhere(self, request: LiveRequest, worker: Worker, now_s: float) -> EffectsThen[bool]:
        """Let another worker compute a prompt. False: no other one may, and nothing has changed."""
        try:
            self._placer.decide(request, now_s=now_s)
        except Unavailable:
            return False
        yield from self._set_out(request, worker, now_s)
        pick = self._placer.place(request, now_s=now_s, turn=placed_again(request))
        if pick is None:  # somebody has claimed the room that it had
            self._requests.wait(request)
        else:
            yield self._dispatcher.bind(request, pick, now_s)
        return True

    def _set_out(self, request: LiveRequest, worker: Worker, now_s: float) -> Effects:
        request.machine.move(_E.MIGRATED)
        request.migrations += 1
        request.story.note(now_s, StoryKind.MIGRATED, worker=worker.hello.worker_id, emitted=len(request.emitted))
        yield from self._requests.withdraw(request)
        request.start_over()


def movable(work: RemoteWork, registry: Registry) -> bool:
    """Tell whether a request decodes, will do so for long enough that it is worth a move, and can be taken up elsewhere."""
    request = work.request
    runs = request.decode is work and request.machine.state is _S.DECODING and request.trial_from is None
    worth = runs and request.probe is None and request.remaining_tokens > FINISH_TOKENS
    return worth and not registry.cannot_resume(request)
