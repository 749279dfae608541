"""The order in which prompts are computed: priorities that age, and a floor for prompts that have begun. It is pure.

A priority is worth time. The clock counts planned prompt tokens. A sequence's turn is the clock at its arrival, less a fixed
number of tokens for each level of its priority. So a larger priority overtakes earlier sequences. But a waiting sequence is
overtaken only by those that arrive within that time, so its wait is bounded whatever others ask for. Turns do not change,
so lists that are sorted by them stay sorted.

A running prompt that is overtaken holds blocks and mostly a lease, which a reader renews and waits for. So it goes on: a
part of each step is kept for such prompts, which take it in turn.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Final

from pdserve.engine.schedule.sequence import Sequence

STEPS_A_LEVEL: Final = 16
"""Full prompt steps that one level of priority is worth: 5 s on a CPU with a small model (512 tokens in 0.3 s), 3 s on a GPU
(8,192 tokens in 0.2 s). Then twenty levels outweigh a minute, and all two hundred levels outweigh the default deadline."""
FLOOR_SHARE: Final = 4
"""Divisor: 1 / FLOOR_SHARE of a step's prompt tokens is kept for an overtaken prompt. It makes larger priorities a third
slower, and twice as slow where a step has few units."""


def turn_of(clock: int, priority: int, token_budget: int) -> int:
    """Return the turn of a new sequence, in prompt tokens.

    clock: prompt tokens planned before its arrival. token_budget: tokens that one step may compute.
    """
    return clock - priority * STEPS_A_LEVEL * token_budget


def overtaken(running: Many[Sequence], next_in: Sequence | None) -> Sequence | None:
    """Return the overtaken prompt whose last chunk is the oldest, or None. Among equals, it is the last by rank.

    A prompt is overtaken when a sequence that arrived later ranks before it. running: prompts that run, by rank. next_in:
    the waiting sequence that would be admitted before all of them, if any.
    """
    latest = 0 if next_in is None else next_in.arrival
    found: Sequence | None = None
    for seq in running:
        if seq.arrival < latest and (found is None or seq.served <= found.served):
            found = seq
        latest = max(latest, seq.arrival)
    return found


def floor_of(seq: Sequence | None, budget: int, *, unit: int, steps: int) -> int:
    """Return the tokens of a step that are kept for the overtaken prompt `seq`; 0 when there is none.

    These are whole units, at least one. A step of less than two units cannot be divided, so every second one is kept whole.

    budget: tokens that the step may spend on prompts. unit: tokens that are not divided. steps: the number of the step.
    """
    if seq is None:
        return 0
    if budget < 2 * unit:
        return 0 if steps % 2 else min(seq.remaining, budget)
    return min(seq.remaining, max(unit, budget // FLOOR_SHARE // unit * unit))
