"""The lease machine: it knows which lent KV blocks a remote reader may still use.

A prefill worker's loop thread owns it. A reader on another machine copies blocks that it does not own, while either side
can die. The reader may use the copied KV only after `commit` has answered OK for the same lease, because OK says that the
lease was still held after the last read had finished. The machine is pure: time arrives as `now_s`, seconds on the local
monotonic clock, so a wrong time to live costs a recompute and never a wrong token.

If checksums are on, OK also says that the reader's checksums equal the ones that prefill took when each block was final. A
reader proves with each call that it has the ticket of this lease. Without the proof it gets GONE, and nothing changes.

The table never frees a block. `take_returned` hands out each lease that has left HELD once, and the owner of the blocks
then drops the lease's references.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hmac import compare_digest
from typing import Final

from pdserve.core.block_pools import BlockTables
from pdserve.core.errors import IllegalTransition, InternalBug
from pdserve.core.ids import NULL_BLOCK, NULL_SUM, BlockId, BlockSum, Incarnation, LeaseId, ReaderId, SeqId
from pdserve.core.sampling import FinishReason

GroupSums = Sequence[Sequence[BlockSum]]
"""Checksums of blocks, in order, for each KV group."""


class LeaseState(Enum):
    """The state of one lease. Its blocks may be read while it is HELD; the other states are final."""

    HELD = "held"
    COMMITTED = "committed"
    RELEASED = "released"
    EXPIRED = "expired"


class LeaseEvent(Enum):
    """The events of one lease. Each call is one event: `Lease.unproven` and `Lease.commit_event` say which event it is."""

    UNPROVEN = "unproven"
    """A call whose caller did not prove that it has the ticket of this lease."""
    LOOK = "look"
    RENEW = "renew"
    ADVANCE = "advance"
    SEAL = "seal"
    COMMIT = "commit"
    """A Commit of every block, with the right checksums. No reader has committed the lease before."""
    COMMIT_INCOMPLETE = "commit_incomplete"
    """A Commit that lacks a block or a checksum, or that comes before every block is final."""
    COMMIT_CORRUPT = "commit_corrupt"
    """A Commit whose checksums differ from prefill's."""
    COMMIT_AGAIN = "commit_again"
    """A Commit by the reader that has committed the lease. Its first answer may have been lost."""
    COMMIT_BY_OTHER = "commit_by_other"
    """A Commit by another reader than the reader that has committed the lease."""
    RELEASE = "release"
    EXPIRE = "expire"


class CommitAnswer(Enum):
    """The answer to a Commit, and to any other event. Only OK is true."""

    OK = "ok"
    GONE = "gone"
    CORRUPT = "corrupt"
    """The lease is held, but the reader's checksums differ from prefill's. The lease stays as it was."""

    def __bool__(self) -> bool:
        return self is CommitAnswer.OK


_S, _E, _A = LeaseState, LeaseEvent, CommitAnswer

TRANSITIONS: Final[dict[tuple[LeaseState, LeaseEvent], tuple[LeaseState, CommitAnswer]]] = {
    (_S.HELD, _E.UNPROVEN): (_S.HELD, _A.GONE),
    **{(_S.HELD, e): (_S.HELD, _A.OK) for e in (_E.LOOK, _E.RENEW, _E.ADVANCE, _E.SEAL)},
    (_S.HELD, _E.COMMIT): (_S.COMMITTED, _A.OK),
    (_S.HELD, _E.COMMIT_INCOMPLETE): (_S.HELD, _A.GONE),
    (_S.HELD, _E.COMMIT_CORRUPT): (_S.HELD, _A.CORRUPT),
    (_S.HELD, _E.RELEASE): (_S.RELEASED, _A.OK),
    (_S.HELD, _E.EXPIRE): (_S.EXPIRED, _A.GONE),
    (_S.COMMITTED, _E.COMMIT_AGAIN): (_S.COMMITTED, _A.OK),
    (_S.COMMITTED, _E.COMMIT_BY_OTHER): (_S.COMMITTED, _A.GONE),
    # An ended lease has no checksums any more, so no Commit of it is COMMIT_CORRUPT.
    **{(s, e): (s, _A.GONE) for s in (_S.RELEASED, _S.EXPIRED) for e in (_E.COMMIT, _E.COMMIT_INCOMPLETE)},
    **{
        (s, e): (s, _A.GONE)
        for s in (_S.COMMITTED, _S.RELEASED, _S.EXPIRED)
        for e in (_E.UNPROVEN, _E.LOOK, _E.RENEW, _E.ADVANCE, _E.SEAL, _E.RELEASE)
    },
}
"""The next state, and the answer to the caller. Every call for a lease that the table does not know is answered GONE."""

