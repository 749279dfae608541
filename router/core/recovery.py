"""Recovery: what follows a loss is a rebind, a retry, or the end of the request. This file holds the whole policy.

```
decode lost before it reserved              the same attempt waits for another decode worker
decode lost in the handoff, KV uncommitted  another decode worker with room at once reads the same lease; else a retry
a worker drains and refuses its part        the same attempt goes on with another worker: no loss (`Handoff.place_elsewhere`)
a worker lost with a request alone on it    the request fails, as it would end the next one too (`Suspects`)
any other loss, or an error that the        a retry: the attempt is withdrawn from both workers, and the next one starts
table of errors lets the cluster retry      from the prompt and the ids that the client has
```

Every retry needs time before the deadline: without it the request fails with `DeadlineExceeded`. A finished output is never
replayed. What else a retry costs depends on whose fault it is (`Cost`). The loss of a worker costs the request nothing, since
each loss makes at most one replay of each request necessary. A failure of the request itself costs one of its attempts and a
retry from the cluster's bucket, and without these the request fails with the loss.

A request whose output no worker can take up, for a feature of the request that the hellos of workers name, fails at once.

A request whose logits are not finite numbers is computed once more, because a worker's memory or a shared block may be the
reason. If the next logits are not finite either, the model or the prompt is the reason, and the request fails.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from pdserve.config import RouterConfig
from pdserve.core.error_table import TABLE
from pdserve.core.errors import ErrorCode, Overloaded, PdserveError
from pdserve.core.worker import Role
from router.core.dispatcher import Dispatcher
from router.core.events import Effects, RequestFailed, SendCancel
from router.core.health import Health, Pairs
from router.core.live_request import LiveRequest, RemoteWork, StoryKind
from router.core.registry import Worker
from router.core.request_machine import RequestEvent, RequestState
from router.core.requests import Requests
from router.core.suspects import poison
from router.core.work_machine import WorkState

# The budget of retries -------------------------------------------------------------------------------------------
#
# The cluster's budget of retries. Pure.


REMEMBERED_REQUESTS: Final = 10_000
"""The bucket keeps the share of at most this many requests, so that a quiet week does not save up for a storm."""


class RetryBucket:
    """A bucket into which each admitted request puts `share` of a retry, and from which each retry takes one. It starts with
    `burst`.

    So a lasting fault cannot multiply the load by more than `1 + share`. The bucket is for failures of requests: retries
    after the loss of a worker are bounded by the number of losses, and take nothing out.
    """

    def __init__(self, *, share: float, burst: int) -> None:
        self._share = share
        self._most = burst + share * REMEMBERED_REQUESTS
        self._saved = float(burst)
        self._burst = burst
        self._admitted = 0
        self.taken = 0
        """The retries that were taken out."""

    def admitted(self) -> None:
        """Put in the share of one admitted request."""
        self._admitted += 1
        self._saved = min(self._most, self._saved + self._share)

    @property
    def empty(self) -> bool:
        """Less than one retry is left."""
        return self._saved + 1e-9 < 1.0  # ten times 0.1 is a little less than 1

    def take(self) -> bool:
        """Take one retry out. False: less than one is left, and nothing is taken."""
        if self.empty:
            return False
        self._saved = max(0.0, self._saved - 1.0)
        self.taken += 1
        return True

    def check_invariants(self) -> None:
        """Assert that no more retries were taken than put in."""
        assert 0.0 <= self._saved <= self._most
        assert self.taken <= self._burst + self._share * self._admitted + 1e-6


def after_attempts(error: PdserveError, attempts: int, why: str) -> PdserveError:
    """Return the same error for the client, with the number of attempts and why no more follow. It takes only errors that are
    retried."""
    message = f"after {attempts} attempt{'s' if attempts > 1 else ''} ({why}): {error.message}"
    if isinstance(error, Overloaded):
        return Overloaded(message, retry_after_s=error.retry_after_s)
    return type(error)(message)


# Recovery --------------------------------------------------------------------------------------------------------


_S, _E = RequestState, RequestEvent

_TURNED_AWAY: Final = (ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED)
"""Errors of a worker that takes no work at present. If the worker were asked again at once, it would refuse again and use up
the attempts."""


_ONCE: Final = (ErrorCode.NUMERICAL_ERROR, ErrorCode.INTERNAL_BUG)
"""Errors whose reason may be the worker or the request. The request gets one more attempt for each such error. The attempt
costs a retry of the bucket only if it fails as well: then the request is the reason. So a worker that breaks under a full batch
costs no retry, and a flood of hostile requests is not computed twice."""


DOUBT_AFTER_S: Final = 1.0
"""A pair is in doubt when a request ends more than this after its first token and its KV is not there. At most the KV of one
chunk is left to read after the first token, which takes milliseconds."""


class Cost(Enum):
    """The price of a retry."""

    NOTHING = "nothing"
    """The router has lost a worker, which is no fault of the request."""
    ATTEMPT = "attempt"
    """A worker reports that it has lost another worker. The report may be wrong each time, so the request's attempts bound the
    retries."""
    ATTEMPT_AND_RETRY = "attempt_and_retry"
    """The request has failed on a worker that lives on."""


class Recovery:
    """Decides what happens to requests after the worker was lost or gave the request up."""

    def __init__(self, requests: Requests, dispatcher: Dispatcher, pairs: Pairs, health: Health, config: RouterConfig) -> None:
        self._requests = requests
        self._dispatcher = dispatcher
        self._pairs = pairs
        self._health = health
        self._max_attempts = config.max_attempts
        self.bucket = RetryBucket(share=config.retry_share, burst=config.retry_burst)

    def worker_lost(self, work: RemoteWork, error: PdserveError, now_s: float) -> Effects:
        """Recover a request from the loss of a worker that has left the registry."""
        request = work.request
        request.story.note(now_s, StoryKind.LOST, role=work.role, error=error.code, message=error.message)
        self._requests.drop(work)
        if request.convicted:
            lost = poison(request, "nothing else that ran on the last one was suspected")
            yield from self._requests.end(request, _E.LOST, now_s, lost)
            return
        if request.probe is None and work.role is Role.DECODE and not request.suspect:
            if request.machine.state is _S.BINDING:
                yield from self._dispatcher.requeue(request, _E.DECODE_LOST)
                return
            uncommitted = request.prefill is not None and work.machine.state is not WorkState.COMMITTED
            if uncommitted:
                yield from self.rebind(request, error, now_s)
                return
        yield from self.retry(request, error, now_s, Cost.NOTHING)

    def rebind(self, request: LiveRequest, error: PdserveError, now_s: float) -> Effects:
        """Let another decode worker read the lease after the loss `error` of a worker. If none has room, retry."""
        command = self._dispatcher.rebind(request, now_s)
        if command is not None:
            yield command
            request.loss = error
            request.rebinds += 1
        else:
            yield from self.retry(request, error, now_s, Cost.NOTHING)

    def work_failed(self, work: RemoteWork, event: RequestFailed, now_s: float) -> Effects:
        """Recover a request that a worker gave up. The worker lives on."""
        error = event.error
        story = work.request.story
        story.note(now_s, StoryKind.LOST, role=work.role, error=error.code, message=error.message)
        if work.role is Role.DECODE and work.request.prefill is not None:
            self._blame_pair(work.request.prefill, work, event, now_s)
        if error.code is ErrorCode.DEADLINE_EXCEEDED:
            self.doubt_pair(work.request, now_s)
        self._health.failed(work, error, now_s)
        worker = self._requests.drop(work)
        if worker is not None and work.role is Role.PREFILL:
            yield SendCancel(work.link, work.handle)  # its lease waits for this, also a lease that was granted but not reported
        if worker is not None and error.code in _TURNED_AWAY:
            worker.turned_away = True
            worker.touch()
        # A worker's clock may reach the deadline before the router's clock, which alone decides: `retry` looks at it.
        if TABLE[error.code].cluster_retries or error.code is ErrorCode.DEADLINE_EXCEEDED:
            cost = Cost.ATTEMPT if error.code is ErrorCode.REPLICA_LOST else Cost.ATTEMPT_AND_RETRY
            yield from self.retry(work.request, error, now_s, cost)
        else:
            yield from self._requests.end(work.request, _E.LOST, now_s, error)

    def _blame_pair(self, prefill: RemoteWork, decode: RemoteWork, event: RequestFailed, now_s: float) -> None:
        """Set the pair aside when the decode worker reports that its KV did not come. Only the decode worker knows this."""
        error = event.error
        lender, reader = self._requests.registry.get(prefill.link), self._requests.registry.get(decode.link)
        if lender is None or reader is None:
            return
        if error.code is ErrorCode.INCOMPATIBLE_PEER:
            self._pairs.never(lender.hello, reader.hello, error.message)
        elif event.pair_failed:
            self._pairs.failed(lender.hello, reader.hello, error.message, now_s=now_s)
            if lender.serves and reader.serves:
                self._pairs.in_a_row(lender.hello, reader.hello)
                self._suspect(reader, lender, now_s)

    def _suspect(self, reader: Worker, lender: Worker, now_s: float) -> None:
        """Eject the end that two failed pairs have in common while KV passed through it nowhere. For a worker that has just
        come back from an ejection, a single failed pair is enough."""
        for worker in sorted((reader, lender), key=lambda end: -self._pairs.partners(end.hello)):
            partners = self._pairs.partners(worker.hello)
            doubtful = partners and (self._health.on_trial(worker) or self._pairs.at_fault(worker.hello))
            if doubtful and self._health.unreachable(worker, partners, now_s):
                self._pairs.blamed(worker.hello)

    def doubt_pair(self, request: LiveRequest, now_s: float) -> None:
        """Doubt the pair of a request that ends by its deadline or its client, when the KV was computed and did not come. The
        path between the two workers may be at fault."""
        prefill, decode, since_s = request.prefill, request.decode, request.times.attempt.prefill_ended_s
        if request.probe is not None or prefill is None or decode is None or since_s is None:
            return
        lender, reader = self._requests.registry.get(prefill.link), self._requests.registry.get(decode.link)
        if lender is not None and reader is not None and request.committed is None and now_s - since_s > DOUBT_AFTER_S:
            self._pairs.doubt(lender.hello, reader.hello)

    def retry(self, request: LiveRequest, error: PdserveError, now_s: float, cost: Cost) -> Effects:
        """Begin the next attempt, or fail the request with `error`. A request whose deadline has passed expires."""
        request.loss = error
        if now_s >= request.deadline_s:
            yield from self._requests.expire(request, now_s)
            return
        refusal = self._refusal(request, error, cost)
        if refusal is not None:
            final = error if request.probe is not None else after_attempts(error, request.machine.attempt, refusal)
            yield from self._requests.end(request, _E.LOST, now_s, final)
        else:
            request.machine.move(_E.RETRIED)
            request.retry_reasons += (error.code.value,)
            avoids = {"avoids": ", ".join(request.avoid)} if request.avoid else {}
            emitted = len(request.emitted)
            request.story.note(now_s, StoryKind.RETRIED, attempt=request.machine.attempt, emitted=emitted, **avoids)
            yield from self._requests.withdraw(request)
            request.start_over()
            self._requests.wait(request)

    def _refusal(self, request: LiveRequest, error: PdserveError, cost: Cost) -> str | None:
        """Return why there is no next attempt. None: there is one, and its price was taken."""
        if request.probe is not None:
            return "a probe is not retried"
        if request.remaining_tokens <= 0:
            return "all tokens were sent, but the finish reason was lost"
        if feature := self._requests.registry.cannot_resume(request):
            return f"the engines cannot take up an output again under {feature}"
        if error.code in _ONCE and error.code.value in request.retry_reasons:
            self.bucket.take()
            return "the same failure came twice"
        if cost is Cost.NOTHING:
            return None
        if 1 + request.charged >= self._max_attempts:
            return "no more are allowed for one request"
        spent = self.bucket.empty if error.code in _ONCE else cost is Cost.ATTEMPT_AND_RETRY and not self.bucket.take()
        if spent:
            return "the cluster's retries are used up"
        request.charged += 1
        return None
