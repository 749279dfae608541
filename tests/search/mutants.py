"""The protocol with one of its rules switched off, each in the smallest way, for the same search to find out.

A mutant is the model with a production machine subclassed, or with the piece of glue that keeps the rule replaced.
Rule 9 is of two pools and stands in `deadlock`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.core.block_hash import BlockHash
from pdserve.core.block_pools import BlockPools
from pdserve.core.blocks import BlockPool, Holder, HolderKind, Reservation
from pdserve.core.ids import BlockSum, LeaseId, ReaderId
from pdserve.core.lease import CommitAnswer, LeaseState, LeaseTable, LeaseView
from pdserve.core.reader import Effect, PostRead, Reader, ReaderState, SendCommit
from tests.search import handoff_events as do
from tests.search.explorer import Step
from tests.search.handoff import Handoff
from tests.search.handoff_decode import with_decode
from tests.search.handoff_state import Bind, Computing, Config, Decode, Prefill, State

# --- rule 1: use only after OK for the lease that was read, and OK to one reader


class UseWhenRead(Handoff):
    """What was read is used as soon as the read has finished."""

    def commit_sent(self, s: State, worker: int, bind: Bind, *args: Any) -> State:
        return self.answered(s, worker, bind, CommitAnswer.OK.value)


class OkToAnyRepeat(LeaseTable):
    def commit(self, lease_id: LeaseId, reader: ReaderId, *args: Any, **kwargs: Any) -> CommitAnswer:
        ended = self._ended.get(lease_id)
        same = ended.reader if ended is not None and ended.reader is not None else reader
        return super().commit(lease_id, same, *args, **kwargs)


class CommitKeyedByLeaseOnly(Handoff):
    table_type = OkToAnyRepeat


class ReaderIdOfTheWorker(Handoff):
    """The reader's id names the worker and not the bind."""

    def reader_id(self, decode: Decode, bind: Bind) -> do.ReaderKey:
        return decode.incarnation, 0


# --- rule 2: a restarted worker has a past that it does not know, and nothing revives a lease


class SameIncarnationAfterRestart(Handoff):
    def incarnation(self, restarts: int) -> int:
        return 1


class RenewableAfterExpiry(LeaseTable):
    def renew(self, lease_id: LeaseId, proof: bytes | None = None, *, now_s: float) -> LeaseView:
        self._expire(now_s)
        lease = self._ended.get(lease_id)
        if lease is not None and lease.state is LeaseState.EXPIRED:
            lease.state = LeaseState.HELD
            self._held[lease_id] = self._ended.pop(lease_id)
            self._earliest_s = now_s
            lease.expires_s = now_s + self.ttl_s
        return super().renew(lease_id, proof, now_s=now_s)


class RenewRevives(Handoff):
    table_type = RenewableAfterExpiry


class ExpiresWhenNoticed(LeaseTable):
    def commit(self, *args: Any, now_s: float, **kwargs: Any) -> CommitAnswer:
        return super().commit(*args, now_s=now_s - 100, **kwargs)


class FreedBeforeExpiryIsApplied(Handoff):
    """The owner frees what is due, and the table applies the expiry only when its timer runs, not before each event."""

    table_type = ExpiresWhenNoticed

    def time_events(self, s: State) -> Iterator[Step]:
        for step in super().time_events(s):
            prefill = step.state.prefill
            for _, number, due in self.machines.ask(prefill.table, do.held_leases):
                if due:
                    prefill = self.ended(prefill, (number,))
            yield step._replace(state=step.state._replace(prefill=prefill))


# --- rule 3: a watermark is of one lease


class AnyLeasesWatermark(Reader):
    def advanced(self, lease_id: LeaseId, watermark: int) -> list[Effect]:
        return super().advanced(self.lease_id, watermark)


class WatermarkOfAnotherLease(Handoff):
    reader_type = AnyLeasesWatermark


# --- rule 4: collected before counted, collected before freed


class CountedWhenLaunched(Handoff):
    def launch(self, s: State, sequence: Computing) -> State:
        s = super().launch(s, sequence)
        ahead = sequence._replace(computed=sequence.computed + 1)
        return self.pushed(s._replace(prefill=self.advanced(s.prefill, ahead)), ahead)


