"""The rules of drains and role flips, each switched off in the smallest way. See `mutants` and `handoff_flip`.

Rules that need a router or an operator stand in `membership`.
"""

from __future__ import annotations

from dataclasses import replace

from pdserve.core.block_pools import BlockPools
from pdserve.core.reader import ReaderState
from tests.search import handoff_events as do
from tests.search.handoff_flip import FlippingHandoff
from tests.search.handoff_state import Config, Decode, Phase, Prefill, State
from tests.search.mutants import DECODES, Mutant

ABANDONED = ReaderState.ABANDONED
OF_A_LIFE = "a read of an earlier life"

# --- rule F1: the pool is kept, and nothing is used again that an own read can still write


class PoolRebuiltUnderARead(FlippingHandoff):
    """The next life begins with a new pool, while a read of the last one still writes."""

    def decode_empty(self, decode: Decode) -> bool:
        return decode.step is None and not any(bind.active for bind in decode.binds)

    def kept(self, decode: Decode) -> tuple[int, tuple[int, ...]]:
        sizes = self.machines.ask(decode.pool, pool_sizes)
        pools = do.new_pools(self.pools_type, self.pool_type, sizes)
        return self.machines.add(pools), super().kept(decode)[1]


class QuarantineEndsWithTheLife(PoolRebuiltUnderARead):
    """The pool is kept, and the blocks of the last life's reads are free in the next one."""

    def decode_empty(self, decode: Decode) -> bool:
        """All that is left is abandoned."""
        quarantined = all(bind.reads and self.machines.ask(bind.reader, do.state_of) is ABANDONED for bind in decode.binds)
        return decode.step is None and quarantined

    def kept(self, decode: Decode) -> tuple[int, tuple[int, ...]]:
        pool, late = decode.pool, FlippingHandoff.kept(self, decode)[1]
        for bind in decode.binds:
            pool, _ = self.machines.apply(pool, do.end_quarantine, bind.number)
        return pool, late


# --- rule F2: a new incarnation and a new lease table


class PrefillKeepsItsIncarnation(FlippingHandoff):
    """Leases are numbered from 1 on again, under the same incarnation."""

    def next_incarnation(self, s: State, incarnation: int) -> int:
        return incarnation


class DecodeKeepsItsIncarnation(PrefillKeepsItsIncarnation):
    """Readers are numbered from 1 on again, under the same incarnation."""


class PrefillKeepsItsTable(FlippingHandoff):
    """The old table goes on answering for leases whose blocks went back with the old life."""

    def prefill_closed(self, prefill: Prefill) -> Prefill:
        for _, number, _ in self.machines.ask(prefill.table, do.held_leases):
            prefill = self.ended(prefill, (number,))
        return prefill

    def prefill_empty(self, prefill: Prefill) -> bool:
        return not prefill.sequences and prefill.step is None and self.machines.ask(prefill.pool, do.all_idle)

    def next_table(self, s: State, incarnation: int) -> int:
        return s.prefill.table


# --- rule F3: leases of the old life end through their table, before its blocks go back


class BlocksGoBackBeforeTheLease(FlippingHandoff):
    """The role is closed by freeing its blocks. Its leases would end with the life, but a Commit comes before that."""

    def prefill_closed(self, prefill: Prefill) -> Prefill:
        for _, number, _ in self.machines.ask(prefill.table, do.held_leases):
            prefill = self.ended(prefill, (number,))
        return prefill


class TableDroppedWithItsLeases(FlippingHandoff):
    """The old table is thrown away with the leases that it holds, so their references never go back."""

    def prefill_empty(self, prefill: Prefill) -> bool:
        return not prefill.sequences and prefill.step is None


# --- rule D3: empty means both directions of leases and own reads, and a draining worker takes nothing


class EmptyIgnoresOwnReads(FlippingHandoff):
    """The role that would end the quarantine is gone, so it never ends."""

    def decode_empty(self, decode: Decode) -> bool:
        return decode.step is None and not any(bind.active or bind.reader < 0 for bind in decode.binds)


class DrainingStillLends(FlippingHandoff):
    """A grant comes between the look at what is left and the new life."""

    def takes(self, phase: Phase) -> bool:
        return True


def pool_sizes(pools: BlockPools) -> tuple[int, ...]:
    return tuple(pool.num_blocks for pool in pools.groups)


ONE_BLOCK = Config(prompts=((1,),), prefill_blocks=1, decode_blocks=(1,), max_binds=1, max_grants=1, prefill_restarts=0)
BACK = replace(ONE_BLOCK, role_flips=1)
BACK_TWICE = replace(BACK, max_binds=2, max_grants=2)
LENDS = replace(BACK, flip_ways=("lends",))

FLIP_MUTANTS = (
    Mutant("F1", PoolRebuiltUnderARead, LENDS, OF_A_LIFE),
    Mutant("F1", QuarantineEndsWithTheLife, LENDS, OF_A_LIFE),
    Mutant("F2", PrefillKeepsItsIncarnation, BACK_TWICE, DECODES),
    Mutant("F2", DecodeKeepsItsIncarnation, replace(BACK_TWICE, max_grants=1), DECODES),
    Mutant("F2", PrefillKeepsItsTable, BACK, DECODES),
    Mutant("F3", BlocksGoBackBeforeTheLease, BACK, DECODES),
)
FLIP_LEAKS = (
    Mutant("F3", TableDroppedWithItsLeases, BACK, "quiescence"),
    Mutant("D3", EmptyIgnoresOwnReads, BACK, "quiescence"),
    Mutant("D3", DrainingStillLends, BACK, "quiescence"),
)
"""What these do wrong is held for ever."""
