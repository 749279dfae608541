"""What a state of the handoff model is made of. Production machines stand in it as numbers, see `machines`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from pdserve.core.kv_layout import KvGroup
from tests.search.handoff_events import LeaseKey, Tables

BLOCK_SIZE = 2
GARBAGE = 0
"""The tag of content that is nobody's, half written, or somebody else's by now."""


@dataclass(frozen=True)
class Config:
    """How much can happen. Every bound is on things that have an identity of their own; messages are unbounded."""

    prompts: tuple[tuple[int, ...], ...] = ((1, 2, 3),)
    prefill_blocks: int = 2
    decode_blocks: tuple[int, ...] = (2, 2)
    more_blocks: tuple[int, ...] = (0,)
    """KV groups. In every worker, the pool of each has so many blocks more than the numbers above."""
    windows: tuple[int | None, ...] = (None,)
    """The sliding window of each KV group, in tokens. Groups that are not listed have none."""
    max_binds: int = 2
    max_grants: int = 2
    prefill_restarts: int = 1
    decode_restarts: int = 0
    ttl: int = 1
    """Units of time. With 1 every tick makes every lease due, so that a renewal may always come too late."""
    prefill_cached: bool = False
    """An earlier prompt has left the first one's prefix in the pool."""
    decode_cached: bool = False
    local_steps: bool = False
    """Decode workers also run steps of their own, whose writes land late."""
    retries: bool = True
    """The router may forget a request's bind and lease, and begin anew."""
    stalled: bool = False
    """The prefill engine launches nothing."""
    checksums: bool = False
    """Prefill sums blocks when they are final, decode what it read, and Commit compares."""
    rots: int = 0
    """Blocks of prefill's memory that change by themselves after they were final."""
    flips: int = 0
    """Copies that do not bring what lies at the remote address."""
    converted: bool = False
    """Decode stores KV in a form of its own."""
    hostile_tickets: bool = False
    """Binds are handed tickets of other requests, and tickets that were changed on their way."""
    wait_cap: int | None = None
    """Ticks that a bind waits for its first read. None: it may give up at any moment and need not count."""
    role_flips: int = 0
    """Workers that drain and begin a new life, in the same role or in the other one."""
    flip_ways: tuple[str, ...] = ()
    """The other roles that they may take, see `handoff_flip`."""
    ranks: tuple[int, int] | None = None
    """The ranks of prefill and of each decode worker, each with memory of its own, see `handoff_ranks`. None: no worker has
    ranks. A block has two heads if there are any."""
    adrifts: int = 0
    """Routes of reads that are lost sight of, and may write for ever."""

    @property
    def layouts(self) -> tuple[KvGroup, ...]:
        """The layout of each group. Only its block size, its window and its heads matter here."""
        windows = (*self.windows, *(None,) * len(self.more_blocks))[: len(self.more_blocks)]
        heads = 2 if self.ranks else 1
        return tuple(KvGroup((0,), ((heads, 1),), BLOCK_SIZE, "float32", window) for window in windows)

    def pool_sizes(self, blocks: int) -> tuple[int, ...]:
        """The blocks of each group of a worker."""
        return tuple(blocks + more for more in self.more_blocks)


class Phase(Enum):
    """How far a worker is on its way to its next life."""

    __hash__ = object.__hash__

    SERVES = 0
    DRAINS = 1
    EMPTY = 2


class Computing(NamedTuple):
    """A sequence of the prefill worker, until its last block is collected or it is aborted."""

    number: int
    request: int
    lease: LeaseKey
    blocks: Tables
    computed: int
    lent: Tables = ()
    """The blocks that its ticket names."""
    aborted: bool = False


class Launched(NamedTuple):
    """A step that may write its block of each group until it is collected. `unwritten`: the ranks that have still to write."""

    number: int
    position: int
    blocks: tuple[int, ...]
    tags: tuple[int, ...]
    unwritten: tuple[int, ...] = ()


class Prefill(NamedTuple):
    incarnation: int
    table: int
    pool: int
    memory: tuple[int, ...]
    step: Launched | None = None
    sequences: tuple[Computing, ...] = ()
    phase: Phase = Phase.SERVES
    late: tuple[int, ...] = ()
    """The blocks that reads of an earlier life may still write."""
    lost: int | None = None
    """The rank that has died, until the worker ends with it."""


class RouteState(Enum):
    """What has become of a read between two ranks. One that has no pairs left has arrived."""

    __hash__ = object.__hash__

    GOING = 0
    FAILED = 1
    ADRIFT = 2


class Read(NamedTuple):
    """A posted read: each (remote, local) block of any group still to be copied, at whatever moment. Where ranks have memory of
    their own, a pair also has its route."""

    number: int
    pairs: tuple[tuple[int, ...], ...]
    failed: bool = False
    blocks: Tables = ()
    """All local ones of each group, in order: what is summed when it is done."""
    routes: tuple[RouteState, ...] = ()


class Bind(NamedTuple):
    number: int
    request: int
    blocks: Tables
    hits: int
    lease: LeaseKey | None = None
    remote: Tables = ()
    proof: bytes = b""
    reader: int = -1
    reads: tuple[Read, ...] = ()
    active: bool = False
    waited: int = 0


class Decode(NamedTuple):
    incarnation: int
    pool: int
    memory: tuple[int, ...]
    binds: tuple[Bind, ...] = ()
    step: tuple[int, ...] | None = None
    """The block of each group of a step of its own."""
    step_aborted: bool = False
    phase: Phase = Phase.SERVES
    before: int = 0
    """The binds before this life, which numbers its own from 1 on."""
    loose: tuple[tuple[int, int], ...] = ()
    """Each (bind, block) that may still be written by a read that counts as over. There is none, unless a rule is broken."""


class Ticket(NamedTuple):
    """What a reader is told of a lease."""

    lease: LeaseKey
    request: int
    blocks: Tables

    @property
    def proof(self) -> bytes:
        """Of having this ticket, as it was written or as somebody changed it."""
        return repr(tuple(self)).encode()


class Asked(NamedTuple):
    """What the router believes of a request: its present bind, and the lease with the blocks that its ticket names."""

    worker: int = -1
    bind: int = 0
    lease: LeaseKey | None = None
    ticket: Tables = ()


class Used(NamedTuple):
    binds: int = 0
    grants: int = 0
    prefill_restarts: int = 0
    decode_restarts: int = 0
    rots: int = 0
    flips: int = 0
    role_flips: int = 0
    adrifts: int = 0


class State(NamedTuple):
    prefill: Prefill
    decodes: tuple[Decode, ...]
    asked: tuple[Asked, ...]
    sent: tuple[tuple[Any, ...], ...]
    """Every message ever sent, sorted. Any may arrive at any moment, any number of times, or never."""
    used: Used

    def with_sent(self, *message: Any) -> State:
        return self if message in self.sent else self._replace(sent=tuple(sorted((*self.sent, message))))
