"""The description of one step's sequences for the KV pool and for attention."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.ids import BlockId


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a step: rows [row, row + count) of the batch are its tokens [start, start + count).

    When attention runs, the blocks of `block_table` hold the KV of tokens [0, start + count), the new ones included. In a group
    with a sliding window, the first entries are `NULL_BLOCK` where no token of the span sees the block: attention begins at
    entry `KvGroup.first_live(start)` and reads none before it.
    """

    row: int
    start: int
    count: int
    block_table: tuple[BlockId, ...]

    @property
    def end(self) -> int:
        """Position after the last token of the step: `start + count`."""
        return self.start + self.count
