"""The pool of staging blocks: the reads that need blocks wait in one line. The loop owns it.

A chunk gets all its blocks at once and never waits for more, so there is no circle of waits. One peer never holds more than
half of the blocks: a lender that stands still keeps the blocks that its reads may still write, and the other peers must go
on. A peer that is at its limit is passed over in the line.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from pdserve.core.ids import Incarnation

Slots = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Waiter:
    peer: Incarnation
    count: int
    granted: asyncio.Future[Slots]


class SlotPool:
    """A pool of the staging blocks 0 to `num_blocks` - 1. free + held == num_blocks."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._held: dict[Incarnation, int] = {}
        self._line: deque[_Waiter] = deque()

    @property
    def max_per_peer(self) -> int:
        """The most blocks that one peer may hold."""
        return self.num_blocks // 2

    @property
    def num_held(self) -> int:
        """The number of blocks that are taken."""
        return self.num_blocks - len(self._free)

    @property
    def num_waiting(self) -> int:
        """The number of waiters in the line."""
        return len(self._line)

    def take(self, peer: Incarnation, count: int) -> asyncio.Future[Slots]:
        """Wait in line for `count` blocks. The future is done when all are granted. `leave` or `give_back` must follow."""
        assert 0 < count <= self.max_per_peer
        waiter = _Waiter(peer, count, asyncio.get_running_loop().create_future())
        self._line.append(waiter)
        self._serve()
        return waiter.granted

    def leave(self, peer: Incarnation, granted: asyncio.Future[Slots]) -> None:
        """Leave the line, and give back the blocks if they were granted meanwhile."""
        if granted.done():
            self.give_back(peer, granted.result())
            return
        self._line = deque(waiter for waiter in self._line if waiter.granted is not granted)
        self._serve()  # it may have been first, and too large for what is free

    def give_back(self, peer: Incarnation, slots: Slots) -> None:
        """Return blocks that no read and no conversion uses any more."""
        assert not set(slots) & set(self._free), "given back twice"
        self._free.extend(slots)
        self._held[peer] -= len(slots)
        if self._held[peer] == 0:
            del self._held[peer]
        self._serve()

    def _serve(self) -> None:
        """Grant blocks in order. Skip waiters whose peer is at its limit; stop at the first one with too few free blocks."""
        for waiter in list(self._line):
            if self._held.get(waiter.peer, 0) + waiter.count > self.max_per_peer:
                continue
            if waiter.count > len(self._free):
                return
            self._line.remove(waiter)
            self._held[waiter.peer] = self._held.get(waiter.peer, 0) + waiter.count
            waiter.granted.set_result(tuple(self._free.pop() for _ in range(waiter.count)))
