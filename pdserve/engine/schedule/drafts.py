"""The choice of the drafts that a step computes. The module is pure.

Drafts take only what the step leaves: tokens of the budget, and rows that draw a token. A step has at most as many such rows as
sequences may run, because the memory for logits is measured for so many. Drafts preempt nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from pdserve.core.ids import SeqId
from pdserve.core.step_plan import Drafts
from pdserve.engine.schedule.sequence import Sequence


def take_drafts(
    drafts: Drafts, decoding: Many[Sequence], room: int, fit: Callable[[Sequence, int], int]
) -> dict[SeqId, tuple[int, ...]]:
    """Return the drafts that the step computes. Sequences without drafts are left out. The order is that of `decoding`.

    room: the largest number of drafts of all sequences together. fit: takes a sequence and a number of drafts, and returns how
    many of them the sequence's blocks can hold. A sequence gets no drafts that lie behind its longest length. It gets none at
    all if it has edits or a grammar, because these depend on every token before.
    """
    taken: dict[SeqId, tuple[int, ...]] = {}
    for seq in decoding:
        wanted = drafts.get(seq.seq_id, ())[: min(room, seq.longest - len(seq.tokens) - 1)]
        if not wanted or not seq.takes_drafts:
            continue
        if kept := wanted[: fit(seq, len(wanted))]:
            taken[seq.seq_id] = kept
            room -= len(kept)
    return taken
