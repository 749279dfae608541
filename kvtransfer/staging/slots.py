"""Which staging block is whose. Loop-owned; everyone waits in one line.

Nobody holds blocks while it waits for more, so there is no circle of waits. One peer never holds more than half of
them: a lender that stands still keeps what its reads may still write, and the others must get on. It is passed over in
the line while it is at that limit.
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
    """Blocks 0 to `num_blocks` - 1. free + held == num_blocks."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._held: dict[Incarnation, int] = {}
        self._line: deque[_Waiter] = deque()

    @property
    def max_per_peer(self) -> int:
        return self.num_blocks // 2

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    def take(self, peer: Incarnation, count: int) -> asyncio.Future[Slots]:
        """Done when `count` blocks are the asker's, all at once. `leave` or `give_back` must follow."""
        assert 0 < count <= self.max_per_peer
        waiter = _Waiter(peer, count, asyncio.get_running_loop().create_future())
        self._line.append(waiter)
        self._serve()
        return waiter.granted

    def leave(self, peer: Incarnation, granted: asyncio.Future[Slots]) -> None:
        """Of one that waits no longer, whether or not it got its blocks meanwhile."""
        if granted.done():
            self.give_back(peer, granted.result())
            return
        self._line = deque(waiter for waiter in self._line if waiter.granted is not granted)
        self._serve()  # it may have been first, and too large for what is free

    def give_back(self, peer: Incarnation, slots: Slots) -> None:
        """No read and no conversion uses them any more."""
        assert not set(slots) & set(self._free), "given back twice"
        self._free.extend(slots)
        self._held[peer] -= len(slots)
        if self._held[peer] == 0:
            del self._held[peer]
        self._serve()

    def _serve(self) -> None:
        """In order, past those whose peer is at its limit; the first whose blocks are not there yet is waited for."""
        for waiter in list(self._line):
            if self._held.get(waiter.peer, 0) + waiter.count > self.max_per_peer:
                continue
            if waiter.count > len(self._free):
                return
            self._line.remove(waiter)
            self._held[waiter.peer] = self._held.get(waiter.peer, 0) + waiter.count
            waiter.granted.set_result(tuple(self._free.pop() for _ in range(waiter.count)))
