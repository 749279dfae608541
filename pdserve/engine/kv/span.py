"""How one step's sequences are described to the KV pool and to attention."""

from __future__ import annotations

from dataclasses import dataclass

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
