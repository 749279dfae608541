"""Which prefill worker's KV does not reach which decode worker. Pure; the router's own, since it sees all handoffs.

A pair that fails is set aside, longer with each further failure, and tried again when its time is over; success clears it.
It is two processes, not two names: a worker that was started anew is a new pair.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass

from pdserve.core.ids import Incarnation
from router.core.events import WorkerHello

_Pair = tuple[Incarnation, Incarnation]


@dataclass(slots=True)
class AsidePair:
    """`until_s` is infinite for two workers that can never exchange KV."""

    prefill: WorkerHello
    decode: WorkerHello
    reason: str
    until_s: float
    failures: int


class Pairs:
    def __init__(self, *, aside_s: float, aside_max_s: float) -> None:
        self._aside_s = aside_s
        self._aside_max_s = aside_max_s
        self._pairs: dict[_Pair, AsidePair] = {}
        self._doubted: dict[_Pair, tuple[WorkerHello, WorkerHello]] = {}

    def __len__(self) -> int:
        """Pairs with a failure behind them, set aside or on trial again. 0: all are usable."""
        return len(self._pairs)

    def failed(self, prefill: WorkerHello, decode: WorkerHello, reason: str, *, now_s: float) -> None:
        """KV did not pass. Failures that come while it is set aside are of the same fault, and do not add to it."""
        pair = self._pairs.get(_key(prefill, decode))
        if pair is None:
            pair = self._pairs[_key(prefill, decode)] = AsidePair(prefill, decode, reason, now_s, 0)
        if pair.until_s <= now_s:
            pair.reason = reason
            pair.failures += 1
            pair.until_s = now_s + min(self._aside_max_s, self._aside_s * 2.0 ** min(pair.failures - 1, 32))

    def never(self, prefill: WorkerHello, decode: WorkerHello, reason: str) -> None:
        """Their layouts or versions differ, which no waiting changes."""
        self._pairs[_key(prefill, decode)] = AsidePair(prefill, decode, reason, math.inf, 1)

    def succeeded(self, prefill: WorkerHello, decode: WorkerHello) -> None:
        self._pairs.pop(_key(prefill, decode), None)
        self._doubted.pop(_key(prefill, decode), None)

    def doubt(self, prefill: WorkerHello, decode: WorkerHello) -> None:
        """A request ended while its KV was long in coming. That is no evidence against the pair, but a reason to probe it."""
        self._doubted[_key(prefill, decode)] = (prefill, decode)

    def in_doubt(self) -> list[tuple[WorkerHello, WorkerHello]]:
        return list(self._doubted.values())

    def forget_doubt(self, prefill: WorkerHello, decode: WorkerHello) -> None:
        self._doubted.pop(_key(prefill, decode), None)

    def usable(self, prefill: WorkerHello, decode: WorkerHello, *, now_s: float) -> bool:
        """At `now_s`; infinite asks whether it will ever be."""
        pair = self._pairs.get(_key(prefill, decode)) if self._pairs else None
        return pair is None or (pair.until_s <= now_s and not math.isinf(pair.until_s))

    def forget(self, linked: Container[Incarnation], *, now_s: float) -> None:
        """Drop pairs of which a side has gone and whose failures are too old to matter should it come back."""
        for key, pair in list(self._pairs.items()):
            gone = key[0] not in linked or key[1] not in linked
            if gone and (math.isinf(pair.until_s) or now_s > pair.until_s + self._aside_max_s):
                del self._pairs[key]

    def set_aside(self, *, now_s: float) -> Iterator[AsidePair]:
        return (pair for pair in list(self._pairs.values()) if pair.until_s > now_s)

    def check_invariants(self) -> None:
        for key, pair in self._pairs.items():
            assert key == _key(pair.prefill, pair.decode)
            assert pair.failures >= 1


def _key(prefill: WorkerHello, decode: WorkerHello) -> _Pair:
    return prefill.incarnation, decode.incarnation
