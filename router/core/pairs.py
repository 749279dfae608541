"""Pairs of a prefill worker and a decode worker between which KV does not pass. Pure. The router keeps this record itself,
because it sees all handoffs. Workers whose versions differ too much need no record: their hellos show it.

A pair that fails is set aside, longer after each further failure, and is tried again when that time is over. A success clears
it. A pair is two processes, not two names: a restarted worker makes a new pair.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass

from pdserve.core.ids import Incarnation
from pdserve.core.worker import WorkerHello

_Pair = tuple[Incarnation, Incarnation]


@dataclass(slots=True)
class AsidePair:
    """A pair that has failed. `until_s` is the end of the time for which it is set aside; it is infinite for two workers that
    can never exchange KV."""

    prefill: WorkerHello
    decode: WorkerHello
    reason: str
    until_s: float
    failures: int


class Pairs:
    """Knows the pairs that failed and the pairs in doubt. All other pairs are usable."""

    def __init__(self, *, aside_s: float, aside_max_s: float) -> None:
        self._aside_s = aside_s
        self._aside_max_s = aside_max_s
        self.failures: dict[_Pair, AsidePair] = {}
        """The pairs that have failed, set aside or on trial again. Empty: all pairs are usable."""
        self._doubted: dict[_Pair, tuple[WorkerHello, WorkerHello]] = {}
        self._partners: dict[Incarnation, dict[Incarnation, None]] = {}
        """The workers with which a worker has failed since KV last passed through it, at either end."""
        self._since: dict[Incarnation, int] = {}
        """The number of handoffs that had succeeded when these failures began."""
        self._passed = 0

    def __len__(self) -> int:
        """Return the number of pairs that have failed, set aside or on trial again. 0: all pairs are usable."""
        return len(self.failures)

    def failed(self, prefill: WorkerHello, decode: WorkerHello, reason: str, *, now_s: float) -> None:
        """Record that KV did not pass. A failure of a pair that is set aside already has the same cause and changes nothing."""
        pair = self.failures.get(_key(prefill, decode))
        if pair is None:
            pair = self.failures[_key(prefill, decode)] = AsidePair(prefill, decode, reason, now_s, 0)
        if pair.until_s <= now_s:
            pair.reason = reason
            pair.failures += 1
            pair.until_s = now_s + min(self._aside_max_s, self._aside_s * 2.0 ** min(pair.failures - 1, 32))

    def partners(self, worker: WorkerHello) -> int:
        """Return with how many workers this worker has failed in a row."""
        return len(self._partners.get(worker.incarnation, ()))

    def at_fault(self, worker: WorkerHello) -> bool:
        """Tell whether a worker is probably the cause of its failed pairs: two or more pairs have failed, and KV has passed
        between other workers since then. While KV passes nowhere, no single worker is the cause."""
        return self.partners(worker) >= 2 and self._passed > self._since[worker.incarnation]

    def in_a_row(self, prefill: WorkerHello, decode: WorkerHello) -> None:
        """Record a failure of two workers of which both had been ready."""
        for worker, other in ((prefill, decode), (decode, prefill)):
            self._since.setdefault(worker.incarnation, self._passed)
            self._partners.setdefault(worker.incarnation, {})[other.incarnation] = None

    def blamed(self, worker: WorkerHello) -> None:
        """Record that a worker was at fault in its failures, so that its partners were not."""
        for partner in self._forget_row(worker.incarnation):
            others = self._partners.get(partner, {})
            others.pop(worker.incarnation, None)
            if not others:
                self._forget_row(partner)

    def _forget_row(self, worker: Incarnation) -> dict[Incarnation, None]:
        self._since.pop(worker, None)
        return self._partners.pop(worker, {})

    def never(self, prefill: WorkerHello, decode: WorkerHello, reason: str) -> None:
        """Set a pair aside for ever. The layouts or versions of the two workers differ, and waiting does not change that."""
        self.failures[_key(prefill, decode)] = AsidePair(prefill, decode, reason, math.inf, 1)

    def succeeded(self, prefill: WorkerHello, decode: WorkerHello) -> None:
        """Clear a pair between which KV has passed."""
        self.failures.pop(_key(prefill, decode), None)
        self._doubted.pop(_key(prefill, decode), None)
        self._passed += 1
        if self._partners:
            self._forget_row(prefill.incarnation)
            self._forget_row(decode.incarnation)

    def doubt(self, prefill: WorkerHello, decode: WorkerHello) -> None:
        """Record that a request ended while its KV was late. That is no evidence against the pair, but a reason to probe it."""
        self._doubted[_key(prefill, decode)] = (prefill, decode)

    def in_doubt(self) -> list[tuple[WorkerHello, WorkerHello]]:
        """Return the prefill worker and the decode worker of each pair in doubt."""
        return list(self._doubted.values())

    def forget_doubt(self, prefill: WorkerHello, decode: WorkerHello) -> None:
        """End the doubt about a pair."""
        self._doubted.pop(_key(prefill, decode), None)

    def usable(self, prefill: WorkerHello, decode: WorkerHello, *, now_s: float) -> bool:
        """Tell whether KV may go from the prefill worker to the decode worker at `now_s`. An infinite `now_s` asks whether KV
        may ever go. Workers without a common version of their protocol, or with different weights, are never paired."""
        if not prefill.may_pair(decode):
            return False
        pair = self.failures.get(_key(prefill, decode)) if self.failures else None
        return pair is None or (pair.until_s <= now_s and not math.isinf(pair.until_s))

    def forget(self, linked: Container[Incarnation], *, now_s: float) -> None:
        """Drop pairs of which a worker is no longer in `linked`, once their failures are too old to matter if it comes back. A
        pair that can never exchange KV is dropped at once."""
        for incarnation in [known for known in self._partners if known not in linked]:
            self._forget_row(incarnation)
        for key, pair in list(self.failures.items()):
            gone = key[0] not in linked or key[1] not in linked
            if gone and (math.isinf(pair.until_s) or now_s > pair.until_s + self._aside_max_s):
                del self.failures[key]

    def set_aside(self, *, now_s: float) -> Iterator[AsidePair]:
        """Return the pairs that are set aside at `now_s`."""
        return (pair for pair in list(self.failures.values()) if pair.until_s > now_s)

    def check_invariants(self) -> None:
        """Assert that every pair is stored under its own key and has failed."""
        for key, pair in self.failures.items():
            assert key == _key(pair.prefill, pair.decode)
            assert pair.failures >= 1
        assert self._partners.keys() == self._since.keys()
        assert all(self._partners.values())


def _key(prefill: WorkerHello, decode: WorkerHello) -> _Pair:
    return prefill.incarnation, decode.incarnation
