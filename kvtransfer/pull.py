"""One handoff on the decode worker: it reads the blocks of finished chunks while prefill computes the next, then commits.

    prefill  | chunk 0 | chunk 1 | chunk 2 |  token 0 known
    reads              | 0 |     | 1 |     | 2 |--- Commit --->|   OK: the blocks are the sequence's
                                           |<--- exposed_s --->|   anything else: discard them

This is the shell of `pdserve.core.reader`, which decides which blocks to read, and when to commit. The KV that was read may
be used only after `run` has returned. After `run` has raised, reads may still write into the local blocks: they stay out of
use until `stopped` is done.

Each KV group has its own regions and its own source. `read_groups` reads the same blocks of a prompt in several groups as one
read. It succeeds when every group has arrived, and fails when the first group fails. After a failure the other groups are
given up, but they may go on writing until they stop by themselves. The read has stopped when all groups have stopped. A single
group has no joined read: the read of its source is returned.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtransfer.api import AnyRegion
from kvtransfer.lease_client import FollowedLease
from kvtransfer.thread import BlockRead, BlockSource, ReadResult
from kvtransfer.ticket import Ticket
from pdserve.config import LeaseConfig
from pdserve.core.errors import DeadlineExceeded, InternalBug, KvCorrupt, KvRotted, PdserveError, TransferFailed
from pdserve.core.ids import NULL_BLOCK, NULL_SUM, BlockSum, Incarnation, ReaderId
from pdserve.core.lease import FirstToken
from pdserve.core.reader import Discard, Effect, PostRead, Reader, ReaderState, Reusable, SendCommit


class PrefillStalled(TransferFailed):
    """A lender answers, but made no progress with a prompt for too long. This says nothing about the path of its KV."""


@dataclass(frozen=True, slots=True)
class PullResult:
    """The result of one pull: the prompt has `blocks` blocks, and `reads` reads copied `kv_bytes` bytes of them. Blocks that
    were prefix hits are in `blocks` only.

    transfer_s: from the post of the first read to the end of the last; most of it passes while prefill computes.
    commit_s: from the end of the last read to the answer to Commit. exposed_s: from token 0 until the KV is usable.
    exposed_bytes: the bytes that had not been read when token 0 was known.
    """

    first_token: FirstToken
    blocks: int
    kv_bytes: int
    reads: int
    transfer_s: float
    commit_s: float
    exposed_s: float
    exposed_bytes: int


@dataclass(slots=True)
class _Times:
    """The times of one pull on the loop's clock, in seconds; 0 until the event happens."""

    grown_s: float = 0.0
    """The last growth of the watermark, or the start."""
    posted_s: float = 0.0
    read_s: float = 0.0
    prefilled_s: float = 0.0
    usable_s: float = 0.0
    exposed_bytes: int = 0


