"""Rules of blocks behind a sliding window, broken on purpose. See `mutants`. A third of the seeds have such a group."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.core.block_pools import BlockPools, WindowPool
from pdserve.core.blocks import BlockPool, Holder
from pdserve.core.kv_layout import KvGroup


def a_block_dies_before_its_last_reader(patch: pytest.MonkeyPatch) -> None:
    """Both workers agree, so only the tokens that are drawn show it."""
    real = KvGroup.first_live
    patch.setattr(KvGroup, "first_live", lambda self, computed: real(self, computed + self.block_size * (computed > 9)))


def a_hit_needs_no_window(patch: pytest.MonkeyPatch) -> None:
    """A prefix is here only if the groups with a window have its live blocks. Others are computed on as if they were here."""

    def common(self: BlockPools, hashes: Any, _: int) -> Any:
        return hashes[: len(self.groups[0].lookup(hashes))]

    patch.setattr(BlockPools, "_common", common)


def a_dead_block_is_in_a_ticket(patch: pytest.MonkeyPatch) -> None:
    """Its sequence frees it, so a reader could copy what belongs to somebody else."""
    real = BlockPools.share

    def share(self: BlockPools, owner: Holder, other: Holder, tokens: int) -> Any:
        real(self, owner, other, tokens)
        return self.blocks_of(owner)

    patch.setattr(BlockPools, "share", share)


def nothing_behind_the_window_is_freed_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """A sequence that has null entries keeps the others when it ends."""
    real = BlockPool.drop
    patch.setattr(BlockPool, "drop", lambda self, holder: None if self._dead.get(holder) else real(self, holder))


def promised_blocks_are_given_away(patch: pytest.MonkeyPatch) -> None:
    """The next chunk of a prompt that has begun finds no block."""
    patch.setattr(WindowPool, "num_allocatable", property(lambda self: len(self._free) + len(self._cached)))


def a_prompt_is_promised_too_little(patch: pytest.MonkeyPatch) -> None:
    """Others leave it no block for its next chunk."""
    patch.setattr(WindowPool, "_promise_for", lambda self, blocks: 0)


def a_prompt_is_admitted_without_its_bound(patch: pytest.MonkeyPatch) -> None:
    """More is promised than there is."""
    patch.setattr(WindowPool, "blocks_needed", lambda *_: 0)


def blocks_in_passing_are_shared_at_once(patch: pytest.MonkeyPatch) -> None:
    """A prompt counts on what it frees, and another sequence keeps it."""
    patch.setattr(WindowPool, "publish", BlockPool.publish)


WINDOW_MUTANTS = (
    a_block_dies_before_its_last_reader,
    a_hit_needs_no_window,
    a_dead_block_is_in_a_ticket,
    nothing_behind_the_window_is_freed_at_the_end,
    promised_blocks_are_given_away,
    a_prompt_is_promised_too_little,
    a_prompt_is_admitted_without_its_bound,
    blocks_in_passing_are_shared_at_once,
)
