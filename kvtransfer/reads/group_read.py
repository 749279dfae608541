"""Reads of the same blocks of a prompt in several KV groups, as one read. Each group has its own regions and its own source.

The read succeeds when every group has arrived, and fails when the first group fails. After a failure the other groups are given
up, but they may go on writing until they stop by themselves. The read has stopped when all groups have stopped. A single group
has no joined read: the read of its source is returned.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence

from kvtransfer.api import RemoteRegion
from kvtransfer.reads.block_read import BlockRead, BlockSource, ReadResult
from pdserve.core.errors import PdserveError
from pdserve.core.ids import Incarnation

Post = Callable[[], BlockRead]
"""A function that starts the read of one group. If it raises, nothing was posted."""


def read_groups(
    sources: Sequence[BlockSource],
    peer: Incarnation,
    regions: Sequence[RemoteRegion],
    remote_tables: Sequence[Sequence[int]],
    local_tables: Sequence[Sequence[int]],
    *,
    deadline_s: float,
) -> BlockRead:
    """Start to read remote_tables[g][i] of regions[g] into local_tables[g][i] of the blocks of sources[g].

    If this raises, nothing was posted. It raises what the first group's source raises. The failure of a later group fails
    the result, because the groups before it are under way.
    """
    parts = zip(sources, regions, remote_tables, local_tables, strict=True)
    posts = [
        functools.partial(source.read, peer, region, remote, local, deadline_s=deadline_s)
        for source, region, remote, local in parts
    ]
    return posts[0]() if len(posts) == 1 else _join(posts)


def _join(posts: Sequence[Post]) -> BlockRead:
    reads = [posts[0]()]
    failure: PdserveError | None = None
    for post in posts[1:]:
        try:
            reads.append(post())
        except PdserveError as exc:
            failure = exc
            break
    joined = BlockRead(reads[0].peer, sum(read.nbytes for read in reads), asyncio.get_running_loop())
    give_up = functools.partial(_give_up, reads)
    joined.result.add_done_callback(give_up)
    for read in reads:
        read.result.add_done_callback(functools.partial(_on_result, joined))
        read.stopped.add_done_callback(functools.partial(_on_stopped, joined, reads))
    if failure is not None:
        joined.fail(failure)
    return joined


def _give_up(reads: Sequence[BlockRead], _: asyncio.Future[ReadResult]) -> None:
    for read in reads:
        read.give_up()


def _on_result(joined: BlockRead, result: asyncio.Future[ReadResult]) -> None:
    """Fail the joined read with the error of a group. A cancelled result comes from the joined read itself."""
    if not result.cancelled() and (error := result.exception()) is not None:
        assert isinstance(error, PdserveError)
        joined.fail(error)


def _on_stopped(joined: BlockRead, reads: Sequence[BlockRead], _: object) -> None:
    """Finish the joined read once every group has stopped. A group that has arrived has its result before it stops."""
    if not all(read.is_stopped for read in reads):
        return
    if not joined.result.done():
        results = [read.result.result() for read in reads]
        sums = tuple(of_group for result in results for of_group in result.sums)
        joined.succeed(max(result.duration_s for result in results), sums)
    joined.mark_stopped()
