"""Rules of several KV groups, broken on purpose. See `mutants`. Half of the seeds have workers of two groups."""

from __future__ import annotations

from typing import Any

import pytest

from kvtransfer import pull
from kvtransfer.thread import BlockRead
from pdserve.core.block_pools import BlockPools
from pdserve.core.reader import Reader


def a_hit_of_the_first_group_is_a_hit(patch: pytest.MonkeyPatch) -> None:
    """A prefix is here only if every group has it."""
    patch.setattr(BlockPools, "_common", lambda self, hashes, _: hashes[: len(self.groups[0].lookup(hashes))])


def the_first_group_is_read_alone(patch: pytest.MonkeyPatch) -> None:
    real = pull.read_groups

    def read_groups(sources: Any, peer: Any, regions: Any, remote: Any, local: Any, *, deadline_s: float) -> BlockRead:
        return real(sources[:1], peer, regions[:1], remote[:1], local[:1], deadline_s=deadline_s)

    patch.setattr(pull, "read_groups", read_groups)


def the_first_group_is_summed_alone(patch: pytest.MonkeyPatch) -> None:
    real = Reader._all_sums
    patch.setattr(Reader, "_all_sums", lambda self: real(self)[:1])


def the_first_group_is_freed_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPools, "drop", lambda self, holder: self.groups[0].drop(holder))


def a_read_stops_with_its_first_group(patch: pytest.MonkeyPatch) -> None:
    """The blocks of an abandoned bind are used again only when every group's read has stopped."""
    real = pull._on_stopped

    def on_stopped(joined: BlockRead, reads: Any, future: Any) -> None:
        if joined.result.done():
            joined.mark_stopped()
        else:
            real(joined, reads, future)

    patch.setattr(pull, "_on_stopped", on_stopped)


GROUP_MUTANTS = (
    a_hit_of_the_first_group_is_a_hit,
    the_first_group_is_read_alone,
    the_first_group_is_summed_alone,
    the_first_group_is_freed_alone,
    a_read_stops_with_its_first_group,
)
