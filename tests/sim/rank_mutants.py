"""Rules of ranks with memory of their own, broken on purpose. See `mutants`. `run_with_gangs` has them."""

from __future__ import annotations

from typing import Any

import pytest

from kvtransfer.routed import RoutedRead, RoutedTransport
from pdserve.core.errors import TransferFailed
from sim.faults import engine
from sim.faults.engine import SimEngine
from sim.faults.oracle import BLOCK_SIZE
from sim.faults.world import World


def a_read_is_done_with_its_first_route(patch: pytest.MonkeyPatch) -> None:
    real = RoutedTransport.poll

    def poll(self: Any, handle: Any) -> bool:
        posted = len(handle.routes)
        return real(self, handle) or (handle.error is None and len(handle.routes) < posted)

    patch.setattr(RoutedTransport, "poll", poll)


def blocks_are_given_back_while_a_route_writes(patch: pytest.MonkeyPatch) -> None:
    """A read fails with its first route, and the others go on."""
    real = RoutedRead.is_done

    def is_done(self: Any) -> bool:
        if self.error is not None:
            raise self.error
        return real(self)

    patch.setattr(RoutedRead, "is_done", is_done)


def a_route_that_is_adrift_counts_as_failed(patch: pytest.MonkeyPatch) -> None:
    real = RoutedRead.failed
    patch.setattr(RoutedRead, "failed", lambda self, error: real(self, TransferFailed(error.message)))


def heads_are_read_from_the_wrong_rank(patch: pytest.MonkeyPatch) -> None:
    real = RoutedTransport._joined

    def joined(self: Any, *args: Any) -> Any:
        routes = real(self, *args)
        return [route._replace(peer=other.peer) for route, other in zip(routes, reversed(routes), strict=True)]

    patch.setattr(RoutedTransport, "_joined", joined)


def a_rank_is_not_read(patch: pytest.MonkeyPatch) -> None:
    real = RoutedTransport._joined
    patch.setattr(RoutedTransport, "_joined", lambda self, *args: real(self, *args)[:1])


def the_part_of_the_first_rank_is_summed_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "add_sums", lambda *parts: parts[0])


def a_watermark_does_not_wait_for_the_slowest_rank(patch: pytest.MonkeyPatch) -> None:
    """A step in which nothing is drawn ends with the first rank that has written its part."""

    def write(self: Any, pending: Any, step_s: float, rank: int, unwritten: set[int]) -> None:
        self.kv.write(pending, rank)
        unwritten.discard(rank)
        drawn = any(piece.samples for piece in pending.slices)
        if len(unwritten) == (0 if drawn else self.kv.num_ranks - 1):
            self._finish(pending, step_s)

    patch.setattr(SimEngine, "_write", write)


def a_gang_outlives_its_rank(patch: pytest.MonkeyPatch) -> None:
    """A new rank takes the place of the dead one, and leases and sequences go on."""

    def lose_rank(self: Any, process: Any, fault: Any) -> None:
        worker = self.workers[fault.target]
        for memory in worker.kv.groups:
            for block in memory.blocks:
                for place in memory.places.get(int(fault.other) % worker.kv.num_ranks, ()):
                    block[place][:BLOCK_SIZE] = [0] * BLOCK_SIZE

    patch.setattr(World, "_lose_rank", lose_rank)


RANK_MUTANTS = (
    a_read_is_done_with_its_first_route,
    blocks_are_given_back_while_a_route_writes,
    a_route_that_is_adrift_counts_as_failed,
    heads_are_read_from_the_wrong_rank,
    a_rank_is_not_read,
    the_part_of_the_first_rank_is_summed_alone,
    a_watermark_does_not_wait_for_the_slowest_rank,
    a_gang_outlives_its_rank,
)
