"""The reader machine: it follows how far one bind has copied one lease's blocks into its own blocks.

```
PULLING  --watermark grows: read the blocks it covers--> PULLING
         --every block read, none in flight-----------> COMMITTING  --OK-->  COMMITTED     the blocks are the sequence's
any of both --GONE, failed read, abort, no answer-----> ABANDONED                          the blocks are nobody's,
                                                        and quarantined until every read has stopped
```
A decode worker's loop thread owns one machine for each bind. The machine is pure: each method is an event and returns the
effects that the caller must perform. Three rules are kept here and nowhere else. A block is read only when the watermark of
this lease covers all its tokens. Commit is sent once every block has arrived and no read of this bind can still write. The
KV that was read is used only after OK.

If checksums are on, each read returns the checksums of the blocks that it copied, taken from the KV as it arrived. Commit
carries the checksums of all reads, and none of this worker's own prefix hits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Final

from pdserve.core.errors import IllegalTransition
from pdserve.core.ids import BlockSum, LeaseId

MAX_READS_IN_FLIGHT: Final = 2
"""One bind has at most two reads in flight: one read moves bytes, and one read waits behind it. Blocks that become final in
this time go together into the next read."""


class ReaderState(Enum):
    """The state of one reader. COMMITTED and ABANDONED are final."""

    PULLING = "pulling"
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABANDONED = "abandoned"


class ReaderEvent(Enum):
    """The events of one reader."""

    ADVANCED = "advanced"
    READ_DONE = "read_done"
    READ_FAILED = "read_failed"
    """A read has failed or has passed its deadline. It may still write."""
    READ_STOPPED = "read_stopped"
    """A failed read will never write again."""
    ALL_READ = "all_read"
    """The reader itself finds that the prompt is final, every block is here and no read of this bind is in flight."""
    COMMIT_OK = "commit_ok"
    LEASE_GONE = "lease_gone"
    """The lease is gone: a pushed state or the answer to Commit says so, or Commit got no answer."""
    COMMIT_CORRUPT = "commit_corrupt"
    """The answer to Commit says that the KV that was read is not the KV that prefill wrote."""
    ABORT = "abort"


_S, _E = ReaderState, ReaderEvent

TRANSITIONS: Final[dict[tuple[ReaderState, ReaderEvent], ReaderState]] = {
    (_S.PULLING, _E.ADVANCED): _S.PULLING,
    (_S.PULLING, _E.READ_DONE): _S.PULLING,
    (_S.PULLING, _E.ALL_READ): _S.COMMITTING,  # Commit is sent
    (_S.PULLING, _E.READ_FAILED): _S.ABANDONED,
    (_S.PULLING, _E.LEASE_GONE): _S.ABANDONED,
    (_S.PULLING, _E.ABORT): _S.ABANDONED,
    (_S.COMMITTING, _E.ADVANCED): _S.COMMITTING,  # it came late, or a Renew repeated it
    (_S.COMMITTING, _E.COMMIT_OK): _S.COMMITTED,
    (_S.COMMITTING, _E.LEASE_GONE): _S.ABANDONED,
    (_S.COMMITTING, _E.COMMIT_CORRUPT): _S.ABANDONED,
    (_S.COMMITTING, _E.ABORT): _S.ABANDONED,
    # Final states ignore events that were under way. The answer to Commit comes once, so none comes after OK.
    **{(_S.COMMITTED, e): _S.COMMITTED for e in (_E.ADVANCED, _E.LEASE_GONE, _E.ABORT)},
    **{(_S.ABANDONED, e): _S.ABANDONED for e in (_E.ADVANCED, _E.READ_DONE, _E.READ_FAILED, _E.READ_STOPPED)},
    **{(_S.ABANDONED, e): _S.ABANDONED for e in (_E.COMMIT_OK, _E.LEASE_GONE, _E.COMMIT_CORRUPT, _E.ABORT)},
}

TERMINAL: Final = (_S.COMMITTED, _S.ABANDONED)


@dataclass(frozen=True, slots=True)
class PostRead:
    """Effect: start read number `read`, which copies the lease's blocks [first, first + count) of every KV group. Blocks are
    counted along the prompt."""

    read: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Effect: send Commit for `blocks` blocks. `sums` has the checksums of blocks
    [first, blocks) for each KV group; empty: checksums are off, or nothing was read."""

    blocks: int
    first: int = 0
    sums: tuple[tuple[BlockSum, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Discard:
    """Effect: discard the blocks. `in_flight` reads may still write into them; `Reusable` follows if there are any."""

    in_flight: int


@dataclass(frozen=True, slots=True)
class Reusable:
    """Effect: use the discarded blocks again, because no read of this bind writes any more."""


Effect = PostRead | SendCommit | Discard | Reusable


@dataclass(slots=True)
class Reader:
    """The reader of one bind. The blocks before `first_block` are this worker's own prefix hits, which are not read.

    ```
    0        first_block         posted            readable           total_blocks
    |  ours      |  read or in flight |  not asked yet  |  not final yet  |
    ```
    """

    lease_id: LeaseId
    prompt_len: int
    block_size: int
    first_block: int = 0
    state: ReaderState = ReaderState.PULLING
    watermark: int = 0
    posted: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)
    """The number of blocks of each read that has not stopped, by the read's number."""
    blocks_read: int = 0
    reads: int = 0
    sums: dict[int, tuple[tuple[BlockSum, ...], ...]] = field(default_factory=dict)
    """The checksums of the blocks that each finished read copied, for each KV group, by the read's number. Reads are numbered
    along the prompt."""
    history: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert 0 <= self.first_block <= self.total_blocks
        self.posted = self.first_block

    @property
    def total_blocks(self) -> int:
        """The number of blocks of the prompt; the last one may be partly filled."""
        return -(-self.prompt_len // self.block_size)

    @property
    def readable(self) -> int:
        """The number of leading blocks whose tokens are all final."""
        whole = self.watermark // self.block_size
        return self.total_blocks if self.watermark == self.prompt_len else whole

    @property
    def ended(self) -> bool:
        """True in a final state. Reads may still be in flight."""
        return self.state in TERMINAL

    def advanced(self, lease_id: LeaseId, watermark: int) -> list[Effect]:
        """Take a new watermark: prompt tokens [0, watermark) are final. Ignore a watermark that is older, is of another lease,
        or passes the end of the prompt."""
        if lease_id != self.lease_id or not self.watermark <= watermark <= self.prompt_len:
            return []
        self._move(_E.ADVANCED)
        self.watermark = watermark
        return self._next()

    def read_done(self, read: int, sums: Sequence[Sequence[BlockSum]] = ()) -> list[Effect]:
        """Note that a read has brought all its bytes and writes no more. `sums`: checksums of its blocks for each group."""
        self._move(_E.READ_DONE, read)
        self.sums[read] = tuple([tuple(group) for group in sums])
        self.blocks_read += self.in_flight.pop(read)
        return self._stopped() if self.ended else self._next()

    def read_failed(self, read: int) -> list[Effect]:
        """Abandon the bind, because a read has failed. `read_stopped` must follow once the read can write no more."""
        return self._abandon(_E.READ_FAILED, read)

    def read_stopped(self, read: int) -> list[Effect]:
        """Note that a read of an abandoned bind will never write again."""
        self._move(_E.READ_STOPPED, read)
        del self.in_flight[read]
        return self._stopped()

    def commit_answered(self, ok: bool) -> list[Effect]:
        """Take the answer to Commit. `ok` False: the lease is gone, or no try got an answer."""
        if not ok:
            return self._abandon(_E.LEASE_GONE)
        self._move(_E.COMMIT_OK)
        return []

    def commit_corrupt(self) -> list[Effect]:
        """Abandon the bind, because the lender's checksums differ."""
        return self._abandon(_E.COMMIT_CORRUPT)

    def lease_gone(self) -> list[Effect]:
        """Take a pushed GONE. Ignore it while our own Commit is under way, because that Commit may have ended the lease."""
        return [] if self.state is _S.COMMITTING else self._abandon(_E.LEASE_GONE)

    def abort(self) -> list[Effect]:
        """Abandon the bind, unless it is committed: its KV is no longer needed."""
        return self._abandon(_E.ABORT)

    def check_invariants(self) -> None:
        """Raises AssertionError when blocks and reads do not add up."""
        in_flight = sum(self.in_flight.values())
        assert self.first_block <= self.posted <= self.total_blocks
        assert self.posted <= max(self.readable, self.first_block), "a block was asked for before it was final"
        assert len(self.in_flight) <= MAX_READS_IN_FLIGHT
        assert self.blocks_read + in_flight <= self.posted - self.first_block
        if self.state is not _S.ABANDONED:
            assert self.blocks_read + in_flight == self.posted - self.first_block, "a block is neither here nor on its way"
        if self.state in (_S.COMMITTING, _S.COMMITTED):
            assert not self.in_flight, "a read of this bind can still write"
            assert self.watermark == self.prompt_len
            assert self.posted == self.total_blocks

    def _next(self) -> list[Effect]:
        if self.state is not _S.PULLING:
            return []
        effects: list[Effect] = []
        if self.posted < self.readable and len(self.in_flight) < MAX_READS_IN_FLIGHT:
            effects.append(self._post())
        if self.watermark == self.prompt_len and self.posted == self.total_blocks and not self.in_flight:
            self._move(_E.ALL_READ)
            effects.append(SendCommit(self.total_blocks, self.first_block, self._all_sums()))
        return effects

    def _all_sums(self) -> tuple[tuple[BlockSum, ...], ...]:
        """Return the checksums of all reads, in the order of the prompt, for each group."""
        reads = [self.sums[read] for read in sorted(self.sums)]
        return tuple([tuple(chain.from_iterable(of_group)) for of_group in zip(*reads, strict=True)])

    def _post(self) -> PostRead:
        """Put all blocks that are readable and not yet asked for into one read."""
        self.reads += 1
        post = PostRead(self.reads, self.posted, self.readable - self.posted)
        self.in_flight[post.read] = post.count
        self.posted = self.readable
        return post

    def _abandon(self, event: ReaderEvent, read: int | None = None) -> list[Effect]:
        before = self.state
        self._move(event, read)
        return [Discard(len(self.in_flight))] if before not in TERMINAL else []

    def _stopped(self) -> list[Effect]:
        return [Reusable()] if self.state is _S.ABANDONED and not self.in_flight else []

    def _move(self, event: ReaderEvent, read: int | None = None) -> None:
        """Change the state as the table says. Raises `IllegalTransition`, with nothing changed, when the table does not allow
        the event or when `read` is given and has stopped."""
        target = TRANSITIONS.get((self.state, event))
        if target is None or (read is not None and read not in self.in_flight):
            of_read = "" if read is None else f"({read})"
            raise IllegalTransition(
                f"reader of lease {self.lease_id}", self.state.name, f"{event.name}{of_read}", tuple(self.history)
            )
        if target is not self.state:
            self.history.append(f"{event.name}:{target.name}")
        self.state = target
