"""Production code broken on purpose, one rule at a time. Each mutant is a function that patches it in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from decode_worker.role import DecodeRole, InboundBlocks
from kvtransfer.lease_client import Committed, PeerLink
from kvtransfer.pull import Pull
from kvtransfer.staging import SlotPool, Staging
from kvtransfer.thread import BlockRead
from pdserve.core.blocks import BlockPool, Holder, HolderKind
from pdserve.core.lease import CommitAnswer, Lease, LeaseEvent, LeaseState, LeaseTable
from pdserve.core.reader import Reader, ReaderState, SendCommit
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.rpc.bundle import Incoming
from pdserve.worker.engine_thread import EngineWatch
from pdserve.worker.host import OutputStream
from prefill_worker.role import PrefillRole
from router.core.live_request import LiveRequest
from router.core.requests import Deadlines, Requests

Mutant = Callable[[pytest.MonkeyPatch], None]


def used_before_the_commit_is_answered(patch: pytest.MonkeyPatch) -> None:
    """Rule 1: what was read is used only after OK."""

    async def commit(self: Any) -> None:
        self._perform(self._reader.commit_answered(ok=True))
        self._times.usable_s = self._now_s()

    patch.setattr(Pull, "_commit", commit)


def gone_is_taken_for_ok(patch: pytest.MonkeyPatch) -> None:
    """Rule 1."""
    real = PeerLink.commit

    async def commit(self: Any, *args: Any) -> Committed:
        await real(self, *args)
        return Committed(CommitAnswer.OK)

    patch.setattr(PeerLink, "commit", commit)


def what_was_read_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Rule C2: OK only if the reader's checksums are the lender's."""
    patch.setattr(Lease, "differing", lambda self, first, sums: 0)


def missing_checksums_are_ok(patch: pytest.MonkeyPatch) -> None:
    """Rule C2."""
    succeed, differing = BlockRead.succeed, Lease.differing
    patch.setattr(BlockRead, "succeed", lambda self, duration_s, sums=(): succeed(self, duration_s))
    patch.setattr(Lease, "differing", lambda self, first, sums: differing(self, first, sums) if sums else 0)


def checksums_outlive_their_content(patch: pytest.MonkeyPatch) -> None:
    """Rule C1: a block that is taken for something else has none."""
    real = BlockPool._take

    def take(self: Any) -> Any:
        kept = dict(self._sums)
        block_id = real(self)
        self._sums = kept
        return block_id

    patch.setattr(BlockPool, "_take", take)


def blocks_are_read_ahead_of_the_watermark(patch: pytest.MonkeyPatch) -> None:
    """Rules 3 and 4: only blocks whose tokens are all final."""
    patch.setattr(Reader, "readable", property(lambda self: self.total_blocks if self.watermark else 0))
    patch.setattr(Reader, "check_invariants", lambda self: None)


def commit_is_sent_with_a_read_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Rule 7."""
    real = Reader._next

    def next_(self: Any) -> Any:
        effects = real(self)
        if self.state is ReaderState.PULLING and self.watermark == self.prompt_len and self.posted == self.total_blocks:
            self.state = ReaderState.COMMITTING
            effects.append(SendCommit(self.total_blocks))
        return effects

    patch.setattr(Reader, "_next", next_)
    patch.setattr(Reader, "check_invariants", lambda self: None)


def blocks_are_freed_under_a_read(patch: pytest.MonkeyPatch) -> None:
    """An aborted read's blocks are not quarantined."""
    patch.setattr(InboundBlocks, "read_in_flight", property(lambda self: False))


def a_staging_block_is_used_again_under_a_read(patch: pytest.MonkeyPatch) -> None:
    """A read past its deadline, or adrift, still writes there."""

    async def arrival(self: Any, read: Any, part: Any) -> None:
        await asyncio.wait([part.result])
        if (error := part.result.exception()) is not None:
            read.fail(error)

    patch.setattr(Staging, "_arrival", arrival)


def a_read_is_over_before_its_conversion(patch: pytest.MonkeyPatch) -> None:
    """Commit and the end of a quarantine do not wait for the converter."""
    real = Staging._convert

    async def convert(self: Any, *args: Any) -> None:
        self.spawn(real(self, *args))

    patch.setattr(Staging, "_convert", convert)


def staging_blocks_of_a_failed_read_are_lost(patch: pytest.MonkeyPatch) -> None:
    """An asker that leaves the line forgets that it was served."""
    patch.setattr(SlotPool, "leave", lambda self, peer, granted: None)


def quarantine_never_ends(patch: pytest.MonkeyPatch) -> None:
    async def end_inbound(self: Any, request: Any, inbound: Any, in_flight: bool, release: bool) -> None:
        await inbound.abandon(release=release)

    patch.setattr(DecodeRole, "_end_inbound", end_inbound)


def an_expired_lease_keeps_its_blocks(patch: pytest.MonkeyPatch) -> None:
    """Rule 2: references return exactly once."""
    real = LeaseTable._move

    def move(self: Any, lease: Any, event: LeaseEvent) -> CommitAnswer:
        answer = real(self, lease, event)
        if event is LeaseEvent.EXPIRE:
            self._returned.remove(lease)
        return answer

    patch.setattr(LeaseTable, "_move", move)


