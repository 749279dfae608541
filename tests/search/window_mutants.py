"""The rules of blocks behind a sliding window (docs/design/0055), each switched off in the smallest way. See `mutants`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdserve.core.block_hash import BlockHash
from pdserve.core.block_pools import BlockPools, BlockTables, WindowPool
from pdserve.core.blocks import BlockPool, Holder, HolderKind
from tests.search.group_mutants import GROUPS
from tests.search.handoff import Handoff
from tests.search.mutants import DECODES, Mutant

# --- rule W1: a block is freed only when no later token of the sequence sees it


class FreesOneBlockTooEarly(BlockPool):
    def free_behind(self, holder: Holder, dead: int) -> bool:
        return super().free_behind(holder, min(dead + 1, len(self.blocks_of(holder))))


class FreedTooEarly(Handoff):
    pool_type = FreesOneBlockTooEarly


# --- rule W2: a sequence drops its own reference only, and the lease keeps what its reader needs


class FreesForAllHolders(BlockPool):
    def free_behind(self, holder: Holder, dead: int) -> bool:
        behind = self.blocks_of(holder)[:dead]
        freed = super().free_behind(holder, dead)
        for other in [other for other in self._blocks_of if other.kind is HolderKind.LEASE]:
            for block in set(behind) & set(self._live(other)):
                self._unreference([block], other)
                self._blocks_of[other].remove(block)
        return freed

    def check_invariants(self) -> None:
        """The references are wrong by intention."""


class FreedUnderALease(Handoff):
    pool_type = FreesForAllHolders


# --- rule W3: a hit needs the live blocks of every group


class HitsWithoutWindows(BlockPools):
    """The groups then take what they have, and compute into the rest as if it was here."""

    def _common(self, hashes: Sequence[BlockHash], arriving: int = 0) -> Sequence[BlockHash]:
        return hashes[: len(self.groups[0].lookup(hashes))]

    def check_invariants(self) -> None:
        for pool in self.groups:
            pool.check_invariants()


class HitsOfTheWholeGroup(Handoff):
    pools_type = HitsWithoutWindows
    decode_pools_type = HitsWithoutWindows


# --- rule W4: a ticket names what is live at the end of the prompt, and nothing that its sequence frees


class LendsOnlyFromTheNextBlock(BlockPools):
    """The lease has one live block too few, so its reader gets no KV for it."""

    def count_dead(self, computed: int) -> list[int]:
        dead = super().count_dead(computed)
        return [n + 1 if index in self._windows and computed else n for index, n in enumerate(dead)]


class LiveBlockLeftOut(Handoff):
    pools_type = LendsOnlyFromTheNextBlock
    decode_pools_type = LendsOnlyFromTheNextBlock


class LendsDeadBlocksUnheld(BlockPools):
    """The ticket also names blocks that will be dead, on which the lease has no references."""

    def share(self, owner: Holder, other: Holder, tokens: int) -> BlockTables:
        super().share(owner, other, tokens)
        return self.blocks_of(owner)


class ReservesDeadBlocks(BlockPools):
    def reserve(self, holder, count, hashes, *, arriving=0, prefill=None):  # type: ignore[no-untyped-def]
        return super().reserve(holder, count, hashes)


class DeadBlockInATicket(Handoff):
    pools_type = LendsDeadBlocksUnheld
    decode_pools_type = ReservesDeadBlocks


# --- rule W5: what a prompt was promised is taken by nobody else, so a prompt that has begun always goes on


class GivesPromisesAway(WindowPool):
    @property
    def num_allocatable(self) -> int:
        return super().num_allocatable + self._promised


class PromisedToTwo(Handoff):
    pool_type = GivesPromisesAway


WINDOW = replace(
    GROUPS, prefill_blocks=3, decode_blocks=(3,), more_blocks=(0, 0), windows=(None, 2), prompts=((1, 2, 3, 4, 5),)
)
SHARED = replace(
    WINDOW,
    prompts=((1, 2), (1, 2, 3, 4)),
    windows=(3,),
    more_blocks=(0,),
    prefill_blocks=2,
    max_binds=2,
    max_grants=2,
)
"""A lease over a block, and a longer prompt that shares the block and frees it behind its window."""
UNHELD = "that the lease does not hold"
TWO_PROMPTS = replace(WINDOW, prompts=((1, 2, 3), (4, 5, 6)), more_blocks=(1, 0), max_binds=2, max_grants=2)
"""Two prompts, and a group with a window whose pool has a block too few for both."""

WINDOW_MUTANTS = (
    Mutant("W1", FreedTooEarly, WINDOW, DECODES),
    Mutant("W2", FreedUnderALease, SHARED, UNHELD),
    Mutant("W3", HitsOfTheWholeGroup, replace(WINDOW, prompts=((1, 2, 3),), prefill_cached=True, decode_cached=True), DECODES),
    Mutant("W4", LiveBlockLeftOut, replace(WINDOW, prompts=((1, 2, 3),)), DECODES),
    Mutant("W4", DeadBlockInATicket, replace(WINDOW, prefill_cached=True), UNHELD),
    Mutant("W5", PromisedToTwo, TWO_PROMPTS, "is empty"),
)