MAX_TOMBSTONES: Final = 4096
"""The number of ended leases that the table keeps, so that a repeated Commit gets the same answer. A Commit of an older lease
gets GONE, which is safe and only slower."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Token 0, which prefill draws. The last advance of the watermark carries it."""

    token_id: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class LeaseView:
    """The part of a lease's state that a reader may know. `held` False means GONE: the other fields then say nothing."""

    lease_id: LeaseId
    held: bool
    watermark: int = 0
    first_token: FirstToken | None = None


@dataclass(slots=True)
class Lease:
    """One lease over all prompt blocks of one sequence. `expires_s` is on the table's clock; `watermark` counts tokens."""

    lease_id: LeaseId
    seq_id: SeqId
    block_tables: BlockTables
    prompt_len: int
    expires_s: float
    sums: tuple[tuple[BlockSum, ...], ...] | None = None
    """Checksums of the leading blocks of each KV group that are final and summed. None: checksums are off."""
    proof: bytes | None = None
    """The proof that a reader must show with each call. None: the ticket is not written yet, so no reader has it."""
    state: LeaseState = LeaseState.HELD
    watermark: int = 0
    first_token: FirstToken | None = None
    reader: ReaderId | None = None
    history: list[str] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """The number of blocks of each group."""
        return len(self.block_tables[0])

    def move(self, event: LeaseEvent) -> CommitAnswer:
        """Change the state as the table says, and return the table's answer. Raises `IllegalTransition` when the state does
        not allow the event."""
        entry = TRANSITIONS.get((self.state, event))
        if entry is None:
            raise IllegalTransition(f"lease {self.lease_id}", self.state.name, event.name, tuple(self.history))
        target, answer = entry
        if target is not self.state:
            self.history.append(event.name)
        self.state = target
        return answer

    @property
    def blocks(self) -> Iterator[tuple[int, BlockId]]:
        """All blocks that a reader may read, each with the index of its group."""
        tables = enumerate(self.block_tables)
        return ((group, block_id) for group, table in tables for block_id in table if block_id != NULL_BLOCK)

    def unproven(self, proof: bytes | None) -> bool:
        """Tell whether a call lacks the proof that its caller has this lease's ticket. None: the lender itself calls."""
        return proof is not None and (self.proof is None or not compare_digest(self.proof, proof))

    def commit_event(self, reader: ReaderId, blocks: int, first: int, sums: GroupSums) -> LeaseEvent:
        """Return which event a proven Commit is. The arguments are those of `LeaseTable.commit`."""
        if self.reader is not None:
            return LeaseEvent.COMMIT_AGAIN if self.reader == reader else LeaseEvent.COMMIT_BY_OTHER
        if blocks != self.num_blocks or self.watermark != self.prompt_len:
            return LeaseEvent.COMMIT_INCOMPLETE
        differing = self.differing(first, sums)
        if differing is None:
            return LeaseEvent.COMMIT_INCOMPLETE
        return LeaseEvent.COMMIT_CORRUPT if differing else LeaseEvent.COMMIT

    def differing(self, first: int, sums: GroupSums) -> int | None:
        """Return how many of a reader's checksums, of the blocks from `first` on, differ from ours in all groups together.

        None: some are missing, in any group. A reader that has read no block lists no group.
        """
        if self.sums is None:
            return 0
        total, theirs = self.num_blocks, sums or ((),) * len(self.sums)
        if not 0 <= first <= total or len(theirs) != len(self.sums):
            return None
        if any(len(group) != total for group in self.sums) or any(len(group) != total - first for group in theirs):
            return None
        return sum(
            a != b for ours, read in zip(self.sums, theirs, strict=True) for a, b in zip(ours[first:], read, strict=True)
        )


