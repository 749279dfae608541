"""The rules of checksums and tickets (docs/design/0013), each switched off in the smallest way. See `mutants`."""

from __future__ import annotations

from dataclasses import replace
from operator import add
from typing import Any

from pdserve.core.blocks import BlockPool, Holder
from pdserve.core.ids import BlockId, BlockSum, LeaseId, ReaderId
from pdserve.core.lease import CommitAnswer, GroupSums, Lease, LeaseEvent, LeaseTable
from tests.search import handoff_events as do
from tests.search.handoff import Handoff
from tests.search.handoff_decode import part, with_decode
from tests.search.handoff_state import GARBAGE, Bind, Computing, Config, Prefill, Read, State, Ticket
from tests.search.mutants import DECODES, Mutant

# --- rule C1: once a physical block, when it is final and its step has ended; it lives and ends with the block


class SummedWhenLent(Handoff):
    """A lease gets the checksums of what lies in its prefix hits now, not of what they were when they were final."""

    def inherited(self, pool: int, memory: tuple[int, ...], number: int, hits: int) -> do.Sums:
        hits = len(super().inherited(pool, memory, number, hits)[0])
        blocks = self.machines.ask(pool, do.addresses, self.machines.ask(pool, do.lent, number))
        return self.sums_of(memory, part(blocks, 0, hits))


class SummedBeforeItsStepHasEnded(Handoff):
    def sealed(self, prefill: Prefill, sequence: Computing, position: int, block_sums: tuple[BlockSum, ...]) -> Prefill:
        return super().sealed(prefill, sequence, position, (self.sum_of(GARBAGE),) * len(block_sums))


class SumsOutliveTheirContent(BlockPool):
    def _take(self) -> BlockId:
        kept = dict(self._sums)
        block_id = super()._take()
        self._sums = kept
        return block_id


class SumOfTheFormerContent(Handoff):
    pool_type = SumsOutliveTheirContent


# --- rule C2: the reader sums what it read, as sent, and nothing else; each Commit is compared, and missing is not OK


class SummedAsStored(Handoff):
    """After the conversion, not before."""

    def resolved(self, s: State, worker: int, bind: Bind, read: Read, method: str, *args: Any) -> State:
        if args:
            args = (self.sums_of(s.decodes[worker].memory, read.blocks),)
        return super().resolved(s, worker, bind, read, method, *args)


class SumsItsOwnHits(Handoff):
    """Commit also carries the checksums of the reader's own prefix hits, in the form in which it stores them."""

    def commit_sent(self, s: State, worker: int, bind: Bind, blocks: int, first: int, sums: do.Sums) -> State:
        own = self.sums_of(s.decodes[worker].memory, part(bind.blocks, 0, first))
        read = sums or ((),) * len(own)
        return super().commit_sent(s, worker, bind, blocks, 0, tuple(map(add, own, read)))


class MissingSumsPass(LeaseTable):
    def commit(
        self, lease_id: LeaseId, reader: ReaderId, blocks: int, first: int = 0, sums: GroupSums = (), **kwargs: Any
    ) -> CommitAnswer:
        lease = self._held.get(lease_id)
        if not sums and lease is not None and lease.sums is not None:
            sums = [group[first:] for group in lease.sums]
        return super().commit(lease_id, reader, blocks, first, sums, **kwargs)


class NobodySums(Handoff):
    table_type = MissingSumsPass

    def commit_sent(self, s: State, worker: int, bind: Bind, blocks: int, first: int, sums: do.Sums) -> State:
        return super().commit_sent(s, worker, bind, blocks, first, ())


class ComparesOnce(LeaseTable):
    """What one reader read is compared when it says so, apart from whether the lease is held; the next one is trusted."""

    def commit(
        self, lease_id: LeaseId, reader: ReaderId, blocks: int, first: int = 0, sums: GroupSums = (), **kwargs: Any
    ) -> CommitAnswer:
        answer = super().commit(lease_id, reader, blocks, first, sums, **kwargs)
        lease = self._held.get(lease_id)
        if answer is CommitAnswer.CORRUPT and lease is not None:
            lease.sums = None
        return answer


