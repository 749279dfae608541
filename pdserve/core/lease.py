"""The lease machine: which lent KV blocks a remote reader may still use.

Owner: a prefill worker's loop thread. A reader on another machine copies blocks it does not own, while either
side can die; it may use what it read only after `commit` answered OK for the very lease it read, because OK says
that the lease was still held after the last read had finished. Pure: time arrives as `now_s`, a duration on the
local monotonic clock, so a wrong time to live costs a recompute and never a wrong token.

Where checksums are on, OK also says that what the reader summed is what prefill summed when each block was final. A
reader proves with each call that it has the ticket that was written for this very lease; without the proof it is told
GONE, and nothing changes.

The table never frees a block. Whatever leaves HELD is handed out once by `take_returned`, and the owner of the
blocks drops the lease's references then.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from hmac import compare_digest
from typing import Final

from pdserve.core.errors import IllegalTransition, InternalBug
from pdserve.core.ids import BlockId, BlockSum, Incarnation, LeaseId, ReaderId, SeqId
from pdserve.core.sampling import FinishReason


class LeaseState(Enum):
    HELD = "held"
    COMMITTED = "committed"
    RELEASED = "released"
    EXPIRED = "expired"


class LeaseEvent(Enum):
    RENEW = "renew"
    ADVANCE = "advance"
    COMMIT = "commit"
    RELEASE = "release"
    EXPIRE = "expire"


_S, _E = LeaseState, LeaseEvent

TRANSITIONS: Final[dict[tuple[LeaseState, LeaseEvent], LeaseState]] = {
    (_S.HELD, _E.RENEW): _S.HELD,
    (_S.HELD, _E.ADVANCE): _S.HELD,
    (_S.HELD, _E.COMMIT): _S.COMMITTED,
    (_S.HELD, _E.RELEASE): _S.RELEASED,
    (_S.HELD, _E.EXPIRE): _S.EXPIRED,
    # Terminal states absorb what may still arrive late or twice.
    **{(s, e): s for s in (_S.COMMITTED, _S.RELEASED, _S.EXPIRED) for e in (_E.RENEW, _E.ADVANCE, _E.COMMIT, _E.RELEASE)},
}

MAX_TOMBSTONES: Final = 4096
"""Ended leases kept so that a repeated Commit gets the same answer. Past it the answer is GONE: safe, only slower."""


class CommitAnswer(Enum):
    """True only if OK."""

    OK = "ok"
    GONE = "gone"
    CORRUPT = "corrupt"
    """The lease is held, but the reader did not read what prefill wrote. The lease stays as it was."""

    def __bool__(self) -> bool:
        return self is CommitAnswer.OK


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Token 0, drawn by prefill: carried by the last advance of the watermark."""

    token_id: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class LeaseView:
    """What a reader may know. `held` False means GONE: nothing else in it may be used."""

    lease_id: LeaseId
    held: bool
    watermark: int = 0
    first_token: FirstToken | None = None


@dataclass(slots=True)
class Lease:
    lease_id: LeaseId
    seq_id: SeqId
    block_ids: tuple[BlockId, ...]
    prompt_len: int
    expires_s: float
    sums: tuple[BlockSum, ...] | None = None
    """Checksums of its first blocks, as many as are final and summed; None: checksums are off."""
    proof: bytes | None = None
    """What a reader must show. None: no reader can know it yet."""
    state: LeaseState = LeaseState.HELD
    watermark: int = 0
    first_token: FirstToken | None = None
    reader: ReaderId | None = None
    history: list[str] = field(default_factory=list)

    def move(self, event: LeaseEvent) -> None:
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalTransition(f"lease {self.lease_id}", self.state.name, event.name, tuple(self.history))
        if target is not self.state:
            self.history.append(event.name)
        self.state = target

    def differing(self, first: int, sums: Sequence[BlockSum]) -> int | None:
        """How many checksums of what a reader read, its blocks from `first` on, are not ours; None: some are missing."""
        if self.sums is None:
            return 0
        total = len(self.block_ids)
        if len(self.sums) != total or not 0 <= first <= total or len(sums) != total - first:
            return None
        return sum(ours != theirs for ours, theirs in zip(self.sums[first:], sums, strict=True))


