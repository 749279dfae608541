"""Whose prompt is computed when: priorities that age, and a floor for what has begun. Pure.

A priority is worth time. A sequence's turn is the moment it came, by a clock that counts computed prompt tokens, less so
many tokens for each level of its priority. So a larger priority overtakes what came before it, but what waits is overtaken
by those alone that come within that time: its wait is bounded, whatever the others ask for. Turns do not change, and lists
that are sorted by them stay so.

Overtaken while it runs, a prompt holds blocks, and mostly a lease that a reader renews and waits for. It goes on: a part of
each step is its own, in turn with others like it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Final

from pdserve.engine.schedule.sequence import Sequence

STEPS_A_LEVEL: Final = 16
"""Full steps of prompts that one level of priority is worth: 5 s of a small CPU model (512 tokens in 0.3 s), 3 s of a GPU
(8,192 in 0.2 s). Twenty levels then outweigh a minute, all two hundred the default deadline."""
FLOOR_SHARE: Final = 4
"""One part in so many of a step's prompt tokens is kept for whoever was overtaken: larger priorities are a third
slower for it."""


def turn_of(clock: int, priority: int, token_budget: int) -> int:
    """`clock`: prompt tokens planned before it came. `token_budget`: of a step."""
    return clock - priority * STEPS_A_LEVEL * token_budget


def overtaken(running: Many[Sequence], next_in: Sequence | None) -> Sequence | None:
    """Of the prompts that run, by rank, the one with the oldest chunk among those that a later arrival comes before; of
    several the last by rank. `next_in`: what would be admitted before all of them."""
    latest = 0 if next_in is None else next_in.arrival
    found: Sequence | None = None
    for seq in running:
        if seq.arrival < latest and (found is None or seq.served <= found.served):
            found = seq
        latest = max(latest, seq.arrival)
    return found


def floor_of(seq: Sequence | None, budget: int) -> int:
    """Tokens of the step that are kept for it; 0 for nobody."""
    return 0 if seq is None else min(seq.remaining, budget // FLOOR_SHARE)
