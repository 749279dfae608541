"""The tokens that a request will probably put out, by what finished before. Pure.

The mean is that of the client's own requests of one class whose `max_tokens` was about as large. With one mean for all, the
long answers of one client would charge everybody's chats for thousands of tokens of KV, so that few of them run at once.
"""

from __future__ import annotations

from collections import OrderedDict
from statistics import median_low
from typing import Final, NamedTuple

from router.core.live_request import LiveRequest

PRIOR_TOKENS: Final = 128.0
"""The mean before any request has finished: a guess. A wrong one costs a NoRoom or a short wait."""
MEAN_WEIGHT: Final = 0.02
"""The weight of the newest output in a running mean. The mean forgets half of the past in 34 requests."""
MAX_RATIO: Final = 4.0
"""An output counts as at most so many times the mean, so 34 outputs of any length raise it to 7 times what it was."""
MAX_CLIENTS: Final = 64
"""Each kind of requests knows the means of so many clients, those that finished last. Their median takes 2 us."""


class _Kind(NamedTuple):
    """The requests whose outputs are about equally long, as far as one can tell before."""

    slo_class: str
    size: int  # the bits of `max_tokens`; -1: the client named none


class _Means:
    """The running means of one kind of requests, by client."""

    def __init__(self) -> None:
        self.by_client: OrderedDict[str, float] = OrderedDict()  # the one that finished last is last
        self.common = PRIOR_TOKENS
        """The mean for clients that are not known: the median of those that are, and of the guess."""

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
        self._kinds.setdefault(_kind(request), _Means()).saw(_client(request), output_tokens)

    def expect(self, request: LiveRequest) -> int:
        """Return how many tokens a request will probably put out from now on: at least 1, and no more than it may."""
        means = self._kinds.get(_kind(request))
        mean = PRIOR_TOKENS if means is None else means.by_client.get(_client(request), means.common)
        return max(1, min(request.remaining_tokens, round(mean)))


def _kind(request: LiveRequest) -> _Kind:
    return _Kind(request.slo.name, -1 if request.open_ended else request.spec.sampling.max_tokens.bit_length())


def _client(request: LiveRequest) -> str:
    return request.client[0] if request.client else ""
