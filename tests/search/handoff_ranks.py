"""The handoff of gangs whose ranks have memory of their own: each rank stores some heads of every block.

The content of a block is a tuple with a tag of each of its heads, in the order of the ranks. Production's `RoutedTransport`
tells which rank reads which heads of which other rank, and what the reads between two ranks amount to.

A step ends when all ranks have written, each at a moment of its own. A read has a route for each pair of ranks that have a head
in common. Each route copies its heads of each block at a moment of its own, and it may fail while others go on writing. A
route may also be lost sight of: then its worker ends sooner or later. A rank that has died cannot be read from, and its
worker ends a little later. Until then rank 0 answers for the leases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from kvtransfer.api import KvRegion, ReadAdrift, Region, TransportRead
from kvtransfer.routed import RoutedRead, RoutedTransport, pack_metadata, rank_id
from pdserve.core.errors import TransferFailed
from pdserve.core.ids import BlockSum, Incarnation
from pdserve.core.kv_layout import KvGroup, KvShare
from pdserve.core.reader import ReaderState
from pdserve.engine.kv.checksum import add_sums
from tests.search import handoff_events as do
from tests.search.explorer import Step, Violation
from tests.search.handoff import Handoff
from tests.search.handoff_decode import with_bind, with_decode
from tests.search.handoff_prefill import with_tag
from tests.search.handoff_state import (
    BLOCK_SIZE,
    GARBAGE,
    Bind,
    Config,
    Launched,
    Prefill,
    Read,
    RouteState,
    State,
)

HEADS = 2
HEAD_BYTES = BLOCK_SIZE * 4
PEER = Incarnation(1)
ARRIVED = "arrived"

Heads = tuple[int, ...]
"""The tag of each head of a block."""


class Route(NamedTuple):
    """What one rank of a reader reads of one rank of the lender: (their place, our place) of each head in a block's content."""

    their_rank: int
    heads: tuple[tuple[int, int], ...]


