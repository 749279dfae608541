"""The block pool of one KV group: it knows who holds each KV block, and which blocks hold a prefix that others may share.

One engine thread owns the pool.

```
FREE -> HELD by named holders -> FREE
           |-- published, and its last reference dropped -> CACHED -- found by its hash --> HELD
           |                                                  `------ evicted ------------> FREE
           `-- an inbound sequence aborted while our read is in flight -> QUARANTINED -- read has stopped --> FREE
```
Holders reference a block; each holder is a (kind, sequence) pair. Only a holder can drop its own references. The transport
writes the fresh blocks of an `INBOUND` holder: nobody may read, lend or hash them before they are handed over to a
`SEQUENCE` holder. The prefix hits of an `INBOUND` holder are ordinary shared references.

A published block keeps its hash until it is evicted or withdrawn. Only blocks without any holder are evicted.

A dead block is one that no later token of a sequence sees, because it is behind the sliding window. The sequence drops its
reference on it, and the entry of the holder's table becomes null (`NULL_BLOCK`), so that all other entries keep their
positions. Null entries stand only at the beginning of a table.

A block is summed once, when it is final. The checksum stays with the block: every later holder inherits it. The checksum
is dropped when the block is taken for other content.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from pdserve.core.block_hash import BlockHash, PublishedKeys
from pdserve.core.errors import IllegalTransition, InternalBug
from pdserve.core.ids import NULL_BLOCK, NULL_SUM, BlockId, BlockSum, SeqId


class HolderKind(Enum):
    """The kind of a holder: a sequence, a lease over a sequence's blocks, or a sequence whose KV is still being read."""

    SEQUENCE = "sequence"
    LEASE = "lease"
    INBOUND = "inbound"


@dataclass(frozen=True, slots=True)
class Holder:
    """One holder of block references. A sequence and the lease over its blocks are two holders with one `seq_id`."""

    kind: HolderKind
    seq_id: SeqId

    def __str__(self) -> str:
        return f"{self.kind.value} {self.seq_id}"


class BlockState(Enum):
    """The state of one block. The module's drawing shows how the states follow each other."""

    FREE = "free"
    HELD = "held"
    CACHED = "cached"
    QUARANTINED = "quarantined"


class BlockEvent(Enum):
    """The events that change the state of a block."""

    TAKE = "take"
    SHARE = "share"
    """The block gets one more holder: a lease over a sequence's block, or a sequence with a prefix hit."""
    PUBLISH = "publish"
    WITHDRAW = "withdraw"
    """No prompt finds this block any more, because its content may be wrong."""
    UNHOLD = "unhold"
    """The last reference to a block without a hash is gone."""
    UNHOLD_HASHED = "unhold_hashed"
    """The last reference to a block with a hash is gone."""
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

SumBlocks = Callable[[Sequence[int]], tuple[BlockSum, ...]]
"""A function that returns the checksum over all stored bytes of each of these blocks of one KV group, in order."""

MAX_HISTORY: Final = 32
"""The number of the pool's last operations that an error message lists. One engine step of a small batch makes fewer
operations."""


