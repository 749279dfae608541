"""Conversations as data: which earlier parts and answers the prompt of a turn repeats. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pdserve_bench.workload.request import AnswerOf, PromptPart

Piece: TypeAlias = int | AnswerOf
"""The new part of the request with this number, or an answer."""


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """One request of a conversation, before its tokens are made."""

    number: int
    new_tokens: int
    """The tokens that the turn adds to what was said before."""
    max_tokens: int
    after: tuple[int, ...] = ()
    history: tuple[Piece, ...] = ()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The whole prompt."""
        return (*self.history, self.number)


def history_after(parents: Sequence[ConversationTurn]) -> tuple[Piece, ...]:
    """Return what a turn after all of these turns repeats.

    What all prompts begin with is repeated once. Then follows for each turn the rest of its prompt and its answer, in order.
    A turn whose answer stands in the prompt of another one adds nothing.
    """
    last = [one for one in parents if not any(AnswerOf(one.number) in other.history for other in parents)]
    common = 0
    while last and all(len(one.pieces) > common and one.pieces[common] == last[0].pieces[common] for one in last):
        common += 1
    pieces = last[0].pieces[:common] if last else ()
    for one in last:
        pieces = (*pieces, *one.pieces[common:], AnswerOf(one.number))
    return pieces


def prompt_tokens(turn: ConversationTurn, turns: Mapping[int, ConversationTurn]) -> int:
    """Return the tokens of a whole prompt. Each answer counts its `max_tokens`."""
    earlier = (turns[one.number].max_tokens if isinstance(one, AnswerOf) else turns[one].new_tokens for one in turn.history)
    return turn.new_tokens + sum(earlier)


def prompt_of(turn: ConversationTurn, part: Callable[[int], PromptPart]) -> tuple[PromptPart, ...]:
    """Return the whole prompt. `part` gives the new part of a request."""
    return tuple([one if isinstance(one, AnswerOf) else part(one) for one in turn.pieces])
