"""The order in which prompts are computed: priorities that age, turns between clients, and a floor for prompts that have begun.
It is pure.

A priority is worth time. The clock counts planned prompt tokens. A *turn* is the time at which a sequence arrived, less a fixed
number of tokens for each level of its priority. So a larger priority overtakes earlier sequences. But a waiting sequence is
overtaken only by those that arrive within that time, so its wait is bounded whatever others ask for.

Within a priority, clients share the turns (start-time fair queueing). Each prompt has a *tag*: where the prompt before it of
the same client ends, whatever the priorities of both are, or the virtual time if that is later. The virtual time rises with
all computed prompt tokens, by the share of one prompt. The prompt with the smallest tag has the first turn. So 64 prompts of
one client delay the prompt of another one by about one of them, and other priorities notice nothing of it.

A running prompt that is overtaken holds blocks and mostly a lease, which a reader renews and waits for. So it goes on: a
part of each step is kept for such prompts, which take it in turn.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Final

from pdserve.core.request_spec import RequestSpec
from pdserve.engine.schedule.sequence import Sequence, SequenceKind, Turn

STEPS_A_LEVEL: Final = 16
"""Full prompt steps that one level of priority is worth: 5 s on a CPU with a small model (512 tokens in 0.3 s), 3 s on a GPU
(8,192 tokens in 0.2 s). Then twenty levels outweigh a minute, and all two hundred levels outweigh the default deadline."""
FLOOR_SHARE: Final = 4
"""Divisor: 1 / FLOOR_SHARE of a step's prompt tokens is kept for an overtaken prompt. It makes larger priorities a third
slower, and twice as slow where a step has few units."""


KEPT_CLIENTS: Final = 1024
"""At most about so many clients are remembered. A forgotten one begins at the virtual time like a new one."""


class Turns:
    """Gives sequences their turns, in prompt tokens. Turns only move between the sequences of one priority."""

    def __init__(self, token_budget: int) -> None:
        """token_budget: tokens that one step may compute."""
        self._level = STEPS_A_LEVEL * token_budget
        self._clock = 0  # prompt tokens planned so far
        self._virtual = self._top = 0.0
        self._ends: dict[int, float] = {}  # of a client: where its last prompt ends, as a tag

    def of(self, spec: RequestSpec, arrival: int) -> Turn:
        """Return the turn of a sequence that has just arrived. `arrival` is its number."""
        return self._clock - spec.priority * self._level, arrival

    def tag(self, client: int, tokens: int) -> float:
        """Return the tag of a prompt of so many tokens. Client 0 is not known, and has no other prompts."""
        begin = max(self._virtual, self._ends.get(client, 0.0))
        if client:
            self._ends[client] = begin + tokens
            self._top = max(self._top, begin + tokens)
            if len(self._ends) > 2 * KEPT_CLIENTS:
                self._ends = dict(sorted(self._ends.items(), key=lambda item: -item[1])[:KEPT_CLIENTS])
        return begin

    def share(self, seq: Sequence, *places: list[Sequence]) -> None:
        """Tag a new sequence whose prompt is computed here, and give the turns of its priority out by tags. Preempted sequences
        come first and keep theirs. places: lists of the others, sorted by rank, and again afterwards."""
        if seq.kind is SequenceKind.INBOUND:
            return
        seq.tag = self.tag(seq.spec.client, len(seq.tokens))
        peers = [one for place in places for one in place if one.spec.priority == seq.spec.priority and not one.preemptions]
        if all(one.tag <= seq.tag for one in peers):
            return
        peers.append(seq)
        turns = sorted(one.turn for one in peers)
        for one, turn in zip(sorted(peers, key=lambda one: (one.tag, one.arrival)), turns, strict=True):
            one.turn = turn
        for place in places:
            place.sort(key=lambda one: one.rank)

    def planned(self, seq: Sequence, tokens: int, prompts: int) -> None:
        """Count tokens of a sequence that the next step computes. prompts: those that wait or run, this one included."""
        self._clock += tokens
        self._virtual = max(self._virtual, seq.tag, min(self._top, self._virtual + tokens / max(1, prompts)))


def overtaken(running: Many[Sequence], next_in: Sequence | None) -> Sequence | None:
    """Return the overtaken prompt whose last chunk is the oldest, or None. Among equals, it is the last by rank.

    A prompt is overtaken when a later turn, which a larger priority has moved, ranks before it. running: prompts that run, by
    rank. next_in: the waiting sequence that would be admitted before all of them, if any.
    """
    latest = 0 if next_in is None else next_in.turn[1]
    found: Sequence | None = None
    for seq in running:
        if seq.turn[1] < latest and (found is None or seq.served <= found.served):
            found = seq
        latest = max(latest, seq.turn[1])
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
