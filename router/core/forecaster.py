"""The forecaster foresees the first token of each new request, and refuses a request that would be too late. It is pure."""

from __future__ import annotations

from router.core.forecast import Prediction, check_target, predict, queue_wait_s
from router.core.live_request import LiveRequest
from router.core.placer import Placer
from router.core.requests import Requests


class Forecaster:
    """Foresees the time to the first token of new requests."""

    def __init__(self, placer: Placer, requests: Requests) -> None:
        self._placer = placer
        self._requests = requests

    def foresee(self, request: LiveRequest, now_s: float) -> None:
        """Write the predicted TTFT into a new request whose class has a target for it. Raises `Overloaded` when the request
        would miss the target for want of a free worker. Other requests are spared the look at workers, which takes a sixth of
        the time that the core takes for a request."""
        if request.slo.ttft_s is None:
            return
        prediction = self._predict(request, now_s)
        late_s = now_s - request.times.arrived_s
        check_target(request.slo, prediction, late_s=late_s)
        if prediction is not None:
            request.predicted_ttft_s = late_s + prediction.ttft_s

    def _predict(self, request: LiveRequest, now_s: float) -> Prediction | None:
        outlook = self._placer.outlook(request, now_s=now_s)
        if outlook is None:
            return None
        wait_s: float | None = 0.0
        if not outlook.has_room:
            waiting, running = self._requests.waiting, len(self._requests.ledger)
            wait_s = queue_wait_s(waiting.ahead_of(request), self._requests.stays.drained_per_s(running))
        return predict(outlook.computer, request.work_len, wait_s)
