"""Poison requests: a request that ends its workers must not end all of them, and must not take its companions with it.

A worker that dies takes a batch of requests with it, and one of them may be the reason. Each request of the batch is replayed.
A request that was running on two workers as they died is a *suspect*, and so are all its companions that were replayed beside
it. A *trial* finds out which suspect is at fault: one suspect runs alone on a decode worker, which computes the prompt as well,
until it has come `TRIAL_TOKENS` further than before. Then it is cleared, and other requests may run beside it. Only cleared
requests may stay beside the next trial: otherwise the suspects of a cluster with one decode worker would wait until each
earlier suspect ends. A suspect whose worker dies in its trial fails with `PoisonRequest`: no other request can have been the
reason.

The core reports which deaths followed the first death by a poison request, so the process that restarts the workers does not
count them.

A worker whose link broke and that dials again as the same process has not died, and its requests are forgiven. Forgiveness has
a limit, since a request may also break links without ending a process, for instance by an answer that cannot be read.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from pdserve.core.errors import PoisonRequest, Unavailable
from pdserve.core.ids import Incarnation
from pdserve.core.sampling import Placement
from pdserve.core.worker import Role
from router.core.dispatcher import Dispatcher
from router.core.events import Effects
from router.core.live_request import Death, LiveRequest, Reason, RemoteWork, StoryKind
from router.core.placer import Pick, Placer
from router.core.policy import Why
from router.core.registry import Worker
from router.core.request_machine import RequestEvent
from router.core.requests import Requests
from router.core.waiting import own_turn
from router.core.work_machine import WorkState

_E = RequestEvent

TRIAL_TOKENS: Final = 32
"""A request that ends workers ends them at its prompt or at one of its tokens. When a worker dies, the router has received all
but its last few tokens, so a suspect that has come this much further has passed the fatal place."""
TRIAL_SHARE: Final = 4
"""One of each group of this many serving decode workers may be on trial at a time, or one worker if there are fewer."""
MAX_POISONED: Final = 100
"""The number of deaths by poison requests that are remembered. The process that restarts the workers asks for them once a
second."""
MAX_FORGIVEN: Final = 16
"""The number of losses of workers that came back which are forgiven to a request. Load and networks break links too, but a
request that breaks links itself would be replayed for ever, and would take all companions with it each time."""
_READS: Final = (WorkState.ATTACHED, WorkState.COMMITTED)


class Suspects:
    """Finds suspects, and gives each suspect a decode worker for itself."""

    def __init__(self, requests: Requests, dispatcher: Dispatcher, placer: Placer, *, wait_s: float) -> None:
        """`wait_s` is the longest time that a worker is kept from others before it is empty."""
        self._requests = requests
        self._dispatcher = dispatcher
        self._placer = placer
        self._wait_s = wait_s
        self._by_death: dict[Incarnation, list[LiveRequest]] = {}
        self._trials: list[LiveRequest] = []
        self.poisoned: deque[Death] = deque(maxlen=MAX_POISONED)
        """The deaths that followed the first death by a poison request. They say nothing about their workers."""

    def worker_died(self, worker: Worker) -> None:
        """Note the death of a worker for the requests that were running there."""
        self._note_death(worker, _running(worker))

    def link_broke(self, worker: Worker) -> None:
        """Note the loss of a worker that dialled again before its old link was lost, so no worker died. For requests that have
        been forgiven too often, it counts as a death."""
        self._note_death(worker, [request for request in _running(worker) if not _forgiven(request)])

    def _note_death(self, worker: Worker, running: list[LiveRequest]) -> None:
        died = Death(worker.hello.worker_id, worker.hello.incarnation, worker.hello.pid)
        for request in running:
            request.deaths += (died,)
            request.cleared = False
            if request.trial_from is not None and request.alone_on == worker.link:
                request.convicted = True
                self.poisoned += [death for death in request.deaths[1:] if death not in self.poisoned]
        if running:
            self._by_death[died.incarnation] = running

    def came_back(self, incarnation: Incarnation) -> None:
        """Forgive the requests of a worker that has not died: the same process has dialled again. Each is forgiven
        `MAX_FORGIVEN` times."""
        for request in self._by_death.pop(incarnation, ()):
            if not request.machine.terminal and _forgiven(request):
                request.deaths = tuple(death for death in request.deaths if death.incarnation != incarnation)
                if not request.suspect and self._requests.waiting.is_alone(request):
                    self._requests.stop_waiting(request)
                    self._requests.wait(request)
                elif not request.suspect and request.trial_from is not None:
                    self._requests.end_trial(request)  # the loss of its worker would convict it

    def look(self, now_s: float) -> None:
        """End the trials that are over. A tick does this."""
        for died, requests in list(self._by_death.items()):
            if all(request.machine.terminal for request in requests):
                del self._by_death[died]
        for request in list(self._trials):
            if request.trial_from is None or request.machine.terminal:
                self._trials.remove(request)
            elif len(request.emitted) >= request.trial_from + TRIAL_TOKENS:
                self._clear(request, now_s)

    def place(self, now_s: float) -> Effects:
        """Begin trials where a worker is empty, and keep workers that are not. Once enough workers are kept, only requests with
        a kept worker are looked at: each event that opens room calls this, however many requests wait."""
        waiting = self._requests.waiting.alone()
        if not waiting:
            return
        decodes = self._requests.registry.of_role(Role.DECODE)
        serving, kept = sum(worker.serves for worker in decodes), sum(worker.alone_for is not None for worker in decodes)
        left = max(1, serving // TRIAL_SHARE) - kept
        looked_at = waiting if left > 0 else [request for request in waiting if request.alone_on is not None]
        for request in sorted(looked_at, key=own_turn):
            if request.alone_on is not None or left > 0:
                had = request.alone_on
                yield from self._requests.alone(request, self._place(request, now_s), now_s)
                left -= request.alone_on is not None and had is None
        if left <= 0:
            for request in waiting:
                request.unplaceable_since_s = None

    def _clear(self, request: LiveRequest, now_s: float) -> None:
        self._trials.remove(request)
        request.deaths, request.cleared, request.forgiven = (), True, 0
        self._requests.end_trial(request)
        request.story.note(now_s, StoryKind.CLEARED)

    def _place(self, request: LiveRequest, now_s: float) -> Effects:
        """Begin the trial of a suspect if its worker is empty. If the suspect has no worker yet, keep a worker for it."""
        worker = None if request.alone_on is None else self._requests.registry.get(request.alone_on)
        if worker is None or not self._may_try(worker, request, now_s):
            self._requests.end_trial(request)
            worker = self._pick(request, now_s)
            if worker is None:
                yield from self._find_nobody(request, now_s)
                return
            self._requests.keep_alone(request, worker, now_s)
        request.unplaceable_since_s = None
        if worker.has_room and all(_harmless(work) for work in worker.work.values()):
            self._requests.stop_waiting(request)
            self._requests.keep_alone(request, worker, now_s)
            request.trial_from = len(request.emitted)
            self._trials.append(request)
            need_tokens = self._placer.need_tokens(request)
            pick = Pick(worker, Why.ALONE, (), 0, need_tokens, Placement.COLOCATED, Reason.SUSPECT)
            yield self._dispatcher.bind(request, pick, now_s)
        elif now_s - request.kept_alone_s >= self._wait_s:
            lost = Unavailable(
                f"{len(request.deaths)} workers died while they computed the request, so it must run alone, and no decode "
                f"worker was empty within {self._wait_s:g} s"
            )
            yield from self._requests.end(request, _E.UNPLACEABLE, now_s, lost)

    def _pick(self, request: LiveRequest, now_s: float) -> Worker | None:
        """Return the emptiest decode worker that may try the request. None: there is none, or enough are on trial."""
        decodes = self._requests.registry.of_role(Role.DECODE)
        free = [w for w in decodes if w.alone_for is None and w.claimed_by is None and self._may_try(w, request, now_s)]
        return min(free, key=lambda worker: (worker.requests_placed, worker.picked, worker.link), default=None)

    def _may_try(self, worker: Worker, request: LiveRequest, now_s: float) -> bool:
        fits = worker.hello.max_model_len >= request.max_len
        return fits and worker.serves and not self._placer.suspect(worker, now_s=now_s)

    def _find_nobody(self, request: LiveRequest, now_s: float) -> Effects:
        """Fail a suspect for which no worker serves for `wait_s`. While others have their trials, it waits for its turn."""
        decodes = self._requests.registry.of_role(Role.DECODE)
        if any(worker.alone_for is not None or self._may_try(worker, request, now_s) for worker in decodes):
            request.unplaceable_since_s = None
            return
        if request.unplaceable_since_s is None:
            request.unplaceable_since_s = now_s
        if now_s - request.unplaceable_since_s >= self._wait_s:
            lost = Unavailable("no ready decode worker could compute the request, which must run alone")
            yield from self._requests.end(request, _E.UNPLACEABLE, now_s, lost)

    def check_invariants(self) -> None:
        """Assert that each worker that is kept for a suspect knows it, and the other way round."""
        kept = {worker.link: worker.alone_for for worker in self._requests.registry if worker.alone_for is not None}
        live = [r for r in self._requests.of_clients() if r.alone_on is not None]
        linked = {worker.link for worker in self._requests.registry}
        assert kept == {r.alone_on: r.request_id for r in live if r.alone_on in linked}
        for request in live:
            if request.trial_from is not None and request.decode is not None:
                assert request.decode.link == request.alone_on
                worker = self._requests.registry.get(request.decode.link)
                assert worker is not None
                assert all(_harmless(work) for work in worker.work.values() if work.request is not request), "it has company"


def poison(request: LiveRequest, why: str) -> PoisonRequest:
    """Return the error of a request that has ended its workers."""
    workers = ", ".join(str(death.worker_id) for death in request.deaths)
    return PoisonRequest(
        f"{len(request.deaths)} workers died while they computed this request ({workers}); {why}. It is not tried again, and "
        "should not be sent again before an operator knows why they died"
    )


def _running(worker: Worker) -> list[LiveRequest]:
    """Return the requests of clients that run on a worker. A draining worker is expected to leave, so its requests do not
    count."""
    if worker.draining:
        return []
    return [work.request for work in worker.work.values() if work.request.probe is None and _runs(work)]


def _forgiven(request: LiveRequest) -> bool:
    """Forgive a request the loss of a worker that is still alive. False: the request has been forgiven `MAX_FORGIVEN` times."""
    if request.forgiven >= MAX_FORGIVEN:
        return False
    request.forgiven += 1
    return True


def _harmless(work: RemoteWork) -> bool:
    """Tell whether a suspect may run beside this work."""
    return work.request.cleared or work.request.probe is not None


def _runs(work: RemoteWork) -> bool:
    """Tell whether the work's worker may still compute for the request or read for it. After a prompt is computed, only its KV
    is left there."""
    if work.role is Role.PREFILL:
        return work.machine.state is not WorkState.PREFILLED
    return work.request.placement is Placement.COLOCATED or work.machine.state in _READS
