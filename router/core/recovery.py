"""Recovery: what follows a loss is a rebind, a retry, or the end of the request. This file holds the whole policy.

```
decode lost before it reserved              the same attempt waits for another decode worker
decode lost in the handoff, KV uncommitted  another decode worker with room at once reads the same lease; else a retry
a worker drains and refuses its part        the same attempt goes on with another worker: no loss (`Handoff.place_elsewhere`)
any other loss, or an error that the        a retry: the attempt is withdrawn from both workers, and the next one starts
table of errors lets the cluster retry      from the prompt and the ids that the client has
```

A retry needs time before the deadline, an attempt that the request has left, and a retry from the cluster's bucket. Without
time the request fails with `DeadlineExceeded`, without one of the others with the loss. A finished output is never replayed.

A request whose logits are not finite numbers is computed once more, because a worker's memory or a shared block may be the
reason. If the next logits are not finite either, the model or the prompt is the reason, and the request fails.
"""

from __future__ import annotations

from typing import Final

from pdserve.config import RouterConfig
from pdserve.core.error_table import TABLE
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.worker import Role
from router.core.dispatcher import Dispatcher
from router.core.events import Effects, RequestFailed
from router.core.live_request import LiveRequest, RemoteWork
from router.core.machines.request_machine import RequestEvent, RequestState
from router.core.machines.work_machine import WorkState
from router.core.pairs import Pairs
from router.core.requests import Requests
from router.core.retry import RetryBucket, after_attempts
from router.core.story import StoryKind

_S, _E = RequestState, RequestEvent

_TURNED_AWAY: Final = (ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED)
"""Errors of a worker that takes nothing at present. If it were asked again at once, it would refuse again and use up the
attempts."""


DOUBT_AFTER_S: Final = 1.0
"""A pair is in doubt when a request ends more than this after its first token and its KV is not there. At most one chunk's KV
is left to read after the first token, which takes milliseconds."""


class Recovery:
    """Decides what happens to requests whose worker is lost or has given them up."""

    def __init__(self, requests: Requests, dispatcher: Dispatcher, pairs: Pairs, config: RouterConfig) -> None:
        self._requests = requests
        self._dispatcher = dispatcher
        self._pairs = pairs
        self._max_attempts = config.max_attempts
        self.bucket = RetryBucket(share=config.retry_share, burst=config.retry_burst)

    def worker_lost(self, work: RemoteWork, error: PdserveError, now_s: float) -> Effects:
        """Recover a request from the loss of a worker that has left the registry."""
        request = work.request
        request.story.note(now_s, StoryKind.LOST, role=work.role, error=error.code, message=error.message)
        self._requests.drop(work)
        if request.probe is None and work.role is Role.DECODE:
            if request.machine.state is _S.BINDING:
                yield from self._dispatcher.requeue(request, _E.DECODE_LOST)
                return
            uncommitted = request.prefill is not None and work.machine.state is not WorkState.COMMITTED
            if uncommitted:
                yield from self.rebind(request, error, now_s)
                return
        yield from self.retry(request, error, now_s)

    def rebind(self, request: LiveRequest, error: PdserveError, now_s: float) -> Effects:
        """Let another decode worker read the lease after the loss `error`. If none has room, retry."""
        if (yield from self._dispatcher.rebind(request, now_s)):
            request.loss = error
            request.rebinds += 1
        else:
            yield from self.retry(request, error, now_s)

    def work_failed(self, work: RemoteWork, event: RequestFailed, now_s: float) -> Effects:
        """Recover a request that a worker gave up. The worker lives on."""
        error = event.error
        story = work.request.story
        story.note(now_s, StoryKind.LOST, role=work.role, error=error.code, message=error.message)
        if work.role is Role.DECODE and work.request.prefill is not None:
            self._blame_pair(work.request.prefill, work, event, now_s)
        if error.code is ErrorCode.DEADLINE_EXCEEDED:
            self.doubt_pair(work.request, now_s)
        worker = self._requests.drop(work)
        if worker is not None and error.code in _TURNED_AWAY:
            worker.turned_away = True
            worker.touch()
        # A worker's clock may reach the deadline before the router's clock, which alone decides: `retry` looks at it.
        if TABLE[error.code].cluster_retries or error.code is ErrorCode.DEADLINE_EXCEEDED:
            yield from self.retry(work.request, error, now_s)
        else:
            yield from self._requests.end(work.request, _E.LOST, now_s, error)

    def _blame_pair(self, prefill: RemoteWork, decode: RemoteWork, event: RequestFailed, now_s: float) -> None:
        """Set the pair aside when the decode worker says that its KV did not come. The decode worker alone knows this."""
        error = event.error
        lender, reader = self._requests.registry.get(prefill.link), self._requests.registry.get(decode.link)
        if lender is None or reader is None:
            return
        if error.code is ErrorCode.INCOMPATIBLE_PEER:
            self._pairs.never(lender.hello, reader.hello, error.message)
        elif event.pair_failed:
            self._pairs.failed(lender.hello, reader.hello, error.message, now_s=now_s)

    def doubt_pair(self, request: LiveRequest, now_s: float) -> None:
        """Doubt the pair of a request that ends by its deadline or its client, when the KV was computed and did not come. The
        path between the two workers may be at fault."""
        prefill, decode, since_s = request.prefill, request.decode, request.times.attempt.prefill_ended_s
        if request.probe is not None or prefill is None or decode is None or since_s is None:
            return
        lender, reader = self._requests.registry.get(prefill.link), self._requests.registry.get(decode.link)
        if lender is not None and reader is not None and request.committed is None and now_s - since_s > DOUBT_AFTER_S:
            self._pairs.doubt(lender.hello, reader.hello)

    def retry(self, request: LiveRequest, error: PdserveError, now_s: float) -> Effects:
        """Begin the next attempt, or fail the request with `error`. A request whose deadline has passed expires."""
        request.loss = error
        if now_s >= request.deadline_s:
            yield from self._requests.expire(request, now_s)
            return
        refusal = self._refusal(request, error)
        if refusal is not None:
            final = error if request.probe is not None else after_attempts(error, request.machine.attempt, refusal)
            yield from self._requests.end(request, _E.LOST, now_s, final)
        else:
            request.machine.move(_E.RETRIED)
            request.retry_reasons += (error.code.value,)
            request.story.note(now_s, StoryKind.RETRIED, attempt=request.machine.attempt, emitted=len(request.emitted))
            yield from self._requests.withdraw(request)
            request.start_over()
            self._requests.wait(request)

    def _refusal(self, request: LiveRequest, error: PdserveError) -> str | None:
        """Return why there is no next attempt. None: there is one, and its retry was taken out of the bucket."""
        if request.probe is not None:
            return "a probe is not retried"
        if request.remaining_tokens <= 0:
            return "all tokens were sent, but the finish reason was lost"
        if error.code is ErrorCode.NUMERICAL_ERROR and error.code.value in request.retry_reasons:
            return "the same failure came twice"
        if request.machine.attempt >= self._max_attempts:
            return "no more are allowed for one request"
        if not self.bucket.take():
            return "the cluster's retries are used up"
        return None
