"""Rule 9 as a model: requests that need room in two pools, and the orders in which they may take it.

A request needs `need` blocks of prefill and `need` of decode at once for its handoff. It gives prefill's back after the
handoff and decode's at its end. Its decode worker may die during the handoff, which takes decode's blocks from it and
leaves prefill's: a rebind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tests.search.explorer import Step


class Order(Enum):
    BLOCK_BY_BLOCK = "each side takes block by block"
    WHOLE_FREE = "each side takes all or nothing, in any order"
    WHOLE_DECODE_FIRST = "all or nothing, decode first; a rebind waits with its lease"
    OURS = "all or nothing, decode first; a rebind takes room at once or releases its lease"


class Holding(NamedTuple):
    prefill: int = 0
    decode: int = 0
    handed_off: bool = False
    ended: bool = False


State = tuple[Holding, ...]


@dataclass(frozen=True)
class TwoPools:
    order: Order
    requests: int = 2
    need: int = 2
    prefill_blocks: int = 2
    decode_blocks: int = 2

    def initial(self) -> State:
        return (Holding(),) * self.requests

    def successors(self, s: State) -> Iterator[Step]:
        for i, held in enumerate(s):
            for name, sure, after in self._events(s, held):
                yield Step((name, i), (*s[:i], after, *s[i + 1 :]), sure)

    def check(self, s: State) -> None:
        assert sum(h.prefill for h in s) <= self.prefill_blocks
        assert sum(h.decode for h in s) <= self.decode_blocks

    def quiescent(self, s: State) -> bool:
        return all(held.ended for held in s)

    def _events(self, s: State, held: Holding) -> Iterator[tuple[str, bool, Holding]]:
        if held.ended:
            return
        if held.handed_off:
            yield "ends", True, Holding(ended=True)
            return
        step = 1 if self.order is Order.BLOCK_BY_BLOCK else self.need
        if self._may_take_decode(s, held, step):
            yield "takes decode", True, held._replace(decode=held.decode + step)
        if self._may_take_prefill(s, held, step):
            yield "takes prefill", True, held._replace(prefill=held.prefill + step)
        if held.prefill == held.decode == self.need:
            yield "hands off", True, Holding(decode=held.decode, handed_off=True)
            yield "loses decode", False, self._rebound(held)

    def _may_take_decode(self, s: State, held: Holding, step: int) -> bool:
        free = self.decode_blocks - sum(h.decode for h in s)
        return held.decode < self.need and step <= free

    def _may_take_prefill(self, s: State, held: Holding, step: int) -> bool:
        free = self.prefill_blocks - sum(h.prefill for h in s)
        ready = self.order in (Order.BLOCK_BY_BLOCK, Order.WHOLE_FREE) or held.decode == self.need
        return held.prefill < self.need and step <= free and ready

    def _rebound(self, held: Holding) -> Holding:
        """Room at once is a bind like any other, taken from nothing: what matters is that the lease is not held meanwhile."""
        return Holding() if self.order is Order.OURS else held._replace(decode=0)