def a_renewal_revives_a_lease(patch: pytest.MonkeyPatch) -> None:
    """Rule 2: nothing revives a lease that left HELD."""
    real = LeaseTable.renew

    def renew(self: Any, lease_id: Any, *args: Any, now_s: float) -> Any:
        ended = self._ended.get(lease_id)
        if ended is not None and ended.state is not LeaseState.COMMITTED:
            del self._ended[lease_id]
            ended.state, ended.expires_s = LeaseState.HELD, now_s + self.ttl_s
            self._held[lease_id] = ended
            self._earliest_s = min(self._earliest_s, ended.expires_s)
        return real(self, lease_id, *args, now_s=now_s)

    patch.setattr(LeaseTable, "renew", renew)


def a_lease_ends_with_its_computation(patch: pytest.MonkeyPatch) -> None:
    """Rule 5: the lease's own references keep the blocks; here they go with the sequence's."""
    real = Scheduler._forget

    def forget(self: Any, seq: Any, *args: Any) -> None:
        real(self, seq, *args)
        self._pool.drop(Holder(HolderKind.LEASE, seq.seq_id))

    patch.setattr(Scheduler, "_forget", forget)


def a_release_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """The lease of a cancelled request is neither released nor expires."""
    patch.setattr(LeaseTable, "release", lambda self, lease_id, *, now_s: None)
    patch.setattr(LeaseTable, "_expire", lambda self, now_s: None)


def a_cancelled_grant_is_kept(patch: pytest.MonkeyPatch) -> None:
    """A lease that is granted to a request that has gone goes back at once."""
    real = PrefillRole._grant

    def grant(self: Any, lent: Any) -> None:
        if lent.seq_id in self._by_seq:
            real(self, lent)

    patch.setattr(PrefillRole, "_grant", grant)


def decode_is_not_told_of_a_cancellation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeRole, "_cancel", lambda self, handle: None)


def a_repeat_on_a_link_is_taken_for_new(patch: pytest.MonkeyPatch) -> None:
    def is_new(self: Any, number: int) -> bool:
        self._last = max(self._last, number)
        return True

    patch.setattr(Incoming, "is_new", is_new)


def a_gap_on_a_link_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def is_new(self: Any, number: int) -> bool:
        new = number > self._last
        self._last = max(self._last, number)
        return bool(new)

    patch.setattr(Incoming, "is_new", is_new)


def a_replay_tells_its_last_id_twice(patch: pytest.MonkeyPatch) -> None:
    real = LiveRequest.start_over

    def start_over(self: Any) -> None:
        real(self)
        self.resumed += self.resumed[-1:]

    patch.setattr(LiveRequest, "start_over", start_over)


def a_replay_begins_its_text_anew(patch: pytest.MonkeyPatch) -> None:
    real = OutputStream.__init__

    def init(self: Any, handle: Any, tokenizer: Any, prompt_ids: Any, params: Any, earlier: Any = (), **ends: Any) -> None:
        real(self, handle, tokenizer, prompt_ids, params, **ends)
        self._next_index = len(earlier)

    patch.setattr(OutputStream, "__init__", init)


def a_ledger_entry_is_not_returned(patch: pytest.MonkeyPatch) -> None:
    """Of a request that ends; one that only starts over gives its entry back."""
    real = Requests.withdraw

    def withdraw(self: Any, request: Any) -> None:
        entry = self.ledger._entries.get(request.request_id)
        real(self, request)
        if entry is not None and request.machine.terminal:
            self.ledger.take(request.request_id, entry.link, entry.tokens)

    patch.setattr(Requests, "withdraw", withdraw)


def deadlines_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Deadlines, "passed", lambda self, *, now_s: iter(()))


def a_hung_engine_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """Its loop beats, so nobody else can."""
    patch.setattr(EngineWatch, "look", lambda self, elapsed_s: False)


MUTANTS: tuple[Mutant, ...] = (
    used_before_the_commit_is_answered,
    gone_is_taken_for_ok,
    what_was_read_is_not_compared,
    missing_checksums_are_ok,
    checksums_outlive_their_content,
    blocks_are_read_ahead_of_the_watermark,
    commit_is_sent_with_a_read_in_flight,
    blocks_are_freed_under_a_read,
    a_staging_block_is_used_again_under_a_read,
    a_read_is_over_before_its_conversion,
    staging_blocks_of_a_failed_read_are_lost,
    quarantine_never_ends,
    an_expired_lease_keeps_its_blocks,
    a_renewal_revives_a_lease,
    a_lease_ends_with_its_computation,
    a_release_is_ignored,
    a_cancelled_grant_is_kept,
    decode_is_not_told_of_a_cancellation,
    a_repeat_on_a_link_is_taken_for_new,
    a_gap_on_a_link_is_ignored,
    a_replay_tells_its_last_id_twice,
    a_replay_begins_its_text_anew,
    a_ledger_entry_is_not_returned,
    deadlines_are_forgotten,
    a_hung_engine_is_not_noticed,
)