class LeaseTable:
    """All leases of one prefill worker. Every method first expires what is due."""

    def __init__(self, incarnation: Incarnation, *, ttl_s: float) -> None:
        assert ttl_s > 0
        self.ttl_s = ttl_s
        self._incarnation = incarnation
        self._counter = 0
        self._held: dict[LeaseId, Lease] = {}
        self._ended: OrderedDict[LeaseId, Lease] = OrderedDict()
        self._returned: list[Lease] = []
        self._earliest_s = math.inf  # no held lease expires before: renewing only moves expiries out

    def grant(
        self,
        seq_id: SeqId,
        block_ids: tuple[BlockId, ...],
        prompt_len: int,
        *,
        sums: tuple[BlockSum, ...] | None = None,
        now_s: float,
    ) -> LeaseId:
        """A new lease over blocks on which its references are already taken. Returns its id, never used before.

        `sums`: the checksums that its first blocks have already; None: this lease is not checked.
        """
        assert block_ids
        assert prompt_len > 0
        self._expire(now_s)
        self._counter += 1
        lease_id = LeaseId(self._incarnation, self._counter)
        self._held[lease_id] = Lease(lease_id, seq_id, block_ids, prompt_len, now_s + self.ttl_s, sums)
        self._earliest_s = min(self._earliest_s, now_s + self.ttl_s)
        return lease_id

    def expect(self, lease_id: LeaseId, proof: bytes) -> None:
        """Its ticket is written: readers show this `proof` of it from now on."""
        lease = self._held[lease_id]
        assert lease.proof is None, "one ticket a lease"
        lease.proof = proof

    def renew(self, lease_id: LeaseId, proof: bytes | None = None, *, now_s: float) -> LeaseView:
        """Push the expiry out, never in; answers the level state, or GONE.

        `proof`, here and below: what a reader showed; None: the call is the lender's own.
        """
        self._expire(now_s)
        lease = self._find(lease_id, proof)
        if lease is None:
            return LeaseView(lease_id, held=False)
        lease.move(LeaseEvent.RENEW)
        lease.expires_s = max(lease.expires_s, now_s + self.ttl_s)
        return self._view(lease)

    def look(self, lease_id: LeaseId, proof: bytes | None = None, *, now_s: float) -> LeaseView:
        """The level state, or GONE, without renewing."""
        self._expire(now_s)
        lease = self._find(lease_id, proof)
        return self._view(lease) if lease is not None else LeaseView(lease_id, held=False)

    def advance(self, lease_id: LeaseId, watermark: int, first_token: FirstToken | None, *, now_s: float) -> LeaseView:
        """Prompt tokens [0, watermark) are final. The last advance, and only it, carries token 0."""
        self._expire(now_s)
        lease = self._held.get(lease_id)
        if lease is None:
            return LeaseView(lease_id, held=False)
        in_order = lease.watermark <= watermark <= lease.prompt_len
        if not in_order or (first_token is not None) != (watermark == lease.prompt_len):
            raise InternalBug(
                f"lease {lease_id}: advance from {lease.watermark} to {watermark} of {lease.prompt_len}, token 0 {first_token}"
            )
        lease.move(LeaseEvent.ADVANCE)
        lease.watermark = watermark
        lease.first_token = first_token
        return self._view(lease)

    def seal(self, lease_id: LeaseId, first: int, sums: Sequence[BlockSum], *, now_s: float) -> None:
        """The checksums of its blocks from `first` on, which are final now. Nothing happens when it has ended."""
        self._expire(now_s)
        lease = self._held.get(lease_id)
        if lease is None:
            return
        if lease.sums is None or first != len(lease.sums) or first + len(sums) > len(lease.block_ids):
            raise InternalBug(f"lease {lease_id}: {len(sums)} checksums from block {first} of {len(lease.block_ids)}")
        lease.sums = (*lease.sums, *sums)

    def awaits_sums(self, lease_id: LeaseId, *, now_s: float) -> bool:
        """Every block is final, and the checksums of the last ones are still to come."""
        self._expire(now_s)
        lease = self._held.get(lease_id)
        if lease is None or lease.sums is None:
            return False
        return lease.watermark == lease.prompt_len and len(lease.sums) < len(lease.block_ids)

    def commit(
        self,
        lease_id: LeaseId,
        reader: ReaderId,
        blocks: int,
        first: int = 0,
        sums: Sequence[BlockSum] = (),
        *,
        proof: bytes | None = None,
        now_s: float,
    ) -> CommitAnswer:
        """OK: the lease was held until now and `reader` may use what it read.

        A repeat by the same reader is OK again, by anyone else GONE. A reader that has not read every block, or
        has read ahead of the watermark, is refused with GONE, and the lease stays as it was. `sums` are the checksums of
        what was read, blocks [first, blocks), in order; those before are the reader's own. Missing ones are not OK.
        """
        self._expire(now_s)
        lease = self._find(lease_id, proof)
        if lease is None:
            ended = self._ended.get(lease_id)
            again = ended is not None and ended.reader == reader and _proves(ended, proof)
            return CommitAnswer.OK if again else CommitAnswer.GONE
        if blocks != len(lease.block_ids) or lease.watermark != lease.prompt_len:
            return CommitAnswer.GONE
        differing = lease.differing(first, sums)
        if differing is None:
            return CommitAnswer.GONE
        if differing:
            return CommitAnswer.CORRUPT
        lease.reader = reader
        self._end(lease, LeaseEvent.COMMIT)
        return CommitAnswer.OK

    def release(self, lease_id: LeaseId, proof: bytes | None = None, *, now_s: float) -> None:
        """End a lease that nobody will read any more. Fine in every state, and for an unknown id."""
        self._expire(now_s)
        lease = self._find(lease_id, proof)
        if lease is not None:
            self._end(lease, LeaseEvent.RELEASE)

    def release_all_over(self, block_ids: Sequence[BlockId], *, now_s: float) -> None:
        """End every lease over one of these blocks: they do not hold what was computed."""
        self._expire(now_s)
        spoilt = set(block_ids)
        for lease in [lease for lease in self._held.values() if not spoilt.isdisjoint(lease.block_ids)]:
            self._end(lease, LeaseEvent.RELEASE)

    def held(self, lease_id: LeaseId) -> Lease | None:
        """The lease as it stands now, whether or not it is due. The caller must not change it."""
        return self._held.get(lease_id)

    def expire_due(self, *, now_s: float) -> None:
        self._expire(now_s)

    def take_returned(self) -> list[Lease]:
        """Leases that left HELD since the last call; the caller drops their block references, once."""
        returned, self._returned = self._returned, []
        return returned

    @property
    def num_held(self) -> int:
        return len(self._held)

    def check_invariants(self) -> None:
        for lease in self._held.values():
            assert lease.state is LeaseState.HELD
            assert lease.reader is None
            assert 0 <= lease.watermark <= lease.prompt_len
            assert lease.expires_s >= self._earliest_s
            assert lease.sums is None or len(lease.sums) <= len(lease.block_ids)
        for lease in self._ended.values():
            assert lease.state is not LeaseState.HELD
            assert (lease.reader is not None) == (lease.state is LeaseState.COMMITTED)
        assert not self._held.keys() & self._ended.keys()
        assert len(self._ended) <= MAX_TOMBSTONES

    def _find(self, lease_id: LeaseId, proof: bytes | None) -> Lease | None:
        """A held lease whose ticket the caller has."""
        lease = self._held.get(lease_id)
        return lease if lease is not None and _proves(lease, proof) else None

    def _view(self, lease: Lease) -> LeaseView:
        return LeaseView(lease.lease_id, True, lease.watermark, lease.first_token)

    def _expire(self, now_s: float) -> None:
        if now_s < self._earliest_s:
            return
        for lease in [lease for lease in self._held.values() if now_s >= lease.expires_s]:
            self._end(lease, LeaseEvent.EXPIRE)
        self._earliest_s = min((lease.expires_s for lease in self._held.values()), default=math.inf)

    def _end(self, lease: Lease, event: LeaseEvent) -> None:
        lease.move(event)
        del self._held[lease.lease_id]
        lease.sums = None  # those of thousands of long prompts are hundreds of MiB
        self._ended[lease.lease_id] = lease
        while len(self._ended) > MAX_TOMBSTONES:
            self._ended.popitem(last=False)
        self._returned.append(lease)


def _proves(lease: Lease, proof: bytes | None) -> bool:
    return proof is None or (lease.proof is not None and compare_digest(lease.proof, proof))