class LeaseTable:
    """All leases of one prefill worker. The methods with `now_s` first expire the leases that are due."""

    def __init__(self, incarnation: Incarnation, *, ttl_s: float) -> None:
        assert ttl_s > 0
        self.ttl_s = ttl_s
        self._incarnation = incarnation
        self._counter = 0
        self._held: dict[LeaseId, Lease] = {}
        self._ended: OrderedDict[LeaseId, Lease] = OrderedDict()
        self._returned: list[Lease] = []
        self._earliest_s = math.inf  # no held lease expires before this time; a renewal only moves an expiry later

    def grant(
        self,
        seq_id: SeqId,
        block_tables: BlockTables,
        prompt_len: int,
        *,
        sums: tuple[tuple[BlockSum, ...], ...] | None = None,
        now_s: float,
    ) -> LeaseId:
        """Add a lease over blocks on which the caller has already taken the lease's references. Return its new id.

        `block_tables` has the blocks of each KV group; blocks that no reader needs are null. `sums` has the checksums that the
        first blocks of each group have already. None: this lease's KV is not checked.
        """
        assert block_tables
        assert block_tables[0]
        assert all(len(table) == len(block_tables[0]) for table in block_tables)
        assert sums is None or len(sums) == len(block_tables)
        assert prompt_len > 0
        self._expire(now_s)
        self._counter += 1
        lease_id = LeaseId(self._incarnation, self._counter)
        self._held[lease_id] = Lease(lease_id, seq_id, block_tables, prompt_len, now_s + self.ttl_s, sums)
        self._earliest_s = min(self._earliest_s, now_s + self.ttl_s)
        return lease_id

    def expect(self, lease_id: LeaseId, proof: bytes) -> None:
        """Set the proof that readers of the lease must show from now on. The lease's ticket, which gives it, is written."""
        lease = self._held[lease_id]
        assert lease.proof is None, "a lease has one ticket only"
        lease.proof = proof

    def renew(self, lease_id: LeaseId, proof: bytes | None = None, *, now_s: float) -> LeaseView:
        """Move the expiry to a full time to live from now, never earlier, and return the current state, or GONE.

        `proof`, here and below, is what a reader showed. None: the lender itself calls.
        """
        self._expire(now_s)
        lease = self._ask(lease_id, LeaseEvent.RENEW, proof)
        if lease is None:
            return LeaseView(lease_id, held=False)
        lease.expires_s = max(lease.expires_s, now_s + self.ttl_s)
        return self._view(lease)

    def look(self, lease_id: LeaseId, proof: bytes | None = None, *, now_s: float) -> LeaseView:
        """Return the current state, or GONE, without renewing."""
        self._expire(now_s)
        lease = self._ask(lease_id, LeaseEvent.LOOK, proof)
        return self._view(lease) if lease is not None else LeaseView(lease_id, held=False)

    def advance(self, lease_id: LeaseId, watermark: int, first_token: FirstToken | None, *, now_s: float) -> LeaseView:
        """Note that the KV of prompt tokens [0, watermark) is final, and return the new state, or GONE.

        Only the last advance carries token 0. Raises `InternalBug` when the watermark shrinks or passes the prompt's end, or
        when `first_token` comes at the wrong time.
        """
        self._expire(now_s)
        lease = self._ask(lease_id, LeaseEvent.ADVANCE)
        if lease is None:
            return LeaseView(lease_id, held=False)
        in_order = lease.watermark <= watermark <= lease.prompt_len
        if not in_order or (first_token is not None) != (watermark == lease.prompt_len):
            raise InternalBug(
                f"lease {lease_id}: advance from {lease.watermark} to {watermark} of {lease.prompt_len}, token 0 {first_token}"
            )
        lease.watermark = watermark
        lease.first_token = first_token
        return self._view(lease)

    def seal(self, lease_id: LeaseId, first: int, sums: GroupSums, *, now_s: float) -> None:
        """Store the checksums of the lease's blocks from `first` on in each group. These blocks are final. A null entry has
        `NULL_SUM`, not the checksum of the block that has died.

        Do nothing when the lease has ended. Raises `InternalBug` when checksums are off, when these checksums do not follow the
        last ones, or when the groups do not have equally many.
        """
        self._expire(now_s)
        lease = self._ask(lease_id, LeaseEvent.SEAL)
        if lease is None:
            return
        counts = [len(group) for group in sums]
        groups_fit = len(sums) == len(lease.block_tables) and len(set(counts)) == 1
        if lease.sums is None or not groups_fit or first != len(lease.sums[0]) or first + counts[0] > lease.num_blocks:
            raise InternalBug(
                f"lease {lease_id}: {counts} checksums from block {first} on do not fit {lease.num_blocks} blocks "
                f"of {len(lease.block_tables)} groups"
            )
        parts = zip(lease.sums, lease.block_tables, sums, strict=True)
        lease.sums = tuple([(*known, *_of_live(table[first:], new)) for known, table, new in parts])

    def awaits_sums(self, lease_id: LeaseId, *, now_s: float) -> bool:
        """Tell whether every block of a held lease is final while checksums of the last blocks are missing."""
        self._expire(now_s)
        lease = self._held.get(lease_id)
        if lease is None or lease.sums is None:
            return False
        return lease.watermark == lease.prompt_len and len(lease.sums[0]) < lease.num_blocks

    def commit(
        self,
        lease_id: LeaseId,
        reader: ReaderId,
        blocks: int,
        first: int = 0,
        sums: GroupSums = (),
        *,
        proof: bytes | None = None,
        now_s: float,
    ) -> CommitAnswer:
        """Commit the lease to `reader`. OK: the lease was held until now, and the reader may use the KV that it has read.

        A repeat by the same reader gets OK again; a repeat by any other reader gets GONE. A reader that has not read every
        block, or commits before the watermark covers the prompt, gets GONE, and the lease stays as it was. `sums` are the
        checksums of the blocks [first, blocks) that were read, in order, for each group; the blocks before `first` are the
        reader's own. A missing checksum gets GONE, and a wrong one CORRUPT.
        """
        self._expire(now_s)
        lease = self._known(lease_id)
        if lease is None:
            return CommitAnswer.GONE
        unproven = lease.unproven(proof)
        answer = self._move(lease, LeaseEvent.UNPROVEN if unproven else lease.commit_event(reader, blocks, first, sums))
        if answer:
            lease.reader = reader
        return answer

    def release(self, lease_id: LeaseId, proof: bytes | None = None, *, now_s: float) -> None:
        """End a lease that no reader will read any more. Do nothing for a lease that has ended or is unknown."""
        self._expire(now_s)
        self._ask(lease_id, LeaseEvent.RELEASE, proof)

    def release_all_over(self, blocks: Sequence[tuple[int, BlockId]], *, now_s: float) -> None:
        """End every lease that covers one of these blocks, because their content differs from the computed KV.

        A block is named by the index of its group and its id.
        """
        self._expire(now_s)
        spoilt = set(blocks)
        for lease in [lease for lease in self._held.values() if not spoilt.isdisjoint(lease.blocks)]:
            self._move(lease, LeaseEvent.RELEASE)

    def first_token(self, lease_id: LeaseId) -> FirstToken | None:
        """Return token 0 of a lease that is held, or whose end is still remembered. None: it is unknown or not complete."""
        lease = self._known(lease_id)
        return None if lease is None else lease.first_token

    def held(self, lease_id: LeaseId) -> Lease | None:
        """Return the held lease, even if its expiry is due. None: no such lease is held. The caller must not change it."""
        return self._held.get(lease_id)

    def expire_due(self, *, now_s: float) -> None:
        """End every lease whose expiry has passed."""
        self._expire(now_s)

    def take_returned(self) -> list[Lease]:
        """Return the leases that have left HELD since the last call. The caller drops their block references, once."""
        returned, self._returned = self._returned, []
        return returned

    @property
    def num_held(self) -> int:
        """The number of leases that are held."""
        return len(self._held)

    def check_invariants(self) -> None:
        """Raises AssertionError when a lease is in two places or in the wrong state."""
        for lease in self._held.values():
            assert lease.state is LeaseState.HELD
            assert lease.reader is None
            assert 0 <= lease.watermark <= lease.prompt_len
            assert lease.expires_s >= self._earliest_s
            counts = {0} if lease.sums is None else {len(group) for group in lease.sums}
            assert len(counts) == 1, "two KV groups have not equally many checksums"
            assert max(counts) <= lease.num_blocks
        for lease in self._ended.values():
            assert lease.state is not LeaseState.HELD
            assert (lease.reader is not None) == (lease.state is LeaseState.COMMITTED)
        assert not self._held.keys() & self._ended.keys()
        assert len(self._ended) <= MAX_TOMBSTONES

    def _known(self, lease_id: LeaseId) -> Lease | None:
        return self._held.get(lease_id) or self._ended.get(lease_id)

    def _ask(self, lease_id: LeaseId, event: LeaseEvent, proof: bytes | None = None) -> Lease | None:
        """Give a lease the event, or UNPROVEN. Return the lease if the answer is OK, else None."""
        lease = self._known(lease_id)
        if lease is None:
            return None
        return lease if self._move(lease, LeaseEvent.UNPROVEN if lease.unproven(proof) else event) else None

    def _view(self, lease: Lease) -> LeaseView:
        return LeaseView(lease.lease_id, True, lease.watermark, lease.first_token)

    def _expire(self, now_s: float) -> None:
        if now_s < self._earliest_s:
            return
        for lease in [lease for lease in self._held.values() if now_s >= lease.expires_s]:
            self._move(lease, LeaseEvent.EXPIRE)
        self._earliest_s = min((lease.expires_s for lease in self._held.values()), default=math.inf)

    def _move(self, lease: Lease, event: LeaseEvent) -> CommitAnswer:
        """Change the lease's state as the table says, and return the answer. Move a lease that leaves HELD to the ended
        leases."""
        before = lease.state
        answer = lease.move(event)
        if lease.state is not before:
            self._end(lease)
        return answer

    def _end(self, lease: Lease) -> None:
        del self._held[lease.lease_id]
        lease.sums = None  # the checksums of thousands of long prompts take hundreds of MiB
        self._ended[lease.lease_id] = lease
        while len(self._ended) > MAX_TOMBSTONES:
            self._ended.popitem(last=False)
        self._returned.append(lease)


def _of_live(table: tuple[BlockId, ...], sums: Sequence[BlockSum]) -> list[BlockSum]:
    """Return the checksums, with `NULL_SUM` for each null entry of the table, which may be longer."""
    return [NULL_SUM if block_id == NULL_BLOCK else value for block_id, value in zip(table, sums, strict=False)]
