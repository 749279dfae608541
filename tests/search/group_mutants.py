"""The rules of several KV groups (docs/design/0026), each switched off in the smallest way. See `mutants`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pdserve.core.block_hash import BlockHash
from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import LeaseId, ReaderId, SeqId
from pdserve.core.lease import CommitAnswer, GroupSums, LeaseTable
from tests.search import handoff_events as do
from tests.search.explorer import Step
from tests.search.handoff import Handoff
from tests.search.handoff_state import Bind, Config, State
from tests.search.mutants import ASTRAY, DECODES, Mutant

# --- rule G1: a prefix is here only if every group has it


class HitsOfTheFirstGroup(BlockPools):
    """The groups then disagree about a holder's hits. The search shall find the wrong KV that follows from it."""

    def _common(self, hashes: Sequence[BlockHash], arriving: int = 0) -> Sequence[BlockHash]:
        return hashes[: len(self.groups[0].lookup(hashes))]

    def check_invariants(self) -> None:
        for pool in self.groups:
            pool.check_invariants()


class PrefillHitsOfTheFirstGroup(Handoff):
    pools_type = HitsOfTheFirstGroup


class DecodeHitsOfTheFirstGroup(Handoff):
    decode_pools_type = HitsOfTheFirstGroup


# --- rule G2: a read is of all groups, and arrives when all have arrived


class ReadsTheFirstGroup(Handoff):
    def pairs(self, remote: do.Tables, local: do.Tables) -> tuple[tuple[int, int], ...]:
        return super().pairs(remote[:1], local[:1])


class ArrivesWithTheFirstGroup(Handoff):
    def read_events(self, s: State, worker: int, bind: Bind) -> Iterator[Step]:
        for read in bind.reads:
            if not set(read.blocks[0]) & {local for _, local in read.pairs}:
                yield Step(("done", "read", read.number, "of", bind.number), self.arrived(s, worker, bind, read), sure=True)
        yield from super().read_events(s, worker, bind)


# --- rule G3: Commit compares the checksums of all groups


class ComparesTheFirstGroup(LeaseTable):
    def commit(
        self, lease_id: LeaseId, reader: ReaderId, blocks: int, first: int = 0, sums: GroupSums = (), **kwargs: Any
    ) -> CommitAnswer:
        lease = self._held.get(lease_id)
        if lease is not None and lease.sums is not None:
            sums = (*sums[:1], *(group[first:] for group in lease.sums[1:]))
        return super().commit(lease_id, reader, blocks, first, sums, **kwargs)


class FirstGroupCompared(Handoff):
    table_type = ComparesTheFirstGroup


# --- rule G4: the blocks of all groups are set aside until the read of all has stopped


class QuarantinesTheFirstGroup(BlockPools):
    def quarantine(self, seq_id: SeqId) -> None:
        self.groups[0].quarantine(seq_id)
        for pool in self.groups[1:]:
            pool.drop(do.inbound(seq_id))

    def end_quarantine(self, seq_id: SeqId) -> None:
        self.groups[0].end_quarantine(seq_id)

    def check_invariants(self) -> None:
        for pool in self.groups:
            pool.check_invariants()


class OtherGroupsFreedUnderARead(Handoff):
    decode_pools_type = QuarantinesTheFirstGroup


GROUPS = Config(decode_blocks=(2,), more_blocks=(0, 1), max_binds=1, max_grants=1, prefill_restarts=0, retries=False)
BLOCK = replace(GROUPS, prompts=((1, 2),))

GROUP_MUTANTS = (
    Mutant("G1", PrefillHitsOfTheFirstGroup, replace(GROUPS, prefill_cached=True), DECODES),
    Mutant("G1", DecodeHitsOfTheFirstGroup, replace(GROUPS, decode_cached=True), DECODES),
    Mutant("G2", ReadsTheFirstGroup, BLOCK, DECODES),
    Mutant("G2", ArrivesWithTheFirstGroup, BLOCK, DECODES),
    Mutant("G3", FirstGroupCompared, replace(BLOCK, checksums=True, rots=1), DECODES),
    Mutant("G3", FirstGroupCompared, replace(BLOCK, checksums=True, flips=1), DECODES),
    Mutant("G4", OtherGroupsFreedUnderARead, BLOCK, ASTRAY),
)
