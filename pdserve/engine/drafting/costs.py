"""The time of a decode step by its rows and by the KV that it reads: measured at a worker's start, and corrected by the steps
since. Pure.

The time of a step is not a line in its rows. On a CPU of one thread, four rows of the default model take 1.08 times as long as
one, and sixteen 1.5 times, because a step of few rows waits for the weights; each backend has other bends. So the time is a
table. A busy neighbour slows all steps alike, which changes no choice; so the table is corrected by what a step differs from
the steps around it.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.step_plan import GREEDY, SequenceSlice, StepPlan

MEASURED_ROWS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
"""The table has an entry for each of these numbers of rows, as far as a step may have so many. Kernels bend at multiples of
small powers of two, and between two entries the time is taken for a line."""
PASSES: Final = 5
"""Each entry is the shortest of so many steps, one of each pass over all entries: a disturbance makes a step only slower, and
lasts longer than a step."""
CONTEXT: Final = 1024  # positions, for the time to read KV
SHORT: Final = 16
SLOW_WEIGHT: Final = 1 / 64
"""The weight of one step in the table. A choice needs ratios of a few percent, and single steps differ by more."""
FAST_WEIGHT: Final = 1 / 8
"""The weight of one step in the common factor of all steps, which follows the load of the machine."""
REFRESH_STEPS: Final = 64
"""What was learned counts after so many steps: a step that looks its rows up in a list costs nothing."""
RETURN_WEIGHT: Final = SLOW_WEIGHT / 8
"""With each step that teaches, an entry goes back to what was measured at the start by so much of the difference. So what all
entries have in common stays in the factor, and noise adds up to nothing."""
MOST_OFF: Final = math.log(1.5)
"""The logarithm of how many times a step takes what was expected counts up to this, also below 0: it was disturbed."""


class StepSize(NamedTuple):
    """The size of a decode step: its rows, and the positions that its rows attend to, first rows of sequences and others."""

    rows: int
    read: int = 0
    """The positions before all sequences of the step, which each sequence reads once."""
    reread: int = 0
    """The same positions, counted once for each draft: its row attends to them as well."""


class StepCosts:
    """The expected time of decode steps."""

    def __init__(self, by_rows: Sequence[tuple[int, float]], read_s: float = 0.0, reread_s: float = 0.0) -> None:
        """by_rows: rows and seconds, ascending in rows, for steps that read no KV. read_s, reread_s: seconds for a position of
        `StepSize.read` and of `StepSize.reread`."""
        assert by_rows
        if len(by_rows) == 1:  # a step of one row is all that is known: more rows take as long
            by_rows = (*by_rows, (by_rows[0][0] + 1, by_rows[0][1]))
        self._rows = [rows for rows, _ in by_rows]
        self._seconds = [step_s for _, step_s in by_rows]
        self._measured = tuple(self._seconds)
        self.read_s, self.reread_s = max(read_s, 0.0), max(reread_s, 0.0)
        self._factor = 1.0
        self._learned = 0
        self.version = 0
        """It rises when `rows_s` changes."""
        self._table: list[float] = []
        self._refresh()

    def step_s(self, size: StepSize) -> float:
        """Return the expected time of a step on a machine that does nothing else, in seconds."""
        return self.rows_s(size.rows) + size.read * self.read_s + size.reread * self.reread_s

    def rows_s(self, rows: int) -> float:
        """Return the expected time of a step of so many rows that reads no KV, in seconds."""
        table = self._table
        return table[rows] if rows < len(table) else self._between(rows)

    def learn(self, size: StepSize, step_s: float) -> None:
        """Learn the time of one step. A time that is not positive is ignored."""
        if not step_s > 0.0:
            return
        ratio = step_s / self.step_s(size)
        if not self._learned:
            self._factor = ratio
        off = min(max(math.log(ratio / self._factor), -MOST_OFF), MOST_OFF)
        # The factor follows what counts, too. If it followed the longest steps of a busy machine, all others would seem short,
        # and the entries that are in use would sink below those that are not.
        self._factor *= math.exp(FAST_WEIGHT * off)
        low, share = self._place(size.rows)
        share = min(share, 1.0)
        for entry, weight in ((low, 1.0 - share), (low + 1, share)):
            seconds, measured = self._seconds[entry], self._measured[entry]
            self._seconds[entry] = seconds * math.exp(SLOW_WEIGHT * weight * off) + RETURN_WEIGHT * weight * (
                measured - seconds
            )
        self._learned += 1
        if not self._learned % REFRESH_STEPS:
            self._refresh()

    def _refresh(self) -> None:
        self._rising = list(accumulate(self._seconds, max))  # more rows take no less time
        self._table = [self._between(rows) for rows in range(self._rows[-1] + 1)]
        self.version += 1

    def _between(self, rows: int) -> float:
        low, share = self._place(rows)
        begin, end = self._rising[low], self._rising[low + 1]
        return end if share == 1.0 else begin + share * (end - begin)  # the sum may be rounded beyond the entry

    def _place(self, rows: int) -> tuple[int, float]:
        """Return the entry before a number of rows, and the share of the way to the next one. The share is above 1 behind the
        last entry: the last two are a line that goes on."""
        low = min(max(bisect_left(self._rows, rows) - 1, 0), len(self._rows) - 2)
        return low, max(0.0, (rows - self._rows[low]) / (self._rows[low + 1] - self._rows[low]))

    def __str__(self) -> str:
        """Return the times of steps of some sizes, for the log."""
        shown = [rows for rows in (1, 4, 16, 64) if rows <= max(self._rows)]
        return ", ".join(f"{rows} rows {self.rows_s(rows) * 1e3:.1f} ms" for rows in shown)


def measure(
    execute: Callable[[StepPlan], object],
    *,
    groups: int,
    block_size: int,
    num_blocks: int,
    most_rows: int,
    max_model_len: int,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCosts:
    """Measure the costs of an engine's decode steps, on a pool that nothing uses; the KV that the steps write is meaningless.

    execute: computes a step. groups: the number of KV groups. most_rows: the most rows of a step that draw a token. clock: a
    function that tells seconds. Where this thread computes alone, its own CPU time is better: all workers of a machine
    start together, and measure while others do.
    """

    def plan(rows: int, start: int) -> StepPlan:
        end = start + rows
        table = tuple([BlockId(i % num_blocks) for i in range(ceil_div(end, block_size))])
        piece = SequenceSlice(SeqId(0), start, (0,) * rows, (table,) * groups, (GREEDY,) * rows)
        return StepPlan((piece,), decodes=1 if rows == 1 else 0)

    longest = min(max_model_len, num_blocks * block_size) - 1
    short = max(0, min(SHORT, longest - most_rows))
    sizes = [rows for rows in MEASURED_ROWS if rows <= min(most_rows, longest - short)] or [1]
    more = sizes[min(3, len(sizes) - 1)]
    far = min(CONTEXT, longest - more)
    plans = {(rows, short): plan(rows, short) for rows in sizes} | {(rows, far): plan(rows, far) for rows in (1, more)}
    taken = dict.fromkeys(plans, math.inf)
    for one in plans.values():
        execute(one)  # it may compile a kernel
    for _ in range(PASSES):
        for size, one in plans.items():
            began_s = clock()
            execute(one)
            taken[size] = min(taken[size], clock() - began_s)
    by_rows = [(rows, taken[rows, short]) for rows in sizes]
    if far <= 2 * short or more == 1:
        return StepCosts(by_rows)
    read_s = (taken[1, far] - taken[1, short]) / (far - short)
    return StepCosts(by_rows, read_s, ((taken[more, far] - taken[more, short]) / (far - short) - read_s) / (more - 1))
