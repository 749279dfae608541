"""The moment of a change: a pool that is too small grows at once, and a pool that is too large shrinks after a delay.

A pool of n workers stays as it is while the need is between (n - 1) / (1 + tolerance) and n * (1 + tolerance). Above, it grows
to the need. Below, it shrinks to the largest need of `downscale_delay_s`. A worker that the other pool needs goes to it sooner,
after `flip_delay_s`: a change of roles takes seconds, where a stop and a start take minutes.

A pool may also keep room for a rise of the load (`correction.py` says when): for the largest rise of the last day within the
time in which a worker starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from pdserve.planner.limits import MOST_WORKERS
from pdserve.planner.settings import PlannerSettings

NOTHING: Final = 0.01
"""A need of less than a hundredth of a worker is none: means of an idle cluster fall for ever and never reach 0."""
_LONGEST: Final = 64
"""The largest number of needs that a pool remembers. Beyond, neighbours become one, and the larger one counts."""


Largest = tuple[tuple[float, float], ...]
"""Values of late, as pairs of a time and a value: each is larger than all later ones, so the first is the largest one."""


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """The planner's memory of one pool's size."""

    wanted: int
    """The size that the need asks for, before limits."""
    changed_s: float
    """The time of the last change."""
    needs: Largest = ()
    """The largest needs of late, in whole workers."""
    peaks: Largest = ()
    """The largest present needs of the last day: without forecasts, and without what waited."""
    lows: Largest = ()
    """The negated smallest present needs of the time in which a worker starts."""
    rises: Largest = ()
    """The largest rises of the present need within such a time, of the last day."""

    def room(self) -> float:
        """Return the workers that would serve another rise like the largest one of the last day, but no more than its peak."""
        return min(self.peaks[-1][1] + self.rises[0][1], self.peaks[0][1]) if self.peaks else 0.0

    def seen(self, need: float, now_s: float, settings: PlannerSettings) -> PoolMemory:
        """Return the memory with the present need of an interval."""
        lows = _stacked(self.lows, -need, now_s, settings.start_s)
        rises = _stacked(self.rises, need + lows[0][1], now_s, settings.budget_s)
        return replace(self, lows=lows, rises=rises, peaks=_stacked(self.peaks, need, now_s, settings.budget_s))

    def largest(self, since_s: float) -> int:
        """Return the largest need since a time. The pool's size: no need is remembered."""
        return int(next((workers for at_s, workers in self.needs if at_s >= since_s), self.wanted))


def begun(size: int, now_s: float) -> PoolMemory:
    """Return the memory of a pool that was not planned before. It changes after a cool-down: the first means are noise."""
    return PoolMemory(size, now_s, ((now_s, size),))


def free(size: int, now_s: float, settings: PlannerSettings) -> PoolMemory:
    """Return the memory of a pool whose plan nobody follows. It waits for no delay, so it tells what the present need asks."""
    return PoolMemory(size, now_s - 2 * settings.cooldown_s)


def held(memory: PoolMemory, now_s: float, settings: PlannerSettings) -> PoolMemory:
    """Return the memory after an interval of which nothing is known: its need counts as the pool's size."""
    return _noted(memory, memory.wanted, now_s, settings)


def decided(memory: PoolMemory, need: float, now_s: float, settings: PlannerSettings, room: float = 0.0) -> PoolMemory:
    """Return the memory, with the new size, after an interval with such a need. The pool has at least `room`."""
    room = min(room, MOST_WORKERS)
    memory = _noted(memory, workers_for(max(need * (1 + settings.tolerance), room)), now_s, settings)
    if now_s < memory.changed_s + settings.cooldown_s:
        return memory
    if workers_for(max(need / (1 + settings.tolerance), room)) > memory.wanted:
        return replace(memory, wanted=workers_for(max(need, room)), changed_s=now_s)
    largest = memory.largest(now_s - settings.downscale_delay_s)
    return replace(memory, wanted=largest, changed_s=now_s) if largest < memory.wanted else memory


def given(memory: PoolMemory, asked: int, now_s: float, settings: PlannerSettings) -> PoolMemory:
    """Return the memory of a pool that gives up to `asked` workers to the other pool. It has not needed these workers for
    `flip_delay_s`."""
    spare = memory.wanted - memory.largest(now_s - settings.flip_delay_s)
    count = min(asked, spare)
    if count <= 0 or now_s < memory.changed_s + settings.cooldown_s:
        return memory
    return replace(memory, wanted=memory.wanted - count, changed_s=now_s)


def workers_for(need: float) -> int:
    """Return the need as whole workers, at most `MOST_WORKERS`."""
    return math.ceil(min(need, MOST_WORKERS) - NOTHING) if need > NOTHING else 0


def _noted(memory: PoolMemory, workers: int, now_s: float, settings: PlannerSettings) -> PoolMemory:
    """Return the memory with a need."""
    return replace(memory, needs=_stacked(memory.needs, workers, now_s, settings.downscale_delay_s))


def _stacked(largest: Largest, value: float, now_s: float, kept_s: float) -> Largest:
    """Return the largest values with a new one. Smaller values before it no longer count, nor do values that are older than
    `kept_s`."""
    kept = [item for item in largest if item[0] >= now_s - kept_s and item[1] > value]
    if len(kept) >= _LONGEST:  # the two that are nearest in time become one, which is as large as the earlier one
        nearest = min(range(len(kept) - 1), key=lambda at: kept[at + 1][0] - kept[at][0])
        del kept[nearest + 1]
    return (*kept, (now_s, value))
