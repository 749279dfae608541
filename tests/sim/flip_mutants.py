"""Rules of drains and role flips, broken on purpose. See `mutants` and docs/design/0002."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.core.block_pools import BlockPools
from pdserve.worker.engine_thread import EngineSteps, EngineView
from pdserve.worker.link import RouterLink
from pdserve.worker.member import LinkMember
from sim.faults.worker import SimWorker


def a_flip_forgets_its_own_reads(patch: pytest.MonkeyPatch) -> None:
    """Rules F1 and D3: the engine begins to lend while blocks are in quarantine, and nobody ends it."""
    patch.setattr(LinkMember, "empty", property(lambda self: not self._engine.watch.owes and not self.role._by_handle))
    patch.setattr(EngineSteps, "_set_lending", lambda self, lends: None)


def a_flip_keeps_its_incarnation(patch: pytest.MonkeyPatch) -> None:
    """Rule F2."""
    real = SimWorker._begin_again

    def begin_again(self: Any, role: Any) -> None:
        self._rng, rng, incarnation = Kept(self.incarnation, self._rng), self._rng, self.incarnation
        real(self, role)
        self._rng = rng
        assert self.incarnation == incarnation

    patch.setattr(SimWorker, "_begin_again", begin_again)


class Kept:
    """Random numbers, but for the bits of an incarnation."""

    def __init__(self, incarnation: int, rng: Any) -> None:
        self._incarnation = incarnation
        self._rng = rng

    def getrandbits(self, bits: int) -> int:
        return self._incarnation if bits == 64 else self._rng.getrandbits(bits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rng, name)


def a_flip_leaves_its_leases(patch: pytest.MonkeyPatch) -> None:
    """Rules F3 and D3: the lease table goes with the role, and its leases keep their blocks."""
    patch.setattr(LinkMember, "empty", property(lambda self: self.role.leases_held > 0 or self._engine.empty))
    patch.setattr(EngineSteps, "_set_lending", lambda self, lends: None)
    patch.setattr("sim.faults.worker.close_role", closed_without_release)


async def closed_without_release(role: Any, transfer: Any) -> bool:
    await transfer.close()
    return True


def a_flip_keeps_its_link(patch: pytest.MonkeyPatch) -> None:
    """Rule F4: without a Hello the router knows the old role, and its handles act on the new one."""
    run, begin = RouterLink.run, SimWorker._begin

    async def run_on(self: Any) -> None:
        if not hasattr(self, "kept"):
            self.kept = asyncio.create_task(run(self))
        await asyncio.shield(self.kept)

    def begin_with_link(self: Any) -> None:
        old = self.member.link if self.lives else None
        begin(self)
        if old is not None:
            for name in ("_hello", "_heartbeat", "_on_command", "_on_lost", "_after_beat"):
                setattr(old, name, getattr(self.member.link, name))
            self.member.link = old

    patch.setattr(RouterLink, "run", run_on)
    patch.setattr(SimWorker, "_begin", begin_with_link)


def a_draining_worker_takes_requests(patch: pytest.MonkeyPatch) -> None:
    """Rules D2 and D3: only the router knows that the worker drains."""

    def start_to_drain(self: Any, what: str) -> None:
        self._drain_asked.set()

    patch.setattr(LinkMember, "_start_to_drain", start_to_drain)


def a_reader_s_cached_blocks_are_lent_without_checksums(patch: pytest.MonkeyPatch) -> None:
    """Rule C1: a lease inherits the checksums of its prefix hits, also of those that a reader has left."""
    patch.setattr(BlockPools, "seal_cached", lambda self, sum_blocks: None)


def a_new_life_tells_no_keys_of_the_old_one(patch: pytest.MonkeyPatch) -> None:
    """Rule F4: what the pool shares is told anew on the new link."""
    begin = LinkMember.__init__

    def init(self: Any, config: Any, role: Any, engine: EngineView, **kwargs: Any) -> None:
        begin(self, config, role, engine, **kwargs)
        if kwargs.get("flips"):
            self._cursor = None

    patch.setattr(LinkMember, "__init__", init)


FLIP_MUTANTS = (
    a_flip_forgets_its_own_reads,
    a_flip_keeps_its_incarnation,
    a_flip_leaves_its_leases,
    a_flip_keeps_its_link,
    a_draining_worker_takes_requests,
    a_reader_s_cached_blocks_are_lent_without_checksums,
    a_new_life_tells_no_keys_of_the_old_one,
)
