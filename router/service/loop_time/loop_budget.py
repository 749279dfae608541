"""The time that requests may take of one turn of the loop before others run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

BUDGET_S: Final = 0.005
"""After this much of a turn, further requests wait for the next one. It is a tenth of what nobody may hold the loop for, and
25 requests of 0.2 ms fit into it. The request that begins last may take a few milliseconds more."""


class LoopBudget:
    """Counts the time since the first request of the present turn of the loop. One loop uses it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None
        """The time at which the first request of this turn began. None: none has begun."""

    async def admit(self) -> None:
        """Return at once while the budget of this turn lasts, and otherwise in a later turn. Each turn admits one request at
        least, so all of them get on."""
        while self._began_s is not None and self._clock() - self._began_s >= BUDGET_S:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0)
        if self._began_s is None:
            self._began_s = self._clock()
            asyncio.get_running_loop().call_soon(self._end_turn)  # runs before what `admit` lets wait

    def _end_turn(self) -> None:
        self._began_s = None
