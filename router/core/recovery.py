"""What is done about a loss: rebind, retry, or fail. The whole policy of recovery is in this file.

```
decode lost before it had reserved           the same attempt waits for another decode worker
decode lost in the handoff, KV uncommitted   another one with room at once reads the same lease; else a retry
any other loss; an error for which the
table of errors says that the cluster retries   a retry: the attempt is withdrawn from both workers, and the next one
                                             starts from the prompt and the ids that the client has
```
A retry needs an attempt of the request's own, one of the cluster's bucket, and time before the deadline; without one of
them the request fails with the loss. A finished output is never replayed.

Logits that are no numbers are computed once more: a worker's memory, or a block that it shares, may be the reason. If they
come out so again, it is the model or the prompt.
"""

from __future__ import annotations

from typing import Final

from pdserve.config import RouterConfig
from pdserve.core.error_table import TABLE
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.request_machine import RequestEvent, RequestState
from router.core.dispatcher import Dispatcher
from router.core.events import RequestFailed, Role
from router.core.live_request import LiveRequest, RemoteWork
from router.core.pairs import Pairs
from router.core.requests import Requests
from router.core.retry import RetryBucket, after_attempts

_S, _E = RequestState, RequestEvent

_TURNED_AWAY: Final = (ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED)
"""The worker takes nothing at present: asked again at once it would say so again, and eat up the attempts."""


DOUBT_AFTER_S: Final = 1.0
"""What is left to read when the first token is known takes milliseconds: a chunk's KV at most."""


class Recovery:
    def __init__(self, requests: Requests, dispatcher: Dispatcher, pairs: Pairs, config: RouterConfig) -> None:
        self._requests = requests
        self._dispatcher = dispatcher
        self._pairs = pairs
        self._max_attempts = config.max_attempts
        self.bucket = RetryBucket(share=config.retry_share, burst=config.retry_burst)

    def worker_lost(self, work: RemoteWork, error: PdserveError, now_s: float) -> None:
        """The worker that this ran on has left the registry."""
        request = work.request
        self._requests.drop(work)
        if request.probe is None and work.role is Role.DECODE:
            if request.machine.state is _S.BINDING:
                self._dispatcher.requeue(request, _E.DECODE_LOST, now_s)
                return
            uncommitted = request.prefill is not None and request.committed is None
            if uncommitted and self._dispatcher.rebind(request, now_s):
                request.loss = error
                request.rebinds += 1
                return
        self.retry(request, error, now_s)

    def work_failed(self, work: RemoteWork, event: RequestFailed, now_s: float) -> None:
        """The worker lives and gave this request up."""
        error = event.error
        if work.role is Role.DECODE and work.request.prefill is not None:
            self._blame_pair(work.request.prefill, work, event, now_s)
        if error.code is ErrorCode.DEADLINE_EXCEEDED:
            self.doubt_pair(work.request, now_s)
        worker = self._requests.drop(work)
        if worker is not None and error.code in _TURNED_AWAY:
            worker.turned_away = True
        # A worker's clock may have come to the request's deadline before ours: then it is for us to say whether it has.
        if TABLE[error.code].cluster_retries or error.code is ErrorCode.DEADLINE_EXCEEDED:
            self.retry(work.request, error, now_s)
        else:
            self._requests.end(work.request, _E.LOST, now_s, error)

    def _blame_pair(self, prefill: RemoteWork, decode: RemoteWork, event: RequestFailed, now_s: float) -> None:
        """On the word of the decode worker alone, which knows whether it was KV that did not come."""
        error = event.error
        lender, reader = self._requests.registry.get(prefill.link), self._requests.registry.get(decode.link)
        if lender is None or reader is None:
            return
        if error.code is ErrorCode.INCOMPATIBLE_PEER:
            self._pairs.never(lender.hello, reader.hello, error.message)
        elif event.pair_failed:
            self._pairs.failed(lender.hello, reader.hello, error.message, now_s=now_s)

    def doubt_pair(self, request: LiveRequest, now_s: float) -> None:
        """A request ends by its deadline or its client. Where the KV was computed and did not come, its way may be at fault."""
        prefill, decode, since_s = request.prefill, request.decode, request.times.attempt.prefill_ended_s
        if request.probe is not None or prefill is None or decode is None or since_s is None:
            return
        lender, reader = self._requests.registry.get(prefill.link), self._requests.registry.get(decode.link)
        if lender is not None and reader is not None and request.committed is None and now_s - since_s > DOUBT_AFTER_S:
            self._pairs.doubt(lender.hello, reader.hello)

    def retry(self, request: LiveRequest, error: PdserveError, now_s: float) -> None:
        """Begin the next attempt, or fail the request with `error`."""
        request.loss = error
        if now_s >= request.deadline_s:
            self._requests.expire(request, now_s)
            return
        refusal = self._refusal(request, error)
        if refusal is not None:
            final = error if request.probe is not None else after_attempts(error, request.machine.attempt, refusal)
            self._requests.end(request, _E.LOST, now_s, final)
        elif self._requests.move(request, _E.RETRIED, now_s):
            request.retry_reasons += (error.code.value,)
            self._requests.withdraw(request)
            request.start_over()
            self._requests.wait(request)

    def _refusal(self, request: LiveRequest, error: PdserveError) -> str | None:
        """Why there is no next attempt; None, and one is taken out of the bucket, when there is."""
        if request.probe is not None:
            return "a probe is not retried"
        if request.remaining_tokens <= 0:
            return "all tokens were sent, but not how they end"
        if error.code is ErrorCode.NUMERICAL_ERROR and error.code.value in request.retry_reasons:
            return "it came to the same twice"
        if request.machine.attempt >= self._max_attempts:
            return "no more are allowed for one request"
        if not self.bucket.take():
            return "the cluster's retries are used up"
        return None
