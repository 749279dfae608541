"""The block pool: which KV block is whose, and which hold a prefix that others may share. Owner: an engine thread.

```
FREE -> HELD by named holders -> FREE
           |-- published, and its last reference dropped -> CACHED -- found by its hash --> HELD
           |                                                  `------ evicted ------------> FREE
           `-- an inbound sequence aborted while our read is in flight -> QUARANTINED -- read has stopped --> FREE
```
A block is referenced by holders, each a (kind, sequence) pair. Only a holder can drop its own references. The fresh
blocks of an `InboundBlocks` holder are being written by the transport: they may not be read, lent or hashed before they are
handed to a `Sequence`. Its prefix hits are ordinary shared references.

A published block keeps its hash until it is evicted, which only blocks without any holder are, or until it is withdrawn.

A block's checksum is taken once, when the block is final, and lives with the block: every later holder inherits it, and
it goes when the block is taken for something else.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from pdserve.core.block_hash import BlockHash
from pdserve.core.errors import IllegalTransition, InternalBug
from pdserve.core.ids import BlockId, BlockSum, SeqId


class HolderKind(Enum):
    SEQUENCE = "sequence"
    LEASE = "lease"
    INBOUND = "inbound"


@dataclass(frozen=True, slots=True)
class Holder:
    kind: HolderKind
    seq_id: SeqId

    def __str__(self) -> str:
        return f"{self.kind.value} {self.seq_id}"


class BlockState(Enum):
    FREE = "free"
    HELD = "held"
    CACHED = "cached"
    QUARANTINED = "quarantined"


class BlockEvent(Enum):
    TAKE = "take"
    SHARE = "share"
    """One more holder: a lease over a sequence's block, or a prefix hit."""
    PUBLISH = "publish"
    WITHDRAW = "withdraw"
    """From now on no prompt finds this block: what it holds may be wrong."""
    UNHOLD = "unhold"
    """The last reference to a block without a hash is gone."""
    UNHOLD_HASHED = "unhold_hashed"
    EVICT = "evict"
    QUARANTINE = "quarantine"
    READ_STOPPED = "read_stopped"


_S, _E = BlockState, BlockEvent

TRANSITIONS: Final[dict[tuple[BlockState, BlockEvent], BlockState]] = {
    (_S.FREE, _E.TAKE): _S.HELD,
    (_S.HELD, _E.SHARE): _S.HELD,
    (_S.HELD, _E.PUBLISH): _S.HELD,
    (_S.HELD, _E.WITHDRAW): _S.HELD,
    (_S.HELD, _E.UNHOLD): _S.FREE,
    (_S.HELD, _E.UNHOLD_HASHED): _S.CACHED,
    (_S.HELD, _E.QUARANTINE): _S.QUARANTINED,
    (_S.CACHED, _E.SHARE): _S.HELD,
    (_S.CACHED, _E.EVICT): _S.FREE,
    (_S.QUARANTINED, _E.READ_STOPPED): _S.FREE,
}

MAX_HISTORY: Final = 32
"""Operations of the pool that an error tells of: more than one engine step makes for the sequences of a small batch."""


