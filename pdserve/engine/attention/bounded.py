"""Attention over a bounded number of positions at a time, for backends that copy KV out of the pool.

The size of such a copy grows with the positions of a step. The pool does not bound that number: sequences that begin alike
share blocks, so 64 sequences may attend to 64 times as many positions as the pool holds. This module splits a step into turns
of whole sequences. Each turn has as many sequences as stay under the bound. An ordinary batch is one turn and costs nothing
extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Generic

import torch
from torch import Tensor

from pdserve.engine.attention.api import Attention, Prepared, Scores
from pdserve.engine.kv.span import Span

MOST_POSITIONS: Final = 1 << 14
"""Bound of one turn. SmolLM2 in float32: 48 MiB for the KV of a layer, and a few times that for the computation. The value
was not tuned."""


@dataclass(frozen=True, slots=True)
class BoundedTurn(Generic[Prepared]):
    """Rows [begin, end) of a step that are computed together, and what `inner` prepared for them."""

    begin: int
    end: int
    prepared: Prepared


class BoundedAttention(Generic[Prepared]):
    """Computes attention with `inner`, one turn after the other.

    The sequences of a turn are one batch for `inner`. A turn has at most `most_positions` positions, unless it is a single
    sequence that has more.
    """

    def __init__(
        self, inner: Attention[Prepared], scores: Scores | None = None, *, most_positions: int = MOST_POSITIONS
    ) -> None:
        """Bound the turns of `inner`. scores: the settings of `inner`; their window decides which positions it copies."""
        self._inner = inner
        self._scores = scores
        self._most = most_positions

    def prepare(self, spans: tuple[Span, ...]) -> tuple[BoundedTurn[Prepared], ...]:
        """Split a step into turns and prepare each of them."""
        return tuple(self._turn(part) for part in self._turns(spans))

    def run(self, prepared: tuple[BoundedTurn[Prepared], ...], layer: int, query: Tensor) -> Tensor:
        """Return the attention of `query` [tokens, num_heads, head_dim] in one layer: the same shape and dtype."""
        if len(prepared) == 1:
            return self._inner.run(prepared[0].prepared, layer, query)
        return torch.cat([self._inner.run(turn.prepared, layer, query[turn.begin : turn.end]) for turn in prepared])

    def _turn(self, spans: list[Span]) -> BoundedTurn[Any]:
        begin, last = spans[0].row, spans[-1]
        own = tuple(replace(span, row=span.row - begin) for span in spans)
        return BoundedTurn(begin, last.row + last.count, self._inner.prepare(own))

    def _turns(self, spans: tuple[Span, ...]) -> Iterator[list[Span]]:
        """Yield the spans of each turn, at least one. The rows of a step follow the order of its spans without gaps."""
        turn: list[Span] = []
        positions = 0
        for span in spans:
            seen = span.end - (self._scores.first_seen(span.start) if self._scores else 0)
            if turn and positions + seen > self._most:
                yield turn
                turn, positions = [], 0
            turn.append(span)
            positions += seen
        if turn:
            yield turn
