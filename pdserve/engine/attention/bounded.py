"""Attention over a bounded number of positions at a time, for backends that copy KV out of the pool.

What they copy grows with the positions of a step, and those are not bounded by the pool: sequences that begin alike
share blocks, so 64 of them may look at 64 times what the pool holds. Here sequences are taken in turn, whole ones, as
many as stay under the bound; ordinary batches are one turn and cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Generic

import torch
from torch import Tensor

from pdserve.engine.attention.api import Attention, Prepared
from pdserve.engine.kv.span import Span

MOST_POSITIONS: Final = 1 << 14
"""SmolLM2 in float32: 48 MiB of a layer's KV, and a few times that while it is computed with. Not tuned."""


@dataclass(frozen=True, slots=True)
class Turn(Generic[Prepared]):
    begin: int
    end: int
    prepared: Prepared


class BoundedAttention(Generic[Prepared]):
    """A sequence's result is what `inner` gives for it in the company of its turn."""

    def __init__(self, inner: Attention[Prepared], most_positions: int = MOST_POSITIONS) -> None:
        self._inner = inner
        self._most = most_positions

    def prepare(self, spans: tuple[Span, ...]) -> tuple[Turn[Prepared], ...]:
        return tuple(self._turn(part) for part in _turns(spans, self._most))

    def run(self, prepared: tuple[Turn[Prepared], ...], layer: int, query: Tensor) -> Tensor:
        """query: [tokens, num_heads, head_dim]."""
        if len(prepared) == 1:
            return self._inner.run(prepared[0].prepared, layer, query)
        return torch.cat([self._inner.run(turn.prepared, layer, query[turn.begin : turn.end]) for turn in prepared])

    def _turn(self, spans: list[Span]) -> Turn[Any]:
        begin, last = spans[0].row, spans[-1]
        own = tuple(replace(span, row=span.row - begin) for span in spans)
        return Turn(begin, last.row + last.count, self._inner.prepare(own))


def _turns(spans: tuple[Span, ...], most: int) -> Iterator[list[Span]]:
    """At least one span each; rows of a step lie in the order of its spans, without gaps."""
    turn: list[Span] = []
    positions = 0
    for span in spans:
        if turn and positions + span.end > most:
            yield turn
            turn, positions = [], 0
        turn.append(span)
        positions += span.end
    if turn:
        yield turn
