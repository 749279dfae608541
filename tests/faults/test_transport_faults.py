"""NIXL over TCP when its peer dies, stands still or is replaced: a typed error within seconds, and this process lives on.

The reader is this process itself: had NIXL ended it, nothing here would report.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtransfer.backends.nixl import NixlTransport
from kvtransfer.thread import BlockRead, TransferThread
from pdserve.core.errors import TransferFailed
from pdserve.core.ids import WorkerId

sys.path.append(str(Path(__file__).parents[1] / "kvtransfer"))  # the peers of the transports' own tests
from transfer_testing import NixlPeer, Pool, new_incarnation

pytest.importorskip("nixl", reason="NIXL is not installed")

TEST_S = 120.0
SECONDS = 30.0  # only what hangs: UCX notices a dead peer in about 4 s with the timers that we set
LONG_S = 120.0  # a deadline that must not be what ends the read


@pytest.fixture(autouse=True)
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.fixture
def peers() -> Iterator[Callable[[], NixlPeer]]:
    """Makes lenders, each a process of its own."""
    made: list[NixlPeer] = []

    def make() -> NixlPeer:
        made.append(NixlPeer(seed=len(made) + 1))
        return made[-1]

    yield make
    for peer in made:
        peer.process.send_signal(signal.SIGCONT)
        peer.kill()


class Reader:
    """A transfer thread over NIXL, and the pool it reads into."""

    def __init__(self, pool: Pool) -> None:
        self.thread = TransferThread(self._make)
        self.pool = pool

    def _make(self) -> NixlTransport:
        self.transport = NixlTransport(WorkerId("reader"), new_incarnation(), [self.pool.region])
        return self.transport

    async def connect(self, peer: NixlPeer) -> None:
        await self.thread.connect(peer.incarnation, peer.metadata)

    def post(self, peer: NixlPeer, *, deadline_s: float = LONG_S) -> BlockRead:
        return self.thread.read(
            peer.incarnation, peer.region, [1, 2, 3], [4, 5, 6], deadline_s=deadline_s, into=self.pool.region
        )

    async def connect_and_read(self, peer: NixlPeer) -> None:
        """Whichever of the two notices that there is nobody."""
        await asyncio.wait_for(self.connect(peer), SECONDS)
        await asyncio.wait_for(self.post(peer).result, SECONDS)

    async def assert_reads(self, peer: NixlPeer) -> None:
        """Every byte arrives: one peer's fault is not another's."""
        await self.connect(peer)
        read = self.post(peer)
        await asyncio.wait_for(read.result, TEST_S)
        await asyncio.wait_for(read.stopped, TEST_S)
        assert self.pool.digest([4, 5, 6]) == peer.digest([1, 2, 3])


@asynccontextmanager
async def reader() -> AsyncIterator[Reader]:
    here = Reader(Pool())
    thread = here.thread
    try:
        await thread.start()
        yield here
        assert not thread.unhealthy.is_set(), thread.unhealthy_reason
        assert thread.num_unstopped == 0
    finally:
        await thread.close()


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), TEST_S))


def pause(peer: NixlPeer) -> None:
    """Every thread of it stands still when this returns."""
    peer.process.send_signal(signal.SIGSTOP)
    os.waitpid(peer.process.pid, os.WUNTRACED)


def test_a_peer_that_dies_in_mid_read_fails_the_read_within_seconds(peers: Callable[[], NixlPeer]) -> None:
    """(1) It stands still, so that the read is in flight for sure; (2) it is killed; (3) the read fails and stops, so
    that its blocks are free again; (4) another peer is read as ever."""

    async def test() -> None:
        async with reader() as here:
            dying, other = peers(), peers()
            await here.assert_reads(dying)
            pause(dying)
            read = here.post(dying)
            await asyncio.sleep(0.1)
            assert not read.result.done()

            dying.kill()
            with pytest.raises(TransferFailed):
                await asyncio.wait_for(read.result, SECONDS)
            await asyncio.wait_for(read.stopped, SECONDS)
            await here.assert_reads(other)

    run(test)


def test_peers_that_die_in_mid_read_are_not_kept(peers: Callable[[], NixlPeer]) -> None:
    """(1) Two reads are in flight, the peer is killed; (2) both fail and stop; (3) nothing of it is held: neither metadata
    nor a descriptor for each block of its pool. Two peers, one after the other, and nobody asks for them again."""

    async def test() -> None:
        async with reader() as here:
            for _ in range(2):
                dying = peers()
                await here.assert_reads(dying)
                pause(dying)
                reads = [here.post(dying), here.post(dying)]
                assert here.transport.num_peers == 1
                dying.kill()
                for read in reads:
                    with pytest.raises(TransferFailed):
                        await asyncio.wait_for(read.result, SECONDS)
                    await asyncio.wait_for(read.stopped, SECONDS)
                async with asyncio.timeout(SECONDS):
                    while here.transport.num_peers:  # noqa: ASYNC110 - the transfer thread forgets after it has told of the read
                        await asyncio.sleep(0.001)

    run(test)


def test_a_peer_that_stands_still_fails_the_read_at_its_deadline(peers: Callable[[], NixlPeer]) -> None:
    """(1) The read is stuck; (2) its deadline ends the wait, not the read; (3) the peer goes on: only now the blocks
    are ours again; (4) other peers were served meanwhile."""

    async def test() -> None:
        async with reader() as here:
            stuck, other = peers(), peers()
            await here.assert_reads(stuck)
            pause(stuck)
            read = here.post(stuck, deadline_s=2.5)  # posted by then, even if this process stands still
            with pytest.raises(TransferFailed, match="took more than"):
                await asyncio.wait_for(read.result, SECONDS)
            assert not read.is_stopped
            await here.connect(other)
            meanwhile = here.thread.read(other.incarnation, other.region, [7], [8], deadline_s=LONG_S, into=here.pool.region)
            await asyncio.wait_for(meanwhile.result, TEST_S)
            assert here.pool.digest([8]) == other.digest([7])

            stuck.process.send_signal(signal.SIGCONT)
            await asyncio.wait_for(read.stopped, TEST_S)

    run(test)


def test_a_replaced_peer_is_not_read_with_what_was_known_of_its_past(peers: Callable[[], NixlPeer]) -> None:
    """(1) A peer is known; (2) another process takes its place; (3) its past answers nothing but errors, and its
    present refuses the past's metadata; (4) under its own incarnation it is read."""

    async def test() -> None:
        async with reader() as here:
            past, present = peers(), peers()
            await here.assert_reads(past)
            past.kill()
            with pytest.raises(TransferFailed):
                await asyncio.wait_for(here.post(past).result, SECONDS)
            with pytest.raises(TransferFailed):
                await asyncio.wait_for(here.thread.connect(present.incarnation, past.metadata), SECONDS)
            with pytest.raises(TransferFailed):
                await here.connect_and_read(past)
            await here.assert_reads(present)

    run(test)


def test_a_peer_that_was_never_there_fails_within_seconds(peers: Callable[[], NixlPeer]) -> None:
    """Its metadata arrived, and it died before the first read."""

    async def test() -> None:
        async with reader() as here:
            absent, other = peers(), peers()
            absent.kill()
            with pytest.raises(TransferFailed):
                await here.connect_and_read(absent)
            await here.assert_reads(other)

    run(test)
