"""The forecaster foresees the first token of each new request, and keeps the measured cost of handoffs. It is pure."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from router.core.forecast import times
from router.core.forecast.prediction import Prediction, check_target, predict
from router.core.forecast.transfers import Transfers
from router.core.live_request import LiveRequest
from router.core.policy.candidate import Candidate


class Outlook(NamedTuple):
    """The prospects of a new request, as things are now."""

    computer: Candidate  # the worker that would compute its prompt
    has_room: bool  # some decode worker would take the request at once


class Prospects(Protocol):
    """The part of the placer that foresees a placement."""

    def outlook(self, request: LiveRequest, *, now_s: float) -> Outlook | None:
        """Return where a request would probably be placed. It picks nothing. None: nobody can tell."""


class Queue(Protocol):
    """The queue for decode workers, as far as a forecast needs it."""

    def drained_per_s(self, now_s: float) -> float:
        """Return how many requests end in a second, of late. 0: nobody knows."""


class Forecaster:
    """Foresees the time to the first token of new requests."""

    def __init__(self, prospects: Prospects, queue: Queue) -> None:
        self.transfers = Transfers()
        self._prospects = prospects
        self._queue = queue

    def foresee(self, request: LiveRequest, ahead: int, now_s: float) -> None:
        """Write the predicted TTFT into a new request. `ahead` requests wait before it. Raises `Overloaded` when it would miss
        the target of its class for want of a free worker."""
        prediction = self._predict(request, ahead, now_s)
        late_s = now_s - request.times.arrived_s
        check_target(request.slo, prediction, late_s=late_s)
        if prediction is not None:
            request.predicted_ttft_s = late_s + prediction.ttft_s

    def _predict(self, request: LiveRequest, ahead: int, now_s: float) -> Prediction | None:
        outlook = self._prospects.outlook(request, now_s=now_s)
        if outlook is None:
            return None
        queue_wait_s = times.queue_wait_s(ahead, self._queue.drained_per_s(now_s), has_room=outlook.has_room)
        return predict(outlook.computer, request.work_len, queue_wait_s)
