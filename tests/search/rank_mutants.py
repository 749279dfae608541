"""The rules of ranks with memory of their own (docs/design/0092), each switched off in the smallest way. See `mutants`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvtransfer.api import KvRegion, TransportRead
from kvtransfer.routed import RoutedRead, RoutedTransport, _Route
from pdserve.core.errors import TransferFailed
from pdserve.core.ids import BlockSum, Incarnation
from pdserve.core.kv_layout import KvShare
from tests.search.explorer import Step
from tests.search.handoff_decode import with_decode
from tests.search.handoff_prefill import with_tag
from tests.search.handoff_ranks import GangHandoff, shares_of, summed, with_heads
from tests.search.handoff_state import Config, Launched, State
from tests.search.mutants import ASTRAY, DECODES, Mutant

# --- rule R1: a watermark covers what all ranks have written


class WatermarkFollowsRankZero(GangHandoff):
    def may_end(self, step: Launched) -> bool:
        return 0 not in step.unwritten


# --- rule R2: a read is over when all of its routes are


class DoneWithTheFirstRoute(RoutedTransport):
    def poll(self, handle: TransportRead) -> bool:
        assert isinstance(handle, RoutedRead)
        posted = len(handle.routes)
        return super().poll(handle) or (handle.error is None and len(handle.routes) < posted)


class ReadIsDoneWithItsFirstRoute(GangHandoff):
    transport_type = DoneWithTheFirstRoute


class FailsAtOnce(RoutedRead):
    def is_done(self) -> bool:
        if self.error is not None:
            raise self.error
        return super().is_done()


class ReadEndsWithItsFirstFailure(GangHandoff):
    """Its blocks are used again while another route writes into them."""

    read_type = FailsAtOnce


# --- rule R3: a read is adrift when one of its routes is


class AdriftIsOver(RoutedRead):
    def failed(self, error: TransferFailed) -> None:
        super().failed(TransferFailed(error.message))


class AdriftRouteCountsAsFailed(GangHandoff):
    read_type = AdriftIsOver


# --- rule R4: each head is read once, from the rank that stores it


class SwapsRanks(RoutedTransport):
    def _joined(self, peer: Incarnation, region: KvRegion, into: KvRegion) -> list[_Route]:
        routes = super()._joined(peer, region, into)
        return [route._replace(peer=other.peer) for route, other in zip(routes, reversed(routes), strict=True)]


class ReadsFromTheWrongRank(GangHandoff):
    transport_type = SwapsRanks


class ForgetsARoute(RoutedTransport):
    def _joined(self, peer: Incarnation, region: KvRegion, into: KvRegion) -> list[_Route]:
        return super()._joined(peer, region, into)[1:]


class ReadsFromOneRank(GangHandoff):
    transport_type = ForgetsARoute


class WholePieces(RoutedTransport):
    """A rank with fewer heads than the other side copies from the beginning of the other's block."""

    def _joined(self, peer: Incarnation, region: KvRegion, into: KvRegion) -> list[_Route]:
        return [
            route._replace(theirs=replace(route.theirs, pieces=tuple((0, nbytes) for _, nbytes in route.theirs.pieces)))
            for route in super()._joined(peer, region, into)
        ]


class ReadsTheFirstHeadTwice(GangHandoff):
    transport_type = WholePieces


# --- rule R5: a checksum is of all ranks' parts


class SumsThePartOfRankZero(GangHandoff):
    def sum_of(self, content: Any) -> BlockSum:
        return summed(content, self.shares[:1])


# --- rule R6: a worker ends with each of its ranks, and so do its leases and its binds


class LenderOutlivesItsRank(GangHandoff):
    """A new rank takes the place of the dead one. The leases go on."""

    def rank_lost(self, s: State, share: KvShare) -> State:
        p = s.prefill
        return s._replace(prefill=p._replace(memory=self.without(share, p.memory)))

    def without(self, share: KvShare, memory: tuple[Any, ...]) -> tuple[Any, ...]:
        """The memory after its part in a rank was lost."""
        for block, content in enumerate(memory):
            memory = with_tag(memory, block, with_heads(content, self.garbage, ((head, head) for head in share.heads)))
        return memory


class ReaderOutlivesItsRank(LenderOutlivesItsRank):
    """A new rank takes the place of the reader's dead one. The binds go on."""

    def prefill_events(self, s: State) -> Iterator[Step]:
        yield from (step for step in super().prefill_events(s) if step.label[0] != "rank dies")

    def decode_events(self, s: State, worker: int) -> Iterator[Step]:
        yield from super().decode_events(s, worker)
        assert self.config.ranks is not None
        decode = s.decodes[worker]
        for share in shares_of(self.config.ranks[1]):
            after = decode._replace(memory=self.without(share, decode.memory))
            yield Step(("rank dies", share.rank, "on", worker), with_decode(s, worker, after))


GANGS = Config(
    prompts=((1, 2),), decode_blocks=(2,), max_binds=1, max_grants=1, prefill_restarts=0, retries=False, ranks=(2, 2)
)
"""A block in two parts: lender and reader have two ranks."""
SPLIT, MERGED = replace(GANGS, ranks=(1, 2)), replace(GANGS, ranks=(2, 1))

RANK_MUTANTS = (
    Mutant("R1", WatermarkFollowsRankZero, GANGS, DECODES),
    Mutant("R2", ReadIsDoneWithItsFirstRoute, GANGS, ASTRAY),
    Mutant("R2", ReadIsDoneWithItsFirstRoute, MERGED, ASTRAY),
    Mutant("R2", ReadEndsWithItsFirstFailure, GANGS, ASTRAY),
    Mutant("R3", AdriftRouteCountsAsFailed, replace(GANGS, adrifts=1), ASTRAY),
    Mutant("R4", ReadsFromTheWrongRank, GANGS, DECODES),
    Mutant("R4", ReadsFromOneRank, MERGED, DECODES),
    Mutant("R4", ReadsTheFirstHeadTwice, SPLIT, DECODES),
    Mutant("R5", SumsThePartOfRankZero, replace(GANGS, checksums=True, flips=1), DECODES),
    Mutant("R6", LenderOutlivesItsRank, replace(GANGS, prefill_restarts=1), DECODES),
    Mutant("R6", ReaderOutlivesItsRank, GANGS, DECODES),
)