class GangHandoff(Handoff):
    garbage = (GARBAGE,) * HEADS
    transport_type: type[RoutedTransport] = RoutedTransport
    read_type: type[RoutedRead] = RoutedRead

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert config.ranks is not None
        self.tags = [
            tuple(tuple(tuple(tag + 100 * head for head in range(HEADS)) for tag in tags) for tags in groups)  # type: ignore[misc]
            for groups in self.tags
        ]
        self.shares, ours = (shares_of(ranks) for ranks in config.ranks)
        """The heads of each rank of the lender."""
        self.routes = routes_between(self.transport_type, config.layouts[0], self.shares, ours)

    # --- the lender's steps

    def step_events(self, s: State) -> Iterator[Step]:
        p = s.prefill
        if p.lost is not None:
            return
        if p.step is not None:
            for rank in p.step.unwritten:
                yield Step(("rank writes", rank, *p.step), s._replace(prefill=self.part_written(p, p.step, rank)), sure=True)
        if p.step is None or self.may_end(p.step):
            yield from super().step_events(s)

    def may_end(self, step: Launched) -> bool:
        """All ranks meet at the end of a step."""
        return not step.unwritten

    def launch(self, s: State, sequence: Any) -> State:
        s = super().launch(s, sequence)
        assert s.prefill.step is not None
        step = s.prefill.step._replace(unwritten=tuple(share.rank for share in self.shares))
        return s._replace(prefill=s.prefill._replace(step=step))

    def part_written(self, prefill: Prefill, step: Launched, rank: int) -> Prefill:
        """One rank has written its heads of the step's blocks."""
        memory, heads = prefill.memory, self.shares[rank].heads
        for block, tags in zip(step.blocks, step.tags, strict=True):
            memory = with_tag(memory, block, with_heads(memory[block], tags, ((head, head) for head in heads)))
        left = step._replace(unwritten=tuple(other for other in step.unwritten if other != rank))
        return prefill._replace(memory=memory, step=left)

    def written(self, prefill: Prefill, step: Launched) -> tuple[int, ...]:
        return prefill.memory

    # --- a rank of the lender dies

    def prefill_events(self, s: State) -> Iterator[Step]:
        for step in super().prefill_events(s):
            yield step._replace(sure=True) if s.prefill.lost is not None and step.label[0] == "restart" else step
        if s.prefill.lost is None and s.used.prefill_restarts < self.config.prefill_restarts:
            for share in self.shares:
                yield Step(("rank dies", share.rank), self.rank_lost(s, share))

    def rank_lost(self, s: State, share: KvShare) -> State:
        """It cannot be read from any more, and the step does not end. The others end a little later."""
        return s._replace(prefill=s.prefill._replace(lost=share.rank))

    def rot_events(self, s: State) -> Iterator[Step]:
        """A head of a block that is final changes in memory."""
        if s.used.rots < self.config.rots:
            used = s.used._replace(rots=s.used.rots + 1)
            for block, _ in self.machines.ask(s.prefill.pool, do.summed):
                for head in range(HEADS):
                    content = with_heads(s.prefill.memory[block], self.garbage, [(head, head)])
                    p = s.prefill._replace(memory=with_tag(s.prefill.memory, block, content))
                    yield Step(("rot", block, "head", head), s._replace(prefill=p, used=used))

    # --- checksums

    def sum_of(self, content: Any) -> BlockSum:
        return summed(content, self.shares)

    def stored(self, content: Any) -> Any:
        return tuple(super(GangHandoff, self).stored(tag) for tag in content)

    # --- the reader's routes

    def pairs(self, remote: do.Tables, local: do.Tables) -> tuple[tuple[int, ...], ...]:
        """Each (remote, local) block with the number of each route."""
        return tuple((*pair, route) for pair in super().pairs(remote, local) for route in range(len(self.routes)))

    def copied(self, s: State, worker: int, bind: Bind, read: Read, pair: tuple[int, ...], instead: Any = None) -> State:
        """A route copies its heads of a block."""
        remote, local, route = pair
        decode = s.decodes[worker]
        source = s.prefill.memory[remote] if instead is None else instead
        content = with_heads(decode.memory[local], source, self.routes[route].heads)
        decode = decode._replace(memory=with_tag(decode.memory, local, content))
        left = read._replace(pairs=tuple(other for other in read.pairs if other != pair))
        return with_decode(s, worker, with_bind(decode, with_read(bind, left)))

    def read_events(self, s: State, worker: int, bind: Bind) -> Iterator[Step]:
        """A read is over when the transport says so, and then fails or arrives as it says. A deadline only ends the wait."""
        abandoned = self.machines.ask(bind.reader, do.state_of) is ReaderState.ABANDONED
        for read in bind.reads:
            name = ("read", read.number, "of", bind.number, "on", worker)
            yield from self.route_events(s, worker, bind, read, abandoned, name)
            end = outcome(self.transport_type, self.read_type, states(read, len(self.routes)))
            if end == ARRIVED:
                yield Step(("done", *name), self.arrived(s, worker, bind, read), sure=True)
            elif not abandoned:
                yield Step(("failed", *name), self.failed(s, worker, bind, read), sure=end is not RouteState.GOING)
            elif end is RouteState.FAILED:
                yield Step(("stopped", *name), self.resolved(s, worker, bind, read, "read_stopped"), sure=True)

    def route_events(
        self, s: State, worker: int, bind: Bind, read: Read, abandoned: bool, name: tuple[Any, ...]
    ) -> Iterator[Step]:
        """What lands in the blocks of an abandoned bind is of no interest, only whether anything may land there."""
        going = states(read, len(self.routes))
        for number, route in enumerate(self.routes):
            if going[number] is not RouteState.GOING:
                continue
            of_route = [pair for pair in read.pairs if pair[2] == number]
            readable = route.their_rank != s.prefill.lost
            for pair in of_route if readable and not abandoned else ():
                yield Step(("copy", *pair, "in", *name), self.copied(s, worker, bind, read, pair), sure=True)
                if s.used.flips < self.config.flips:
                    flipped = s._replace(used=s.used._replace(flips=s.used.flips + 1))
                    yield Step(("flip", *pair, "in", *name), self.copied(flipped, worker, bind, read, pair, self.garbage))
            left = read._replace(pairs=tuple(pair for pair in read.pairs if pair[2] != number))
            if readable and abandoned:
                yield Step(("route arrives", number, *name), self.with_read(s, worker, bind, left), sure=True)
            left = left._replace(routes=with_state(read, len(self.routes), number, RouteState.FAILED))
            yield Step(("route fails", number, *name), self.with_read(s, worker, bind, left), sure=abandoned)
            if s.used.adrifts < self.config.adrifts:
                adrift = read._replace(routes=with_state(read, len(self.routes), number, RouteState.ADRIFT))
                used = s.used._replace(adrifts=s.used.adrifts + 1)
                yield Step(("route adrift", number, *name), self.with_read(s._replace(used=used), worker, bind, adrift))

    def with_read(self, s: State, worker: int, bind: Bind, read: Read) -> State:
        return with_decode(s, worker, with_bind(s.decodes[worker], with_read(bind, read)))

    def resolved(self, s: State, worker: int, bind: Bind, read: Read, method: str, *args: Any) -> State:
        """A route that still writes is remembered. There must be none, or its blocks must be kept."""
        decode = s.decodes[worker]
        loose = {*decode.loose, *((bind.number, local) for _, local, _ in read.pairs)}
        s = with_decode(s, worker, decode._replace(loose=tuple(sorted(loose))))
        return super().resolved(s, worker, bind, read, method, *args)

    def decode_events(self, s: State, worker: int) -> Iterator[Step]:
        """A worker that has lost sight of a read ends, since nothing else stops the read."""
        yield from super().decode_events(s, worker)
        if any(RouteState.ADRIFT in read.routes for bind in s.decodes[worker].binds for read in bind.reads):
            used = s.used._replace(decode_restarts=s.used.decode_restarts + 1)
            fresh = self.new_decode(worker, used.decode_restarts)
            yield Step(("unhealthy", "decode", worker), with_decode(s._replace(used=used), worker, fresh), sure=True)

    # --- what must hold

    def check(self, s: State) -> None:
        super().check(s)
        for decode in s.decodes:
            for number, block in decode.loose:
                if block not in self.machines.ask(decode.pool, do.writable, number):
                    raise Violation(f"a read of bind {number} is over and may write into block {block}")