class Pull:
    """One pull, which runs once. The caller owns `lease` and closes it. `local_tables` are reserved for the whole prompt."""

    def __init__(
        self,
        lease: FollowedLease,
        ticket: Ticket,
        local_tables: Sequence[Sequence[int]],
        reader_id: ReaderId,
        sources: Sequence[BlockSource],
        config: LeaseConfig,
        *,
        first_block: int = 0,
    ) -> None:
        """Prepare a pull into local_tables[g] by sources[g], for each KV group g of the ticket.

        Blocks before `first_block` are this worker's own prefix hits, which are committed but not read. Null entries of the
        tables are never read: no group has a block there that is live after the prompt.
        """
        wanted, counts = list(map(_shape, ticket.block_tables)), list(map(_shape, local_tables))
        if counts != wanted or len(sources) != len(wanted):
            raise InternalBug(f"blocks {wanted} cannot be pulled into {counts} by {len(sources)} sources")
        self._lease = lease
        self._ticket = ticket
        self._local_tables = local_tables
        self._reader_id = reader_id
        self._sources = sources
        self._config = config
        first = max(first_block, min([dead for _, dead in wanted]))
        self._reader = Reader(lease.lease_id, ticket.prompt_len, ticket.kv_spec.block_size, first)
        self._posts: dict[int, PostRead] = {}
        """The blocks of each of `_reads`."""
        self._reads: dict[int, BlockRead] = {}
        """The reads that the reader counts as in flight, by the reader's numbers."""
        self._read_bytes = 0
        self._to_commit: SendCommit | None = None
        self._times = _Times()
        self._reusable: asyncio.Future[None] | None = None

    @property
    def read_in_flight(self) -> bool:
        """True when a read may still write into the local blocks."""
        return any(not read.is_stopped for read in self._reads.values())

    @property
    def stopped(self) -> asyncio.Future[None] | None:
        """A future for the time after `run` has raised. It is done once no read can write into the local blocks. None: none can
        already."""
        if self._reusable is None or self._reusable.done():
            return None
        return asyncio.shield(self._reusable)

    async def run(self, *, wait_s: float) -> PullResult:
        """Read all blocks and commit. `wait_s` bounds the wait for token 0, and the setting `stalled_s` bounds each wait for
        the next chunk, so that renewals cannot hold a lease for ever. Reads and Commit have their own bounds.

        Raises `LeaseGone`, `TransferFailed`, `KvCorrupt`, `KvRotted`, `ReplicaLost`, `DeadlineExceeded` or `IncompatiblePeer`:
        the caller must then discard the blocks, and wait for `stopped`.
        """
        try:
            await self._read_all(wait_s)
            await self._commit()
        except BaseException:
            self._abandon()
            raise
        return self._pulled()

    async def _read_all(self, wait_s: float) -> None:
        """Return once every block is here and no read is in flight, so that Commit is allowed."""
        started_s = self._times.grown_s = self._now_s()
        while True:
            changed = self._lease.changed
            self._take_reads()
            self._take_lease()
            if self._reader.state is not ReaderState.PULLING:
                return
            patience_s = self._patience_s(started_s, wait_s)
            awaited: list[asyncio.Future[Any]] = [changed, *(read.result for read in self._reads.values())]
            await asyncio.wait(awaited, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)

    def _patience_s(self, started_s: float, wait_s: float) -> float | None:
        """Return the seconds that the watermark may still stay where it is. None: it covers the prompt.

        Raises `DeadlineExceeded` or `PrefillStalled`. The lender is alive then: if it were silent, the link would have failed
        the lease.
        """
        if self._lease.first_token is not None:
            return None
        now_s, stalled_s = self._now_s(), self._config.stalled_s
        came = f"lease {self._lease.lease_id}: {self._lease.watermark} of {self._lease.prompt_len} tokens"
        if now_s >= started_s + wait_s:
            raise DeadlineExceeded(f"{came} after {wait_s:.1f} s")
        if now_s >= self._times.grown_s + stalled_s:
            raise PrefillStalled(f"{came}, no progress for {stalled_s:.1f} s")
        return min(started_s + wait_s, self._times.grown_s + stalled_s) - now_s

    def _take_reads(self) -> None:
        """Take the reads that have ended. Raises the error of the first failed one."""
        for number, read in list(self._reads.items()):
            if not read.result.done():
                continue
            if (error := read.result.exception()) is not None:
                self._perform(self._reader.read_failed(number))
                raise error
            del self._reads[number]
            self._times.read_s = self._now_s()
            post, sums = self._posts.pop(number), read.result.result().sums
            self._read_bytes += self._ticket.bytes_from(post.first, post.first + post.count)
            self._perform(self._reader.read_done(number, self._with_dead(post, sums) if sums else ()))

    def _take_lease(self) -> None:
        """Take the lease's new state. Raises the lease's error."""
        lease, reader, times = self._lease, self._reader, self._times
        if lease.error is not None:
            self._perform(reader.lease_gone())
            raise lease.error
        if lease.watermark > reader.watermark:
            times.grown_s = self._now_s()
            if lease.first_token is not None:
                times.prefilled_s = times.grown_s
                times.exposed_bytes = self._ticket.bytes_from(reader.first_block) - self._read_bytes
            self._perform(reader.advanced(lease.lease_id, lease.watermark))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case PostRead():
                    self._post(effect)
                case SendCommit():
                    self._to_commit = effect  # `run` goes on to it
                case Discard():
                    if effect.in_flight:
                        self._reusable = asyncio.get_running_loop().create_future()
                case Reusable():
                    assert self._reusable is not None
                    self._reusable.set_result(None)

    def _post(self, post: PostRead) -> None:
        ticket, blocks = self._ticket, slice(post.first, post.first + post.count)
        nbytes = ticket.bytes_from(blocks.start, blocks.stop)
        remote, local = _live(ticket.block_tables, blocks), _live(self._local_tables, blocks)
        groups = [group for group, table in enumerate(remote) if table]
        if post.read == 1:
            self._times.posted_s = self._now_s()
        try:
            self._reads[post.read] = read_groups(
                [self._sources[group] for group in groups],
                ticket.incarnation,
                [ticket.regions[group] for group in groups],
                [remote[group] for group in groups],
                [local[group] for group in groups],
                deadline_s=max(source.deadline_s(ticket.incarnation, nbytes, self._config) for source in self._sources),
            )
        except PdserveError:  # nothing was posted
            self._perform(self._reader.read_failed(post.read))
            self._perform(self._reader.read_stopped(post.read))
            raise
        self._posts[post.read] = post

    def _with_dead(self, post: PostRead, sums: Sequence[Sequence[BlockSum]]) -> list[list[BlockSum]]:
        """Return the checksums of each group's blocks of a read, with `NULL_SUM` for dead ones. `sums` lists the groups that
        were read."""
        found = iter(sums)
        parts = [table[post.first : post.first + post.count] for table in self._local_tables]
        dead = [part.count(NULL_BLOCK) for part in parts]
        return [[NULL_SUM] * n + (list(next(found, ())) if n < post.count else []) for n in dead]

    async def _commit(self) -> None:
        assert self._to_commit is not None
        try:
            await self._lease.commit(self._reader_id, self._to_commit)
        except (KvCorrupt, KvRotted):
            self._perform(self._reader.commit_corrupt())
            raise
        except PdserveError:
            self._perform(self._reader.commit_answered(ok=False))
            raise
        self._perform(self._reader.commit_answered(ok=True))
        self._times.usable_s = self._now_s()

    def _abandon(self) -> None:
        """End the reader after `run` has failed or was cancelled. Each read in flight calls `_on_stopped` when it stops."""
        self._perform(self._reader.abort())
        for number, read in list(self._reads.items()):
            if read.is_stopped:
                self._on_stopped(number)
            else:
                read.give_up()
                read.stopped.add_done_callback(functools.partial(self._on_stopped, number))

    def _on_stopped(self, number: int, _: object = None) -> None:
        del self._reads[number]
        self._perform(self._reader.read_stopped(number))

    def _pulled(self) -> PullResult:
        reader, times = self._reader, self._times
        assert reader.state is ReaderState.COMMITTED
        assert self._lease.first_token is not None
        reader.check_invariants()
        return PullResult(
            first_token=self._lease.first_token,
            blocks=reader.total_blocks,
            kv_bytes=self._read_bytes,
            reads=reader.reads,
            transfer_s=times.read_s - times.posted_s,
            commit_s=times.usable_s - times.read_s,
            exposed_s=times.usable_s - times.prefilled_s,
            exposed_bytes=times.exposed_bytes,
        )

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def _shape(table: Sequence[int]) -> tuple[int, int]:
    """Return the number of entries of a block table, and how many of them are null."""
    return len(table), list(table).count(NULL_BLOCK)


def _live(tables: Sequence[Sequence[int]], blocks: slice) -> list[list[int]]:
    """Return the entries of each table in the slice, without null ones."""
    return [[block for block in table[blocks] if block != NULL_BLOCK] for table in tables]


Post = Callable[[], BlockRead]
"""A function that starts the read of one group. If it raises, nothing was posted."""


def read_groups(
    sources: Sequence[BlockSource],
    peer: Incarnation,
    regions: Sequence[AnyRegion],
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
