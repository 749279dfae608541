"""The block pool: which KV block is whose. Owner: a worker's engine thread.

```
FREE -> HELD by named holders -> FREE
           `-- an inbound sequence aborted while our read is in flight -> QUARANTINED -- read has stopped --> FREE
```
A block is referenced by holders, each a (kind, sequence) pair, and is free again when the last has dropped it. Only
a holder can drop its own references. `Inbound` blocks are being written by the transport: they may not be read or
lent before they are handed to a `Sequence`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pdserve.core.errors import InternalBug
from pdserve.core.ids import BlockId, SeqId


class HolderKind(Enum):
    SEQUENCE = "sequence"
    LEASE = "lease"
    INBOUND = "inbound"


@dataclass(frozen=True, slots=True)
class Holder:
    kind: HolderKind
    seq_id: SeqId


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """free + cached + held + quarantined + unaccounted == total; unaccounted above 0 is a bug."""

    total: int
    free: int
    cached: int
    held: int
    quarantined: int

    @property
    def unaccounted(self) -> int:
        return self.total - self.free - self.cached - self.held - self.quarantined


class BlockPool:
    """A fixed number of blocks; every operation is all or nothing."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        # A stack: the block freed last is in the caches and its pages are mapped; one never used costs page faults.
        self._free: list[BlockId] = [BlockId(i) for i in reversed(range(num_blocks))]
        self._holders: dict[BlockId, set[Holder]] = {}
        self._blocks_of: dict[Holder, list[BlockId]] = {}
        self._quarantined: dict[SeqId, list[BlockId]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, holder: Holder, count: int) -> tuple[BlockId, ...] | None:
        """`count` free blocks, appended to the holder's; None when there are fewer, and nothing changes."""
        if count > len(self._free):
            return None
        taken = tuple(self._free.pop() for _ in range(count))
        for block_id in taken:
            self._holders[block_id] = {holder}
        self._blocks_of.setdefault(holder, []).extend(taken)
        return taken

    def share(self, owner: Holder, other: Holder) -> tuple[BlockId, ...]:
        """`other` takes a reference of its own on every block of `owner`."""
        blocks = self._require(owner)
        if other in self._blocks_of or HolderKind.INBOUND in (owner.kind, other.kind):
            raise InternalBug(f"{other} cannot share the blocks of {owner}")
        for block_id in blocks:
            self._holders[block_id].add(other)
        self._blocks_of[other] = list(blocks)
        return tuple(blocks)

    def hand_over(self, owner: Holder, other: Holder) -> None:
        """All references of `owner` become `other`'s: an inbound sequence whose commit was answered OK."""
        blocks = self._require(owner)
        if other in self._blocks_of:
            raise InternalBug(f"{other} already holds blocks")
        for block_id in blocks:
            self._holders[block_id].remove(owner)
            self._holders[block_id].add(other)
        self._blocks_of[other] = self._blocks_of.pop(owner)

    def drop(self, holder: Holder) -> None:
        """The holder gives up all its references; blocks without another become free. Idempotent."""
        for block_id in self._blocks_of.pop(holder, ()):
            holders = self._holders[block_id]
            holders.remove(holder)
            if not holders:
                del self._holders[block_id]
                self._free.append(block_id)

    def quarantine(self, seq_id: SeqId) -> None:
        """The inbound blocks of an aborted sequence may still be written by a read that cannot be stopped."""
        holder = Holder(HolderKind.INBOUND, seq_id)
        blocks = self._require(holder)
        del self._blocks_of[holder]
        for block_id in blocks:
            del self._holders[block_id]
        self._quarantined[seq_id] = blocks

    def end_quarantine(self, seq_id: SeqId) -> None:
        """The transport says that the read has stopped."""
        self._free.extend(self._quarantined.pop(seq_id))

    def blocks_of(self, holder: Holder) -> tuple[BlockId, ...]:
        return tuple(self._blocks_of.get(holder, ()))

    def counts(self) -> BlockCounts:
        quarantined = sum(len(blocks) for blocks in self._quarantined.values())
        return BlockCounts(self.num_blocks, len(self._free), 0, len(self._holders), quarantined)

    def check_invariants(self) -> None:
        """Conservation, no id twice, references equal named holders. Raises AssertionError."""
        places = [*self._free, *self._holders, *(b for blocks in self._quarantined.values() for b in blocks)]
        assert sorted(places) == list(range(self.num_blocks)), "a block is lost or in two places"
        for holder, blocks in self._blocks_of.items():
            assert len(set(blocks)) == len(blocks)
            assert all(holder in self._holders[b] for b in blocks)
        refs = sum(len(blocks) for blocks in self._blocks_of.values())
        assert refs == sum(len(holders) for holders in self._holders.values())
        assert all(self._holders.values())

    def _require(self, holder: Holder) -> list[BlockId]:
        blocks = self._blocks_of.get(holder)
        if blocks is None:
            raise InternalBug(f"{holder} holds no blocks")
        return blocks