class FreedBeforeCollected(Handoff):
    def local_aborted(self, decode: Decode) -> Decode:
        pool, _ = self.machines.apply(decode.pool, do.drop, do.LOCAL)
        return self.cleared(super().local_aborted(decode)._replace(pool=pool))


# --- rule 5: the lease has references of its own on every block, and ends before they go


class LeasesSkipHits(BlockPool):
    def share(self, owner: Holder, other: Holder, *, dead: int = 0) -> tuple[int, ...]:  # type: ignore[override]
        shared = super().share(owner, other, dead=dead)
        for block_id in [b for b in shared if b in self._hash_of]:
            self._holders[block_id].remove(other)
            self._blocks_of[other].remove(block_id)
        return shared


class HitsOutsideTheLease(Handoff):
    pool_type = LeasesSkipHits


class FreedBeforeTheLeaseEnds(Handoff):
    """An abort on prefill frees the blocks, and the lease ends when somebody gets round to it."""

    def release(self, prefill: Prefill, lease: do.LeaseKey, number: int) -> Prefill:
        if not self.machines.ask(prefill.pool, _holds, number):
            return super().release(prefill, lease, number)
        return self.ended(prefill, (do.SeqId(number),))


def _holds(pools: BlockPools, number: int) -> bool:
    return any(pools.blocks_of(do.lease_of(number)))


# --- rule 6: only full, collected, owned blocks are shared; on decode only after OK


class PublishedWhenLaunched(Handoff):
    def launch(self, s: State, sequence: Computing) -> State:
        s = super().launch(s, sequence)
        return s._replace(prefill=self.published(s.prefill, sequence, sequence.computed))


class AnyonePublishes(BlockPool):
    def publish(self, holder: Holder, position: int, block_hash: BlockHash) -> None:
        if holder.kind is HolderKind.SEQUENCE:
            super().publish(holder, position, block_hash)
        elif block_hash not in self._block_with:
            block_id = self._blocks_of[holder][position]
            self._hash_of[block_id] = block_hash
            self._block_with[block_hash] = block_id


class PublishedBeforeOk(Handoff):
    decode_pool_type = AnyonePublishes

    def commit_sent(self, s: State, worker: int, bind: Bind, *args: Any) -> State:
        decode = s.decodes[worker]
        for position, block_hash in enumerate(self.hashes[bind.request]):
            pool, _ = self.machines.apply(decode.pool, do.publish, do.inbound(bind.number), position, block_hash)
            decode = decode._replace(pool=pool)
        return super().commit_sent(with_decode(s, worker, decode), worker, bind, *args)


# --- rule 7: Commit when every read has resolved, and of every block


class ReadsAgain(Reader):
    """A read past its deadline is posted anew, and Commit is sent when the second has finished."""

    def read_failed(self, read: int) -> list[Effect]:
        count = self.in_flight.pop(read)
        self.reads += 1
        self.in_flight[self.reads] = count
        return [PostRead(self.reads, self.posted - count, count)]

    def read_done(self, read: int, sums: Sequence[Sequence[BlockSum]] = ()) -> list[Effect]:
        return super().read_done(read, sums) if read in self.in_flight else []

    def read_stopped(self, read: int) -> list[Effect]:
        return super().read_stopped(read) if read in self.in_flight else []


class CommitBesideATimedOutRead(Handoff):
    reader_type = ReadsAgain


class CommitsWhatIsThere(Reader):
    """Commit after the first read, whether or not it is the last."""

    def _next(self) -> list[Effect]:
        if self.state is ReaderState.PULLING and self.blocks_read and not self.in_flight:
            self.state = ReaderState.COMMITTING
            return [SendCommit(self.blocks_read)]
        return super()._next()

    def check_invariants(self) -> None:
        pass


class CommitsUnchecked(LeaseTable):
    def commit(self, lease_id: LeaseId, reader: ReaderId, blocks: int, *args: Any, **kwargs: Any) -> CommitAnswer:
        lease = self._held.get(lease_id)
        if lease is not None:
            lease.watermark = lease.prompt_len
            blocks = lease.num_blocks
        return super().commit(lease_id, reader, blocks, *args, **kwargs)


class CommitOfSomeBlocks(Handoff):
    reader_type = CommitsWhatIsThere
    table_type = CommitsUnchecked


# --- rule 8: decode's own hits are referenced from bind on


