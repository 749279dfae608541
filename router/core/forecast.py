"""Forecasts: the tokens that a request will put out, the cost of handoffs, and the time of a new request's first token, with
its early rejection when the class's target will be missed. Pure.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from statistics import median_low
from typing import Final, NamedTuple

from pdserve.core.errors import Overloaded
from pdserve.core.slo import SloClass
from router.core.live_request import LiveRequest
from router.core.policy import Candidate, compute_s, prompt_wait_s, seconds, total
from router.core.queue_limits import RETRY_AFTER_MAX_S, RETRY_AFTER_MIN_S

# Outputs ---------------------------------------------------------------------------------------------------------
#
# The tokens that a request will probably put out, by what finished before. Pure.
#
# The mean is taken over the client's own requests of one class with about the same `max_tokens`. With one mean for all clients,
# the long answers of one client would charge every chat for thousands of tokens of KV, so few chats would run at once.


PRIOR_TOKENS: Final = 128.0
"""The mean before any request has finished: a guess. A wrong guess costs a NoRoom or a short wait."""
MEAN_WEIGHT: Final = 0.02
"""The weight of the newest request in a running mean. The mean forgets half of the past in 34 requests."""
MAX_RATIO: Final = 4.0
"""An output counts as at most this multiple of the mean, so 34 outputs of any length raise the mean to 7 times its value."""
MAX_CLIENTS: Final = 64
"""Each kind of requests keeps the means of this many clients: the clients whose requests finished last. The median of the means
takes 2 us."""


class _Kind(NamedTuple):
    """The requests whose outputs will probably be about equally long."""

    slo_class: str
    size: int  # the bits of `max_tokens`; -1: the client named none


class _Means:
    """The running means of one kind of requests, by client."""

    def __init__(self) -> None:
        self.by_client: OrderedDict[str, float] = OrderedDict()  # the client that finished last is last
        self.common = PRIOR_TOKENS
        """The mean for unknown clients: the median of the means of known clients and of the guess."""

    def saw(self, client: str, output_tokens: int) -> None:
        mean = self.by_client.pop(client, self.common)
        counted = min(max(output_tokens, mean / MAX_RATIO), mean * MAX_RATIO)
        self.by_client[client] = mean + MEAN_WEIGHT * (counted - mean)
        if len(self.by_client) > MAX_CLIENTS:
            self.by_client.popitem(last=False)
        self.common = median_low([PRIOR_TOKENS, *self.by_client.values()])


class ExpectedOutputs:
    """The means of all kinds of requests. There are few kinds, since the settings name the classes."""

    def __init__(self) -> None:
        self._kinds: dict[_Kind, _Means] = {}

    def saw(self, request: LiveRequest, output_tokens: int) -> None:
        """Count the output of a finished request."""
        kind, client = _kind_and_client(request)
        self._kinds.setdefault(kind, _Means()).saw(client, output_tokens)

    def expect(self, request: LiveRequest) -> int:
        """Return how many tokens a request will probably put out from now on: at least 1, and no more than it may."""
        kind, client = _kind_and_client(request)
        means = self._kinds.get(kind)
        mean = PRIOR_TOKENS if means is None else means.by_client.get(client, means.common)
        return max(1, min(request.remaining_tokens, round(mean)))


def _kind_and_client(request: LiveRequest) -> tuple[_Kind, str]:
    kind = _Kind(request.slo.name, -1 if request.open_ended else request.spec.sampling.max_tokens.bit_length())
    return kind, request.client[0] if request.client else ""


# Stays -----------------------------------------------------------------------------------------------------------


class StayMean:
    """A running mean of the time that a finished request was on its decode worker."""

    def __init__(self) -> None:
        self._mean_s = 0.0

    def saw(self, stay_s: float) -> None:
        """Count a finished request. The first request sets the mean."""
        self._mean_s += (MEAN_WEIGHT if self._mean_s else 1.0) * (stay_s - self._mean_s)

    def drained_per_s(self, running: int) -> float:
        """Return how many of the `running` requests end in a second: by Little's law their number divided by the mean stay. It
        does not depend on how busy the cluster was before. 0: unknown."""
        return running / self._mean_s if self._mean_s > 0 else 0.0


# Transfers -------------------------------------------------------------------------------------------------------
#
# The measured cost of handoffs: the part of their time that a request feels. Pure.


KEEP: Final = 0.98
"""Each new handoff keeps this share of the sums. They forget half of the past in 34 handoffs, as the mean of outputs does."""


class Transfers:
    """Running sums over the handoffs of the decode pool. A handoff weighs by its bytes, so a small handoff has little
    weight."""

    def __init__(self) -> None:
        self._count = 0.0
        self._bytes = 0.0
        self._exposed_s = 0.0

    def saw(self, kv_bytes: int, exposed_s: float) -> None:
        """Count a handoff that was committed. A handoff without bytes, or with a time that is no number, does not count."""
        if kv_bytes <= 0 or not math.isfinite(exposed_s) or exposed_s < 0:
            return
        self._count = KEEP * self._count + 1
        self._bytes = KEEP * self._bytes + kv_bytes
        self._exposed_s = KEEP * self._exposed_s + exposed_s

    def exposed_s(self, kv_bytes: float) -> float | None:
        """Return the time from the first token until the KV may be used, which the second token waits for. None: no handoff has
        been seen.

        A small handoff takes nearly all its time for messages, and of a large handoff only the last chunk is exposed. So up to
        the mean handoff the time is in proportion to the bytes, and above it the time is the mean handoff's time.
        """
        return None if self._bytes == 0 else self._exposed_s * min(kv_bytes / self._bytes, 1 / self._count)


# The first token -------------------------------------------------------------------------------------------------


class Prediction(NamedTuple):
    """The time to a request's first token if it were placed as things are now."""

    wait_s: float  # for a place on a decode worker, and for the prompts before it
    compute_s: float  # of its own prompt

    @property
    def ttft_s(self) -> float:
        """The time from now to the first token."""
        return self.wait_s + self.compute_s