class BlockCounts(NamedTuple):
    """free + cached + held + quarantined + unaccounted == total; unaccounted above 0 is a bug."""

    total: int
    free: int
    cached: int
    held: int
    quarantined: int

    @property
    def unaccounted(self) -> int:
        return self.total - self.free - self.cached - self.held - self.quarantined


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks in prompt order. The first `hits` hold their KV already and are shared with others: read, never written."""

    block_ids: tuple[BlockId, ...]
    hits: int


class BlockPool:
    """A fixed number of blocks; every operation is all or nothing."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._states = [BlockState.FREE] * num_blocks
        # A stack: the block freed last is in the caches and its pages are mapped; one never used costs page faults.
        self._free: list[BlockId] = [BlockId(i) for i in reversed(range(num_blocks))]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()  # least recently used first
        self._holders: dict[BlockId, set[Holder]] = {}
        self._blocks_of: dict[Holder, list[BlockId]] = {}
        self._hits: dict[Holder, int] = {}  # of inbound holders: their first blocks, which no read writes
        self._quarantined: dict[SeqId, list[BlockId]] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._block_with: dict[BlockHash, BlockId] = {}
        self._sums: dict[BlockId, BlockSum] = {}
        self._history: deque[tuple[str, Holder]] = deque(maxlen=MAX_HISTORY)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing of use."""
        return len(self._free)

    @property
    def num_allocatable(self) -> int:
        """Blocks that can be had now: free ones, and cached ones, which are evicted for it."""
        return len(self._free) + len(self._cached)

    def allocate(self, holder: Holder, count: int) -> tuple[BlockId, ...] | None:
        """`count` blocks, appended to the holder's; None when there are fewer, and nothing changes."""
        if count > self.num_allocatable:
            return None
        self._history.append((f"allocate {count}", holder))
        taken = tuple(self._take() for _ in range(count))
        for block_id in taken:
            self._holders[block_id] = {holder}
        self._blocks_of.setdefault(holder, []).extend(taken)
        return taken

    def lookup(self, hashes: Sequence[BlockHash]) -> tuple[BlockId, ...]:
        """The blocks of the longest prefix of `hashes` that is here, cached or held. Takes no reference."""
        found: list[BlockId] = []
        for block_hash in hashes:
            if (block_id := self._block_with.get(block_hash)) is None:
                break
            found.append(block_id)
        return tuple(found)

    def fits(self, count: int, hashes: Sequence[BlockHash] = (), *, spare: int = 0) -> bool:
        """Whether `reserve` would succeed now, and leave `spare` blocks that could still be had."""
        hits = self.lookup(hashes)
        evictable_hits = sum(block_id in self._cached for block_id in hits)
        return count - len(hits) + spare <= self.num_allocatable - evictable_hits

    def reserve(self, holder: Holder, count: int, hashes: Sequence[BlockHash]) -> Reservation | None:
        """`count` blocks for a new holder, of which the longest prefix of `hashes` that is here is shared, not taken.

        None when there are not enough, and nothing changes: hits and fresh blocks come in one step, so that nobody
        waits with half of what it needs. Fresh blocks never evict the hits.
        """
        if holder in self._blocks_of or len(hashes) > count or holder.kind is HolderKind.LEASE:
            raise InternalBug(f"{holder} cannot reserve {count} blocks with {len(hashes)} hashes")
        if not self.fits(count, hashes):
            return None
        hits = self.lookup(hashes)
        self._history.append((f"share a prefix of {len(hits)}", holder))
        for block_id in hits:
            self._reference(block_id, holder)
        self._blocks_of[holder] = list(hits)
        if holder.kind is HolderKind.INBOUND:
            self._hits[holder] = len(hits)
        fresh = self.allocate(holder, count - len(hits))
        assert fresh is not None
        return Reservation(hits + fresh, len(hits))

    def publish(self, holder: Holder, position: int, block_hash: BlockHash) -> None:
        """From now on others may share the holder's block at `position`, also after its holders have dropped it.

        The caller promises that the block is full and that no step or read writes it any more. Only a sequence's
        blocks can be published. Of two blocks with the same content, the first stays the one that is found.
        """
        if holder.kind is not HolderKind.SEQUENCE:
            raise InternalBug(f"{holder} does not own its blocks and cannot publish them")
        block_id = self._require(holder)[position]
        known = self._hash_of.get(block_id)
        if known is not None and known != block_hash:
            raise InternalBug(f"block {block_id} of {holder} is published as {known.hex()}, not {block_hash.hex()}")
        if block_hash in self._block_with:
            return
        self._move(block_id, BlockEvent.PUBLISH)
        self._hash_of[block_id] = block_hash
        self._block_with[block_hash] = block_id

    def withdraw(self, holder: Holder, first: int = 0) -> None:
        """Nobody finds the holder's blocks from position `first` on any more, prefix hits included: one is not what it should
        be, and what follows it may have been computed from it. Whoever else holds them keeps them."""
        self._history.append(("withdraw", holder))
        for block_id in self._require(holder)[first:]:
            if (block_hash := self._hash_of.pop(block_id, None)) is not None:
                self._move(block_id, BlockEvent.WITHDRAW)
                del self._block_with[block_hash]

    def seal(self, holder: Holder, position: int, block_sum: BlockSum) -> None:
        """The checksum of the holder's block at `position`, which is final: no step writes it any more. Once a block."""
        block_id = self._require(holder)[position]
        if holder.kind is HolderKind.INBOUND or block_id in self._sums:
            raise InternalBug(f"block {block_id} of {holder} is not this holder's to sum, or has its checksum already")
        self._sums[block_id] = block_sum

    def sums_of(self, holder: Holder) -> tuple[BlockSum | None, ...]:
        """The checksum of each of the holder's blocks, in order; None: it is not final yet."""
        return tuple(self._sums.get(block_id) for block_id in self._require(holder))

    def share(self, owner: Holder, other: Holder) -> tuple[BlockId, ...]:
        """`other` takes a reference of its own on every block of `owner`."""
        blocks = self._require(owner)
        if other in self._blocks_of or HolderKind.INBOUND in (owner.kind, other.kind):
            raise InternalBug(f"{other} cannot share the blocks of {owner}")
        self._history.append((f"share with {other}", owner))
        for block_id in blocks:
            self._reference(block_id, other)
        self._blocks_of[other] = list(blocks)
        return tuple(blocks)

    def hand_over(self, owner: Holder, other: Holder) -> None:
        """All references of `owner` become `other`'s: an inbound sequence whose commit was answered OK."""
        blocks = self._require(owner)
        if other in self._blocks_of or other.kind is HolderKind.INBOUND:
            raise InternalBug(f"{other} cannot take over the blocks of {owner}")
        self._history.append((f"hand over to {other}", owner))
        for block_id in blocks:
            self._holders[block_id].remove(owner)
            self._holders[block_id].add(other)
        self._blocks_of[other] = self._blocks_of.pop(owner)
        self._hits.pop(owner, None)

    def drop(self, holder: Holder) -> None:
        """The holder gives up all its references; blocks without another become cached or free. Idempotent."""
        if holder in self._blocks_of:
            self._history.append(("drop", holder))
            self._hits.pop(holder, None)
            self._unreference(self._blocks_of.pop(holder), holder)

    def quarantine(self, seq_id: SeqId) -> None:
        """The fresh blocks of an aborted inbound sequence may still be written by a read that cannot be stopped.

        Its prefix hits are merely dropped: no read was ever asked to write them.
        """
        holder = Holder(HolderKind.INBOUND, seq_id)
        blocks = self._require(holder)
        self._history.append(("quarantine", holder))
        hits = self._hits.pop(holder, 0)
        fresh = blocks[hits:]
        for block_id in fresh:
            self._move(block_id, BlockEvent.QUARANTINE)
            del self._holders[block_id]
        self._quarantined[seq_id] = fresh
        del self._blocks_of[holder]
        self._unreference(blocks[:hits], holder)

    def end_quarantine(self, seq_id: SeqId) -> None:
        """The transport says that the read has stopped."""
        holder = Holder(HolderKind.INBOUND, seq_id)
        if seq_id not in self._quarantined:
            raise InternalBug(f"{holder} has nothing in quarantine; history: {self._story()}")
        self._history.append(("end quarantine", holder))
        for block_id in self._quarantined.pop(seq_id):
            self._move(block_id, BlockEvent.READ_STOPPED)
            self._free.append(block_id)

    def blocks_of(self, holder: Holder) -> tuple[BlockId, ...]:
        return tuple(self._blocks_of.get(holder, ()))

    def counts(self) -> BlockCounts:
        quarantined = sum(map(len, self._quarantined.values()))
        return BlockCounts(self.num_blocks, len(self._free), len(self._cached), len(self._holders), quarantined)

    def check_invariants(self) -> None:
        """Conservation, no id twice, references equal named holders, hashes on shareable blocks. Raises AssertionError."""
        quarantined = [b for blocks in self._quarantined.values() for b in blocks]
        places = {_S.FREE: self._free, _S.CACHED: self._cached, _S.HELD: self._holders, _S.QUARANTINED: quarantined}
        ids = [block_id for blocks in places.values() for block_id in blocks]
        assert sorted(ids) == list(range(self.num_blocks)), "a block is lost or in two places"
        for state, blocks in places.items():
            assert all(self._states[block_id] is state for block_id in blocks), f"a {state.value} block is not in that state"
        self._check_references()
        self._check_hashes()

    def _check_references(self) -> None:
        for holder, blocks in self._blocks_of.items():
            assert len(set(blocks)) == len(blocks), f"{holder} holds a block twice"
            assert all(holder in self._holders[b] for b in blocks)
        refs = sum(len(blocks) for blocks in self._blocks_of.values())
        assert refs == sum(len(holders) for holders in self._holders.values())
        assert all(self._holders.values())

    def _check_hashes(self) -> None:
        assert {block: block_hash for block_hash, block in self._block_with.items()} == self._hash_of
        assert all(self._states[b] in (_S.HELD, _S.CACHED) for b in self._hash_of), "a hash on a block that may be written"
        assert all(b in self._hash_of for b in self._cached), "a cached block that nobody can find"
        for holder, blocks in self._blocks_of.items():
            if holder.kind is HolderKind.INBOUND:
                fresh = blocks[self._hits.get(holder, 0) :]
                assert all(self._holders[b] == {holder} for b in fresh), "a block is shared while a read writes it"
                assert not any(b in self._hash_of for b in fresh), "a block can be found while a read writes it"
                assert not any(b in self._sums for b in fresh), "a checksum of what a read writes"
        assert self._hits.keys() <= self._blocks_of.keys()

    def _take(self) -> BlockId:
        if not self._free:
            self._evict()
        block_id = self._free.pop()
        self._move(block_id, BlockEvent.TAKE)
        self._sums.pop(block_id, None)
        return block_id

    def _evict(self) -> None:
        block_id, _ = self._cached.popitem(last=False)
        self._move(block_id, BlockEvent.EVICT)
        del self._block_with[self._hash_of.pop(block_id)]
        self._free.append(block_id)

    def _reference(self, block_id: BlockId, holder: Holder) -> None:
        self._move(block_id, BlockEvent.SHARE)
        self._cached.pop(block_id, None)
        self._holders.setdefault(block_id, set()).add(holder)

    def _unreference(self, blocks: Iterable[BlockId], holder: Holder) -> None:
        cached: list[BlockId] = []
        for block_id in blocks:
            holders = self._holders[block_id]
            holders.remove(holder)
            if holders:
                continue
            del self._holders[block_id]
            hashed = block_id in self._hash_of
            self._move(block_id, BlockEvent.UNHOLD_HASHED if hashed else BlockEvent.UNHOLD)
            (cached if hashed else self._free).append(block_id)
        # The end of a prefix is evicted before its beginning: without the beginning the rest cannot be found.
        self._cached.update((block_id, None) for block_id in reversed(cached))

    def _move(self, block_id: BlockId, event: BlockEvent) -> None:
        state = self._states[block_id]
        target = TRANSITIONS.get((state, event))
        if target is None:
            holders = ", ".join(sorted(map(str, self._holders.get(block_id, ()))))
            raise IllegalTransition(f"block {block_id} held by ({holders})", state.name, event.name, self._story())
        self._states[block_id] = target

    def _story(self) -> tuple[str, ...]:
        return tuple(f"{holder}: {what}" for what, holder in self._history)

    def _require(self, holder: Holder) -> list[BlockId]:
        blocks = self._blocks_of.get(holder)
        if blocks is None:
            raise InternalBug(f"{holder} holds no blocks; history: {self._story()}")
        return blocks
