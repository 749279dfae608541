"""The reader machine: how far one bind has come in copying one lease's blocks into blocks of its own.

```
PULLING  --watermark grows: read the blocks it covers--> PULLING
         --every block read, none in flight-----------> COMMITTING  --OK-->  COMMITTED     the blocks are the sequence's
any of both --GONE, failed read, abort, no answer-----> ABANDONED                          the blocks are nobody's,
                                                        and quarantined until every read has stopped
```
Owner: a decode worker's loop thread, one machine a bind. Pure: each method is an event and returns what is to be done.
Three rules are kept here and nowhere else. A block is read only when the watermark of this very lease covers all its
tokens. Commit is sent once every block is there and no read of this bind can still write. What was read is used only
after OK.

Where checksums are on, each read brings those of the blocks that it copied, and Commit carries all of them: of what was
read, as it was read, and never of this worker's own prefix hits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from pdserve.core.errors import IllegalTransition
from pdserve.core.ids import BlockSum, LeaseId

MAX_READS_IN_FLIGHT: Final = 2
"""Of one bind: one that moves bytes and one behind it. Blocks that become final meanwhile go together into the next."""


class ReaderState(Enum):
    PULLING = "pulling"
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABANDONED = "abandoned"


class ReaderEvent(Enum):
    ADVANCED = "advanced"
    READ_DONE = "read_done"
    READ_FAILED = "read_failed"
    """Its result is in: an error, or past its deadline. It may still write."""
    READ_STOPPED = "read_stopped"
    """A failed read will never write again."""
    ALL_READ = "all_read"
    """Our own conclusion: the prompt is final, every block is here and no read of this bind is in flight."""
    COMMIT_OK = "commit_ok"
    LEASE_GONE = "lease_gone"
    """Told by a view, by the answer to Commit, or concluded from no answer."""
    COMMIT_CORRUPT = "commit_corrupt"
    """The answer to Commit: what was read is not what prefill wrote."""
    ABORT = "abort"


_S, _E = ReaderState, ReaderEvent

TRANSITIONS: Final[dict[tuple[ReaderState, ReaderEvent], ReaderState]] = {
    (_S.PULLING, _E.ADVANCED): _S.PULLING,
    (_S.PULLING, _E.READ_DONE): _S.PULLING,
    (_S.PULLING, _E.ALL_READ): _S.COMMITTING,  # Commit is sent
    (_S.PULLING, _E.READ_FAILED): _S.ABANDONED,
    (_S.PULLING, _E.LEASE_GONE): _S.ABANDONED,
    (_S.PULLING, _E.ABORT): _S.ABANDONED,
    (_S.COMMITTING, _E.ADVANCED): _S.COMMITTING,  # late, or repeated by a Renew
    (_S.COMMITTING, _E.COMMIT_OK): _S.COMMITTED,
    (_S.COMMITTING, _E.LEASE_GONE): _S.ABANDONED,
    (_S.COMMITTING, _E.COMMIT_CORRUPT): _S.ABANDONED,
    (_S.COMMITTING, _E.ABORT): _S.ABANDONED,
    # The end absorbs what was under way; reads go on until they stop.
    **{(_S.COMMITTED, e): _S.COMMITTED for e in (_E.ADVANCED, _E.COMMIT_OK, _E.LEASE_GONE, _E.ABORT)},
    **{(_S.ABANDONED, e): _S.ABANDONED for e in _E if e is not _E.ALL_READ},
}

TERMINAL: Final = (_S.COMMITTED, _S.ABANDONED)


@dataclass(frozen=True, slots=True)
class PostRead:
    """Copy blocks [first, first + count) of the lease, counted along the prompt."""

    read: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class SendCommit:
    """`sums`: of blocks [first, blocks); empty where nothing is summed."""

    blocks: int
    first: int = 0
    sums: tuple[BlockSum, ...] = ()


@dataclass(frozen=True, slots=True)
class Discard:
    """The blocks are nobody's. `in_flight`: reads that may still write; `Reusable` follows when there were any."""

    in_flight: int


@dataclass(frozen=True, slots=True)
class Reusable:
    """No read of this bind writes any more: discarded blocks may be used again."""


Effect = PostRead | SendCommit | Discard | Reusable


@dataclass(slots=True)
class Reader:
    """`first_block`: blocks before it are this worker's own prefix hits and are not read.

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
    """Blocks of each read that has not stopped."""
    blocks_read: int = 0
    reads: int = 0
    sums: dict[int, tuple[BlockSum, ...]] = field(default_factory=dict)
    """What each finished read copied; reads count up along the prompt."""
    history: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert 0 <= self.first_block <= self.total_blocks
        self.posted = self.first_block

    @property
    def total_blocks(self) -> int:
        return -(-self.prompt_len // self.block_size)

    @property
    def readable(self) -> int:
        """Blocks whose tokens are all final."""
        whole = self.watermark // self.block_size
        return self.total_blocks if self.watermark == self.prompt_len else whole

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL

    def advanced(self, lease_id: LeaseId, watermark: int) -> list[Effect]:
        """Prompt tokens [0, watermark) of that lease are final. Another lease's, an older or an absurd one is ignored."""
        if lease_id != self.lease_id or not self.watermark <= watermark <= self.prompt_len:
            return []
        self._move(_E.ADVANCED)
        self.watermark = watermark
        return self._next()

    def read_done(self, read: int, sums: Sequence[BlockSum] = ()) -> list[Effect]:
        """All its bytes are here, and it writes no more. `sums`: of its blocks, in order."""
        self._move(_E.READ_DONE, read)
        self.sums[read] = tuple(sums)
        self.blocks_read += self.in_flight.pop(read)
        return self._stopped() if self.ended else self._next()

    def read_failed(self, read: int) -> list[Effect]:
        """`read_stopped` follows, at once when the transport says so."""
        return self._abandon(_E.READ_FAILED, read)

    def read_stopped(self, read: int) -> list[Effect]:
        self._move(_E.READ_STOPPED, read)
        del self.in_flight[read]
        return self._stopped()

    def commit_answered(self, ok: bool) -> list[Effect]:
        """False also stands for no answer within all tries."""
        if not ok:
            return self._abandon(_E.LEASE_GONE)
        self._move(_E.COMMIT_OK)
        return []

    def commit_corrupt(self) -> list[Effect]:
        return self._abandon(_E.COMMIT_CORRUPT)

    def lease_gone(self) -> list[Effect]:
        """Pushed. Not believed while our own Commit is on its way: the lender may only be telling of that."""
        return [] if self.state is _S.COMMITTING else self._abandon(_E.LEASE_GONE)

    def abort(self) -> list[Effect]:
        return self._abandon(_E.ABORT)

    def check_invariants(self) -> None:
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
            sums = tuple(block_sum for read in sorted(self.sums) for block_sum in self.sums[read])
            effects.append(SendCommit(self.total_blocks, self.first_block, sums))
        return effects

    def _post(self) -> PostRead:
        """All that is readable goes into one read."""
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
        """`read`, when given, must be one that has not stopped. Raises before anything has changed."""
        target = TRANSITIONS.get((self.state, event))
        if target is None or (read is not None and read not in self.in_flight):
            of_read = "" if read is None else f"({read})"
            raise IllegalTransition(
                f"reader of lease {self.lease_id}", self.state.name, f"{event.name}{of_read}", tuple(self.history)
            )
        if target is not self.state:
            self.history.append(f"{event.name}:{target.name}")
        self.state = target