class HitsUnreferenced(BlockPool):
    def reserve(self, holder: Holder, count: int, hashes: Sequence[BlockHash], *, dead: int = 0) -> Reservation | None:
        hits = self.lookup(hashes)
        fresh = self.allocate(holder, count - len(hits))
        return None if fresh is None else Reservation(hits + fresh, len(hits))


class DecodeHitsUnreferenced(Handoff):
    decode_pool_type = HitsUnreferenced


# --- the block machine


class FreedUnderARead(Handoff):
    """The blocks of an aborted bind are freed while a read may still write them."""

    def set_aside(self, decode: Decode, bind: Bind) -> Decode:
        pool, _ = self.machines.apply(decode.pool, do.drop, do.inbound(bind.number))
        return self.cleared(decode._replace(pool=pool))


# --- rule 10 and liveness


class NoCap(Handoff):
    """A bind waits for its first read for ever, and renews."""

    def overdue(self, bind: Bind) -> bool:
        return False

    def may_give_up(self, bind: Bind) -> bool:
        return False


class NeverExpires(LeaseTable):
    def _expire(self, now_s: float) -> None:
        pass


class LeasesForEver(Handoff):
    table_type = NeverExpires


class ReturnsGetLost(Handoff):
    """The blocks of an ended lease do not come back to the pool."""

    def ended(self, prefill: Prefill, numbers: do.Ended) -> Prefill:
        return prefill


@dataclass(frozen=True)
class Mutant:
    rule: int | str
    model: type[Handoff]
    config: Config
    found_as: str
    """What the counterexample must say: a mutant that fails for another reason shows nothing."""


DECODES, TWO_OK, ASTRAY = "decodes from", "two readers", "a read of bind"
FOUND = "can be found while a read writes it"
ONE = Config(decode_blocks=(2,), max_binds=1, max_grants=1)
AGAIN = Config(decode_blocks=(2,), max_binds=2, max_grants=2)

MUTANTS = (
    Mutant(1, UseWhenRead, ONE, DECODES),
    Mutant(1, CommitKeyedByLeaseOnly, Config(decode_blocks=(2, 2), max_grants=1, prefill_restarts=0), TWO_OK),
    Mutant(1, ReaderIdOfTheWorker, Config(decode_blocks=(2,), max_grants=1, prefill_restarts=0), DECODES),
    Mutant(2, SameIncarnationAfterRestart, AGAIN, DECODES),
    Mutant(2, RenewRevives, ONE, DECODES),
    Mutant(2, FreedBeforeExpiryIsApplied, ONE, DECODES),
    Mutant(3, WatermarkOfAnotherLease, AGAIN, DECODES),
    Mutant(4, CountedWhenLaunched, ONE, DECODES),
    Mutant(4, FreedBeforeCollected, Config(decode_blocks=(2,), max_binds=1, max_grants=1, local_steps=True), DECODES),
    Mutant(5, HitsOutsideTheLease, Config(decode_blocks=(2,), max_binds=1, max_grants=1, prefill_cached=True), DECODES),
    Mutant(5, FreedBeforeTheLeaseEnds, ONE, DECODES),
    Mutant(6, PublishedWhenLaunched, Config(prefill_blocks=3, decode_blocks=(2,), prefill_restarts=0), DECODES),
    Mutant(6, PublishedBeforeOk, Config(decode_blocks=(2,), prefill_restarts=0), FOUND),
    Mutant(7, CommitBesideATimedOutRead, ONE, ASTRAY),
    Mutant(7, CommitOfSomeBlocks, ONE, DECODES),
    Mutant(8, DecodeHitsUnreferenced, Config(decode_blocks=(2,), max_binds=1, max_grants=1, decode_cached=True), DECODES),
)
"""Rules 1 to 8, each switched off in every way that the design names."""

SLOW = (CommitKeyedByLeaseOnly, SameIncarnationAfterRestart, WatermarkOfAnotherLease, PublishedWhenLaunched)
"""Those whose counterexamples lie behind tens of thousands of states."""

BLOCK_MUTANT = Mutant(0, FreedUnderARead, ONE, ASTRAY)
STALLED = Config(decode_blocks=(2,), max_binds=2, max_grants=1, prefill_restarts=0, ttl=2, stalled=True, wait_cap=2)
"""For rule 10: the prefill engine computes nothing, and renewals come in time."""
