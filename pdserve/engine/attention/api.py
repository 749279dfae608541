"""What the model asks of an attention backend, and how one step's sequences are described to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from pdserve.core.ids import BlockId


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a step: rows [row, row + count) are its tokens [start, start + count).

    KV of tokens [0, start + count) is in the blocks of `block_table`, the new ones written just before.
    """

    row: int
    start: int
    count: int
    block_table: tuple[BlockId, ...]

    @property
    def end(self) -> int:
        return self.start + self.count


Prepared = TypeVar("Prepared")


class Attention(Protocol, Generic[Prepared]):
    """Causal grouped-query attention over paged KV. Stateless: `prepare` once a step, `run` once a layer."""

    def prepare(self, spans: tuple[Span, ...]) -> Prepared:
        """Whatever of the work all layers share."""

    def run(self, prepared: Prepared, layer: int, query: Tensor) -> Tensor:
        """query: [tokens, num_heads, head_dim]; returns the same shape and dtype."""