class BlockCounts(NamedTuple):
    """The number of blocks in each state. free + cached + held + quarantined + unaccounted == total."""

    total: int
    free: int
    cached: int
    held: int
    quarantined: int

    @property
    def unaccounted(self) -> int:
        """The number of blocks in no state. A value other than 0 is a bug."""
        return self.total - self.free - self.cached - self.held - self.quarantined


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks in prompt order; dead blocks are null. The first `hits` blocks hold their KV already, unless they are null. Other
    holders share them, so nobody may write them."""

    block_ids: tuple[BlockId, ...]
    hits: int


class BlockPool:
    """A pool with a fixed number of blocks. Each operation succeeds as a whole or changes nothing."""

    def __init__(self, num_blocks: int, published: PublishedKeys | None = None) -> None:
        """`published` is called with each hash that prompts can find from now on, or can no longer find. None: nothing is
        called."""
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._published = published
        self._states = [BlockState.FREE] * num_blocks
        # A stack: the block freed last is in the CPU's caches and its pages are mapped; an unused block costs page faults.
        self._free: list[BlockId] = [BlockId(i) for i in reversed(range(num_blocks))]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()  # least recently used first
        self._holders: dict[BlockId, set[Holder]] = {}
        self._blocks_of: dict[Holder, list[BlockId]] = {}
        self._dead: dict[Holder, int] = {}  # for each holder with null entries: their number
        self._hits: dict[Holder, int] = {}  # of each inbound holder: how many of its first blocks are hits
        self._quarantined: dict[SeqId, list[BlockId]] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._block_with: dict[BlockHash, BlockId] = {}
        self._sums: dict[BlockId, BlockSum] = {}
        self._history: deque[tuple[str, Holder]] = deque(maxlen=MAX_HISTORY)

    @property
    def num_free(self) -> int:
        """The number of blocks without useful content."""
        return len(self._free)

    @property
    def num_allocatable(self) -> int:
        """The number of blocks that can be allocated now: all free blocks, and all cached blocks, which are evicted then."""
        return len(self._free) + len(self._cached)

    def allocate(self, holder: Holder, count: int) -> tuple[BlockId, ...] | None:
        """Append `count` blocks to the holder's blocks and return them. Return None and change nothing when there are fewer
        free blocks."""
        if count > self.num_allocatable:
            return None
        self._history.append((f"allocate {count}", holder))
        taken = tuple(self._take() for _ in range(count))
        for block_id in taken:
            self._holders[block_id] = {holder}
        self._blocks_of.setdefault(holder, []).extend(taken)
        return taken

    def lookup(self, hashes: Sequence[BlockHash]) -> tuple[BlockId, ...]:
        """Return the blocks of the longest prefix of `hashes` that is in the pool, cached or held. Take no reference."""
        found: list[BlockId] = []
        for block_hash in hashes:
            if (block_id := self._block_with.get(block_hash)) is None:
                break
            found.append(block_id)
        return tuple(found)

    def runs(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return, for each n from 0 to len(hashes), how many of the first n hashes are in the pool without a gap before n."""
        runs = [0]
        for block_hash in hashes:
            runs.append(runs[-1] + 1 if block_hash in self._block_with else 0)
        return runs

    def lacking(self, count: int, hashes: Sequence[BlockHash] = (), *, spare: int = 0, dead: int = 0) -> int:
        """Return how many blocks lack for `reserve` to succeed now and leave `spare` allocatable. Below 1, none does."""
        hits = self.lookup(hashes[dead:] if dead else hashes)
        evictable_hits = sum(block_id in self._cached for block_id in hits)
        return count - dead - len(hits) + spare - (self.num_allocatable - evictable_hits)

    def reserve(self, holder: Holder, count: int, hashes: Sequence[BlockHash], *, dead: int = 0) -> Reservation | None:
        """Give `count` blocks to a new holder: the longest prefix of `hashes` in the pool is shared, the others are fresh.

        The first `dead` entries are null: the holder needs no such blocks, and their hashes need not be in the pool.
        Return None and change nothing when there are not enough blocks: hits and fresh blocks come in one step, so that no
        holder waits with half of its blocks. Fresh blocks never evict hits. Raises `InternalBug` when the holder has blocks
        already or is a lease, or when there are more hashes than blocks.
        """
        if holder in self._blocks_of or len(hashes) > count or holder.kind is HolderKind.LEASE:
            raise InternalBug(f"{holder} cannot reserve {count} blocks with {len(hashes)} hashes")
        if self.lacking(count, hashes, dead=dead) > 0:
            return None
        hits = self.lookup(hashes[dead:] if dead else hashes)
        known = min(len(hashes), dead) + len(hits)
        self._history.append((f"share a prefix of {len(hits)}", holder))
        for block_id in hits:
            self._reference(block_id, holder)
        self._blocks_of[holder] = [NULL_BLOCK] * dead + list(hits)
        if dead:
            self._dead[holder] = dead
        if holder.kind is HolderKind.INBOUND:
            self._hits[holder] = known
        fresh = self.allocate(holder, count - dead - len(hits))
        assert fresh is not None
        return Reservation((NULL_BLOCK,) * dead + hits + fresh, known)

    def free_behind(self, holder: Holder, dead: int) -> bool:
        """Drop the holder's references on its first `dead` blocks, which become null entries. Return True if the holder had
        such blocks.

        A published block without another holder becomes cached. Any other block without a holder becomes free. Raises
        `InternalBug` when the holder is not a sequence: reads by a peer, or reads into this pool, may still touch the blocks of
        other holders.
        """
        blocks, before = self._require(holder), self._dead.get(holder, 0)
        if dead <= before:
            return False
        if holder.kind is not HolderKind.SEQUENCE or dead > len(blocks):
            raise InternalBug(f"{holder} cannot free the first {dead} of its {len(blocks)} blocks")
        self._history.append((f"free the first {dead}", holder))
        behind = blocks[before:dead]
        blocks[before:dead] = [NULL_BLOCK] * len(behind)
        self._dead[holder] = dead
        self._unreference(behind, holder)
        return True

    def publish(self, holder: Holder, position: int, block_hash: BlockHash) -> None:
        """Allow others to share the holder's block at `position`, also after all its holders have dropped it. Nothing happens
        when the entry is null.

        The caller promises that the block is full and that no step or read writes it any more. When two blocks have the same
        content, only the first block is found. Raises `InternalBug` when the holder is not a sequence, or when the block has
        another hash already.
        """
        if holder.kind is not HolderKind.SEQUENCE:
            raise InternalBug(f"{holder} does not own its blocks and cannot publish them")
        block_id = self._require(holder)[position]
        if block_id == NULL_BLOCK:
            return
        known = self._hash_of.get(block_id)
        if known is not None and known != block_hash:
            raise InternalBug(f"block {block_id} of {holder} is published as {known.hex()}, not {block_hash.hex()}")
        if block_hash in self._block_with:
            return
        self._move(block_id, BlockEvent.PUBLISH)
        self._hash_of[block_id] = block_hash
        self._block_with[block_hash] = block_id
        if self._published is not None:
            self._published.publish(block_hash)

    def withdraw(self, holder: Holder, first: int = 0) -> None:
        """Remove the hashes of the holder's blocks from position `first` on, prefix hits included, so that nobody finds them.

        One of these blocks has wrong content, and the blocks after it may have been computed from that content. Other holders
        keep their references.
        """
        self._history.append(("withdraw", holder))
        for block_id in self._require(holder)[first:]:
            if (block_hash := self._hash_of.pop(block_id, None)) is not None:
                self._move(block_id, BlockEvent.WITHDRAW)
                self._unpublish(block_hash)

    def withdraw_hashes(self, hashes: Iterable[BlockHash]) -> None:
        """Remove these hashes, so that no prompt finds their blocks. A cached block becomes free, and holders keep their
        blocks."""
        for block_hash in hashes:
            if (block_id := self._block_with.get(block_hash)) is None:
                continue
            cached = block_id in self._cached
            self._move(block_id, BlockEvent.EVICT if cached else BlockEvent.WITHDRAW)
            del self._hash_of[block_id]
            self._unpublish(block_hash)
            if cached:
                del self._cached[block_id]
                self._free.append(block_id)

    def seal(self, block_id: BlockId, block_sum: BlockSum) -> None:
        """Store the checksum of a block, which is final: no step writes it any more. A free block needs none. Raises
        `InternalBug` when the block has a checksum already, or when a read may write it."""
        state = self._states[block_id]
        if state is BlockState.FREE:
            return
        holders = self._holders.get(block_id, ())
        inbound = any(holder.kind is HolderKind.INBOUND for holder in holders)
        if block_id in self._sums or inbound or state is BlockState.QUARANTINED:
            raise InternalBug(f"block {block_id} is not a step's to sum, or has its checksum already; {self._story()}")
        self._sums[block_id] = block_sum

    def seal_cached(self, sum_blocks: SumBlocks) -> None:
        """Store the checksum of each cached block that has none. Nothing writes a cached block."""
        unsummed = [block_id for block_id in self._cached if block_id not in self._sums]
        self._sums.update(zip(unsummed, sum_blocks(unsummed), strict=True))

    def sums_of(self, holder: Holder) -> tuple[BlockSum | None, ...]:
        """Return the checksum of each of the holder's blocks, in order; `NULL_SUM` for a null entry. None stands for a block
        without a checksum yet."""
        return (NULL_SUM,) * self._dead.get(holder, 0) + tuple(self._sums.get(block_id) for block_id in self._live(holder))

    def share(self, owner: Holder, other: Holder, *, dead: int = 0) -> tuple[BlockId, ...]:
        """Give `other` its own reference on every block of `owner` from position `dead` on, and return the blocks of `other`.
        Its first `dead` entries are null.

        Raises `InternalBug` when `other` has blocks already, when one of the two is inbound, or when a block that `other`
        needs is null.
        """
        blocks = self._require(owner)
        inbound = HolderKind.INBOUND in (owner.kind, other.kind)
        if other in self._blocks_of or inbound or not self._dead.get(owner, 0) <= dead <= len(blocks):
            raise InternalBug(f"{other} cannot share the blocks of {owner} from {dead} on")
        self._history.append((f"share with {other}", owner))
        for block_id in blocks[dead:]:
            self._reference(block_id, other)
        self._blocks_of[other] = [NULL_BLOCK] * dead + blocks[dead:]
        if dead:
            self._dead[other] = dead
        return tuple(self._blocks_of[other])

    def hand_over(self, owner: Holder, other: Holder) -> None:
        """Move all references of `owner` to `other`. An inbound sequence does so once its commit was answered OK.

        Raises `InternalBug` when `other` has blocks already or is inbound.
        """
        self._require(owner)
        if other in self._blocks_of or other.kind is HolderKind.INBOUND:
            raise InternalBug(f"{other} cannot take over the blocks of {owner}")
        self._history.append((f"hand over to {other}", owner))
        for block_id in self._live(owner):
            self._holders[block_id].remove(owner)
            self._holders[block_id].add(other)
        self._blocks_of[other] = self._blocks_of.pop(owner)
        if dead := self._dead.pop(owner, 0):
            self._dead[other] = dead
        self._hits.pop(owner, None)

    def drop(self, holder: Holder) -> None:
        """Drop all references of the holder. Blocks without another holder become cached or free. Idempotent."""
        if holder in self._blocks_of:
            self._history.append(("drop", holder))
            self._hits.pop(holder, None)
            blocks = self._live(holder)
            del self._blocks_of[holder]
            self._dead.pop(holder, None)
            self._unreference(blocks, holder)

    def quarantine(self, seq_id: SeqId) -> None:
        """Set the fresh blocks of an aborted inbound sequence aside: a read that cannot be stopped may still write them.

        The prefix hits of the sequence are only dropped, because no read was ever asked to write them.
        """
        holder = Holder(HolderKind.INBOUND, seq_id)
        blocks = self._require(holder)
        self._history.append(("quarantine", holder))
        dead = self._dead.pop(holder, 0)
        hits = max(dead, self._hits.pop(holder, 0))
        fresh = blocks[hits:]
        for block_id in fresh:
            self._move(block_id, BlockEvent.QUARANTINE)
            del self._holders[block_id]
        self._quarantined[seq_id] = fresh
        del self._blocks_of[holder]
        self._unreference(blocks[dead:hits], holder)

    def end_quarantine(self, seq_id: SeqId) -> None:
        """Free the quarantined blocks of a sequence, because its read has stopped. Raises `InternalBug` when there are none."""
        holder = Holder(HolderKind.INBOUND, seq_id)
        if seq_id not in self._quarantined:
            raise InternalBug(f"{holder} has nothing in quarantine; history: {self._story()}")
        self._history.append(("end quarantine", holder))
        for block_id in self._quarantined.pop(seq_id):
            self._move(block_id, BlockEvent.READ_STOPPED)
            self._free.append(block_id)

    def blocks_of(self, holder: Holder) -> tuple[BlockId, ...]:
        """Return the holder's blocks in prompt order, dead blocks as null entries; an unknown holder has no blocks."""
        return tuple(self._blocks_of.get(holder, ()))

    def hashes(self) -> tuple[BlockHash, ...]:
        """Return all hashes that prompts find."""
        return tuple(self._block_with)

    def holdings(self) -> dict[Holder | SeqId, tuple[int, int]]:
        """Return how many entries each holder's table has and, for an inbound holder, how many of them are hits. Sequences
        whose blocks are quarantined are named by their ids."""
        quarantined = dict.fromkeys(self._quarantined, (0, 0))
        return {holder: (len(blocks), self._hits.get(holder, 0)) for holder, blocks in self._blocks_of.items()} | quarantined

    def counts(self) -> BlockCounts:
        """Count the blocks in each state."""
        quarantined = sum(map(len, self._quarantined.values()))
        return BlockCounts(self.num_blocks, len(self._free), len(self._cached), len(self._holders), quarantined)

    def check_invariants(self) -> None:
        """Check that each block is in one place and one state, that references and holders agree, and that only blocks which
        can be shared have a hash. Raises AssertionError."""
        quarantined = [b for blocks in self._quarantined.values() for b in blocks]
        places = {_S.FREE: self._free, _S.CACHED: self._cached, _S.HELD: self._holders, _S.QUARANTINED: quarantined}
        ids = [block_id for blocks in places.values() for block_id in blocks]
        assert sorted(ids) == list(range(self.num_blocks)), "a block is lost or in two places"
        for state, blocks in places.items():
            assert all(self._states[block_id] is state for block_id in blocks), f"a {state.value} block is not in that state"
        self._check_references()
        self._check_hashes()

    def _check_references(self) -> None:
        refs = 0
        for holder, entries in self._blocks_of.items():
            blocks = self._live(holder)
            refs += len(blocks)
            assert NULL_BLOCK not in blocks, f"{holder} has a null entry behind a live one"
            assert all(b == NULL_BLOCK for b in entries[: self._dead.get(holder, 0)]), f"a dead block of {holder} is not null"
            assert len(set(blocks)) == len(blocks), f"{holder} holds a block twice"
            assert all(holder in self._holders[b] for b in blocks)
        assert self._dead.keys() <= self._blocks_of.keys()
        assert refs == sum(len(holders) for holders in self._holders.values())
        assert all(self._holders.values())

    def _check_hashes(self) -> None:
        assert {block: block_hash for block_hash, block in self._block_with.items()} == self._hash_of
        assert all(self._states[b] in (_S.HELD, _S.CACHED) for b in self._hash_of), "a hash on a block that may be written"
        assert all(b in self._hash_of for b in self._cached), "a cached block that nobody can find"
        for holder, blocks in self._blocks_of.items():
            if holder.kind is HolderKind.INBOUND:
                fresh = blocks[max(self._dead.get(holder, 0), self._hits.get(holder, 0)) :]
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
        self._unpublish(self._hash_of.pop(block_id))
        self._free.append(block_id)

    def _unpublish(self, block_hash: BlockHash) -> None:
        del self._block_with[block_hash]
        if self._published is not None:
            self._published.remove(block_hash)

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

    def _live(self, holder: Holder) -> list[BlockId]:
        """Return the holder's blocks without its null entries. The caller does not change the list."""
        blocks, dead = self._require(holder), self._dead.get(holder, 0)
        return blocks[dead:] if dead else blocks

    def _require(self, holder: Holder) -> list[BlockId]:
        blocks = self._blocks_of.get(holder)
        if blocks is None:
            raise InternalBug(f"{holder} holds no blocks; history: {self._story()}")
        return blocks