def with_read(bind: Bind, read: Read) -> Bind:
    return bind._replace(reads=tuple(read if other.number == read.number else other for other in bind.reads))


def with_heads(content: Any, source: Any, heads: Iterable[tuple[int, int]]) -> Heads:
    """The content with heads of a source: (place there, place here)."""
    new = list(content)
    for there, here in heads:
        new[here] = source[there]
    return tuple(new)


def states(read: Read, count: int) -> tuple[RouteState | None, ...]:
    """The state of each route. None: it has arrived."""
    left = {route for _, _, route in read.pairs}
    known = read.routes or (RouteState.GOING,) * count
    return tuple(None if state is RouteState.GOING and n not in left else state for n, state in enumerate(known))


def with_state(read: Read, count: int, number: int, state: RouteState) -> tuple[RouteState, ...]:
    known = read.routes or (RouteState.GOING,) * count
    return (*known[:number], state, *known[number + 1 :])


# --- production's routes


class _RankRead(TransportRead):
    __slots__ = ("state",)

    def __init__(self, state: RouteState | None) -> None:
        super().__init__(PEER, 1)
        self.state = state


class _RankTransport:
    """The transport of one rank. It notes what it shall read, and tells of reads what the model says."""

    def __init__(self, rank: int, posts: list[tuple[Incarnation, Region, int, Region]]) -> None:
        self._rank = rank
        self._posts = posts

    def metadata(self) -> bytes:
        return b""

    def connect(self, incarnation: Incarnation, metadata: bytes) -> None:
        pass

    def disconnect(self, incarnation: Incarnation) -> None:
        pass

    def post_read(
        self,
        peer: Incarnation,
        region: Region,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        into: Region,
    ) -> TransportRead:
        self._posts.append((peer, region, self._rank, into))
        return _RankRead(RouteState.GOING)

    def poll(self, handle: TransportRead) -> bool:
        assert isinstance(handle, _RankRead)
        if handle.state is RouteState.FAILED:
            raise TransferFailed("the peer's rank is gone")
        if handle.state is RouteState.ADRIFT:
            raise ReadAdrift("lost sight of the read")
        return handle.state is None

    def close(self) -> None:
        pass


def shares_of(ranks: int) -> tuple[KvShare, ...]:
    """The share of each rank: all heads, or one of them."""
    each = HEADS // ranks
    return tuple(KvShare(rank, range(1), range(rank * each, (rank + 1) * each)) for rank in range(ranks))


def routes_between(
    transport_type: type[RoutedTransport], layout: KvGroup, theirs: Sequence[KvShare], ours: Sequence[KvShare]
) -> tuple[Route, ...]:
    """The routes that production posts for a read."""
    posts: list[tuple[Incarnation, Region, int, Region]] = []
    transport = transport_type({share.rank: _RankTransport(share.rank, posts) for share in ours})
    transport.connect(PEER, pack_metadata({share.rank: b"" for share in theirs}))
    regions = [
        KvRegion(layout, tuple((share, Region(0, 1, share.of(layout).block_bytes)) for share in side))
        for side in (theirs, ours)
    ]
    transport.post_read(PEER, regions[0], (0,), (0,), regions[1])
    ranks = {rank_id(PEER, share.rank): share for share in theirs}
    return tuple(
        Route(ranks[peer].rank, tuple(zip(_places(ranks[peer], source), _places(ours[rank], target), strict=True)))
        for peer, source, rank, target in posts
    )


def _places(share: KvShare, region: Region) -> list[int]:
    """The place in a block's content of each head that a route copies from, or to, the memory of a rank."""
    pieces = zip(region.offsets, region.lengths, strict=True)
    return [share.heads[at // HEAD_BYTES] for first, nbytes in pieces for at in range(first, first + nbytes, HEAD_BYTES)]


@cache
def outcome(
    transport_type: type[RoutedTransport], read_type: type[RoutedRead], routes: tuple[RouteState | None, ...]
) -> RouteState | str:
    """What production makes of a read whose routes are in these states."""
    rank = _RankTransport(0, [])
    read = read_type(PEER, 1)
    read.routes = [(rank, _RankRead(state)) for state in routes]
    try:
        return ARRIVED if transport_type({0: rank}).poll(read) else RouteState.GOING
    except ReadAdrift:
        return RouteState.ADRIFT
    except TransferFailed:
        return RouteState.FAILED


@cache
def summed(content: Heads, shares: tuple[KvShare, ...]) -> BlockSum:
    """The sum over all ranks, each of which sums its own heads. The place of a head counts."""
    parts = [[BlockSum(hash((head, content[head])) % 2**64)] for head in range(HEADS)]
    of_ranks = [add_sums(*(parts[head] for head in share.heads)) for share in shares]
    return add_sums(*of_ranks)[0]