class ComparedApartFromHeld(Handoff):
    table_type = ComparesOnce


# --- rule C3: CORRUPT leaves the lease, the lender looks at what it holds, and rotted blocks are not found again


class CorruptEnds(LeaseTable):
    def commit(self, lease_id: LeaseId, *args: Any, **kwargs: Any) -> CommitAnswer:
        answer = super().commit(lease_id, *args, **kwargs)
        if answer is CommitAnswer.CORRUPT:
            self._move(self._held[lease_id], LeaseEvent.RELEASE)
        return answer


class CorruptEndsTheLease(Handoff):
    """Its blocks are gone before the lender can look at them, and the pair is blamed for what it cannot see."""

    table_type = CorruptEnds


class NeverWithdraws(BlockPool):
    def withdraw(self, holder: Holder, first: int) -> None:
        pass


class RotStaysFindable(Handoff):
    pool_type = NeverWithdraws


# --- rule C4: a ticket is of one lease and one prompt


class AnyPromptsTicket(Handoff):
    """Decode reads what it is told to, without asking whether it is of the prompt that was bound."""

    def accepts(self, bind: Bind, ticket: Ticket) -> bool:
        return True


class NoProof(LeaseTable):
    def _ask(self, lease_id: LeaseId, event: LeaseEvent, proof: bytes | None = None) -> Lease | None:
        return super()._ask(lease_id, event)

    def commit(self, *args: Any, proof: bytes | None = None, **kwargs: Any) -> CommitAnswer:
        return super().commit(*args, **kwargs)


class ChangedTicket(Handoff):
    table_type = NoProof


# --- rule C5: what is converted has a checksum of its own, or none


class KeepsTheSendersSum(Handoff):
    def activated(self, s: State, worker: int, number: int) -> State:
        s = super().activated(s, worker, number)
        decode = s.decodes[worker]
        bind = next(b for b in decode.binds if b.number == number)
        pool = decode.pool
        for position in range(bind.hits, self.totals[bind.request]):
            sums = tuple(self.sum_of(tags[position]) for tags in self.tags[bind.request])
            pool, _ = self.machines.apply(pool, do.seal, number, position, sums)
        return with_decode(s, worker, decode._replace(pool=pool))


CHECKED = Config(decode_blocks=(2,), max_binds=1, max_grants=1, prefill_restarts=0, checksums=True)
CONVERTED = replace(CHECKED, converted=True)
HOSTILE = Config(decode_blocks=(2,), max_binds=1, max_grants=1, prefill_restarts=0, hostile_tickets=True)
FALSE_ALARM = "a false alarm"

CHECKSUM_MUTANTS = (
    Mutant("C1", SummedWhenLent, replace(CHECKED, rots=1, prefill_cached=True), DECODES),
    Mutant("C1", SummedBeforeItsStepHasEnded, CHECKED, FALSE_ALARM),
    Mutant("C1", SumOfTheFormerContent, replace(CHECKED, prompts=((1, 2, 3), (4, 5, 6)), prefill_cached=True), "checksum"),
    Mutant("C2", SummedAsStored, CONVERTED, FALSE_ALARM),
    Mutant("C2", SumsItsOwnHits, replace(CONVERTED, decode_cached=True), FALSE_ALARM),
    Mutant("C2", NobodySums, replace(CHECKED, flips=1), DECODES),
    Mutant("C2", ComparedApartFromHeld, replace(CHECKED, flips=1), DECODES),
    Mutant("C3", CorruptEndsTheLease, replace(CHECKED, rots=1), "the pair is blamed"),
    Mutant("C3", RotStaysFindable, replace(CHECKED, rots=1), "can still be found"),
    Mutant("C4", AnyPromptsTicket, replace(HOSTILE, prompts=((1,), (2,)), max_binds=2, max_grants=2, retries=False), DECODES),
    Mutant("C4", ChangedTicket, HOSTILE, DECODES),
    Mutant("C5", KeepsTheSendersSum, CONVERTED, "not of the form"),
)