def predict(computer: Candidate, prompt_tokens: int, queue_wait_s: float | None) -> Prediction | None:
    """Predict for a request whose prompt the worker `computer` would compute, after a wait in the router's queue. None: a rate
    that it depends on is unknown."""
    wait_s, own_s = total(queue_wait_s, prompt_wait_s(computer)), compute_s(computer, prompt_tokens)
    return None if wait_s is None or own_s is None else Prediction(wait_s, own_s)


def check_target(slo: SloClass, prediction: Prediction | None, *, late_s: float = 0.0) -> None:
    """Check that a new request probably gets its first token in time. `late_s` is the part of the time that has passed since it
    arrived.

    Raises `Overloaded` when the token would be too late and the request would wait first: once other requests have ended, the
    request need not wait. The client should try again after the excess, within the bounds of any refusal. A request that would
    not wait is never refused, because no later time is better. So an idle cluster takes every request, also one whose own
    prompt takes longer than its target. Without a target or without a prediction no request is refused.
    """
    if slo.ttft_s is None or prediction is None or prediction.wait_s <= 0:
        return
    excess_s = late_s + prediction.ttft_s - slo.ttft_s
    if excess_s > 0:
        raise Overloaded(
            f"class {slo.name}: the first token would come after {late_s + prediction.ttft_s:.3g} s, and its target ttft_s is "
            f"{slo.ttft_s:.3g} s; the request would wait {prediction.wait_s:.3g} s before its prompt is computed",
            retry_after_s=min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, excess_s)),
            reason="predicted_late",
        )


def queue_wait_s(ahead: int, drained_per_s: float) -> float | None:
    """Return the wait for a place on a full decode pool: a running request must end for each request ahead, and one more for
    this request. `drained_per_s` is the number of requests that end in a second, 0 for unknown."""
    return seconds(ahead + 1, drained_per_s)
