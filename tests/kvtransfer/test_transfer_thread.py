"""The thread that owns the transport: results, deadlines, stuck reads, death, closing."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from transfer_testing import FakePeer, Pool, new_incarnation

from kvtransfer.api import Transport, TransportRead
from kvtransfer.backends.fake import FakeFabric, FakeTransport
from kvtransfer.thread import BlockRead, TransferThread
from pdserve.core.error_table import TABLE
from pdserve.core.errors import ReplicaLost, TransferFailed
from pdserve.core.ids import Incarnation

LATE_S = 2.5  # longer than a busy machine stands still, so that a read is posted before it is late


@dataclass
class World:
    fabric: FakeFabric
    peer: FakePeer
    pool: Pool
    thread: TransferThread

    def read(self, remote: list[int], local: list[int], *, deadline_s: float = 30.0) -> BlockRead:
        return self.thread.read(
            self.peer.incarnation, self.peer.region, remote, local, deadline_s=deadline_s, into=self.pool.region
        )


@asynccontextmanager
async def world(
    wrap: Callable[[Transport], Transport] = lambda transport: transport, *, stuck_after_s: float = 60.0, max_reads: int = 64
) -> AsyncIterator[World]:
    """A started thread, connected to one peer; ends with nothing left."""
    fabric, pool = FakeFabric(), Pool()
    peer = FakePeer(fabric)
    incarnation = new_incarnation()
    thread = TransferThread(
        lambda: wrap(FakeTransport(fabric, incarnation, [pool.region])), stuck_after_s=stuck_after_s, max_reads=max_reads
    )
    try:
        assert await thread.start()
        await thread.connect(peer.incarnation, peer.metadata)
        yield World(fabric, peer, pool, thread)
    finally:
        await thread.close()
    assert thread.num_unstopped == 0
    assert not [t for t in threading.enumerate() if t.name == "pdserve-transfer"]


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_read_arrives_and_stops() -> None:
    async def test() -> None:
        async with world() as w:
            read = w.read([1, 2, 3], [4, 5, 6])
            result = await read.result
            await read.stopped
            assert result.nbytes == 3 * w.peer.region.block_bytes
            assert result.duration_s >= 0
            assert w.pool.digest([4, 5, 6]) == w.peer.digest([1, 2, 3])

    run(test)


def test_many_slow_reads_at_once() -> None:
    async def test() -> None:
        async with world() as w:
            w.fabric.polls_until_done = 5
            reads = [w.read([i], [47 - i]) for i in range(48)]
            await asyncio.gather(*(read.result for read in reads))
            assert w.pool.digest(list(range(48))) == w.peer.digest(list(range(47, -1, -1)))

    run(test)


def test_a_deadline_fails_the_wait_but_the_blocks_stay_taken() -> None:
    """(1) The peer stalls; (2) the deadline fails the result; (3) not stopped; (4) it resumes: late bytes, stopped."""

    async def test() -> None:
        async with world() as w:
            w.fabric.hold(w.peer.incarnation)
            read = w.read([1], [2], deadline_s=LATE_S)
            with pytest.raises(TransferFailed, match=rf"more than {LATE_S} s"):
                await read.result
            assert not read.is_stopped
            assert w.thread.num_unstopped == 1
            w.fabric.resume(w.peer.incarnation)
            await read.stopped
            assert w.pool.digest([2]) == w.peer.digest([1])
            assert not w.thread.unhealthy.is_set()

    run(test)


def test_deadlines_pass_in_their_own_order() -> None:
    async def test() -> None:
        async with world() as w:
            w.fabric.hold(w.peer.incarnation)
            order: list[float] = []
            loop = asyncio.get_running_loop()
            with pytest.MonkeyPatch.context() as patch:  # all are asked for at one time, however slow the machine is
                patch.setattr(loop, "time", functools.partial(float, loop.time()))
                reads = {late_s: w.read([1], [2], deadline_s=LATE_S + late_s) for late_s in (0.4, 0.0, 0.2)}
            for late_s, read in reads.items():
                read.result.add_done_callback(lambda _, late_s=late_s: order.append(late_s))
            await asyncio.wait([read.result for read in reads.values()])
            await asyncio.sleep(0)
            assert order == [0.0, 0.2, 0.4]

    run(test)


def test_giving_up_on_stopped_does_not_stop_the_read() -> None:
    """A wait for `stopped` that times out cancels what it waits on; that must not free the blocks."""

    async def test() -> None:
        async with world() as w:
            w.fabric.hold(w.peer.incarnation)
            read = w.read([1], [2])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read.stopped, 0.02)
            assert not read.is_stopped
            w.fabric.resume(w.peer.incarnation)
            await read.stopped

    run(test)


def test_an_asker_that_leaves_does_not_disturb_the_rest() -> None:
    async def test() -> None:
        async with world() as w:
            w.fabric.hold(w.peer.incarnation)
            left, stays = w.read([1], [2]), w.read([3], [4])
            left.result.cancel()
            w.fabric.resume(w.peer.incarnation)
            await stays.result
            await left.stopped

    run(test)


def test_death_of_the_peer_fails_and_stops_its_reads() -> None:
    """(1) Two reads stall; (2) the peer dies: both fail and stop; (3) connecting asks the transport again, and fails."""

    async def test() -> None:
        async with world() as w:
            w.fabric.hold(w.peer.incarnation)
            reads = [w.read([1], [2]), w.read([3], [4])]
            w.peer.kill()
            for read in reads:
                with pytest.raises(TransferFailed):
                    await read.result
                await read.stopped
            with pytest.raises(TransferFailed):
                await w.thread.connect(w.peer.incarnation, w.peer.metadata)

    run(test)


def test_a_read_adrift_keeps_its_blocks_until_the_transport_is_closed() -> None:
    async def test() -> None:
        async with world(stuck_after_s=0.05) as w:
            w.fabric.set_adrift(w.peer.incarnation)
            read = w.read([1], [2])
            with pytest.raises(TransferFailed):
                await read.result
            await w.thread.unhealthy.wait()
            assert not read.is_stopped
        assert read.is_stopped

    run(test)


def test_a_stuck_read_makes_the_worker_unhealthy() -> None:
    async def test() -> None:
        async with world(stuck_after_s=0.05) as w:
            w.fabric.hold(w.peer.incarnation)
            w.read([1], [2])
            await w.thread.unhealthy.wait()
            assert "not stopped" in w.thread.unhealthy_reason

    run(test)


def test_a_full_table_of_reads_refuses_more() -> None:
    async def test() -> None:
        async with world(max_reads=2) as w:
            w.fabric.hold(w.peer.incarnation)
            reads = [w.read([1], [2]), w.read([3], [4])]
            with pytest.raises(TransferFailed, match="have not stopped"):
                w.read([5], [6])
            w.fabric.resume(w.peer.incarnation)
            await asyncio.gather(*(read.stopped for read in reads))
            await w.read([5], [6]).result

    run(test)


class Blocking:
    """A transport whose posts block, as a copy within one host does."""

    def __init__(self, transport: Transport) -> None:
        self.inner = transport
        self.may_post = threading.Event()
        self.posts = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    async def until_posted(self) -> None:
        while not self.posts:  # noqa: ASYNC110 - of another thread
            await asyncio.sleep(0.001)

    def post_read(self, *args: object) -> TransportRead:
        self.posts += 1
        assert self.may_post.wait(30)
        return self.inner.post_read(*args)  # type: ignore[arg-type]


def test_deadlines_hold_while_the_transport_blocks() -> None:
    """(1) A copy blocks the thread; (2) both deadlines pass on time; (3) the read behind it is never posted."""

    async def test() -> None:
        made: list[Blocking] = []
        async with world(lambda transport: made.append(Blocking(transport)) or made[-1]) as w:  # type: ignore[func-returns-value, return-value]
            blocked = w.read([1], [2], deadline_s=LATE_S)
            await made[0].until_posted()
            queued = w.read([3], [4], deadline_s=0.1)
            for read in (blocked, queued):
                with pytest.raises(TransferFailed):
                    await read.result
                assert not read.is_stopped
            made[0].may_post.set()
            await blocked.stopped
            await queued.stopped
            assert made[0].posts == 1
            assert w.pool.digest([4]) == Pool().digest([4])

    run(test)


def test_a_thread_that_does_not_end_is_left_behind_and_said() -> None:
    """Closing is bounded, and a read in a blocked copy never counts as stopped."""

    async def test() -> None:
        fabric, pool = FakeFabric(), Pool()
        peer = FakePeer(fabric)
        made: list[Blocking] = []
        thread = TransferThread(
            lambda: made.append(Blocking(FakeTransport(fabric, new_incarnation(), [pool.region]))) or made[-1]  # type: ignore[func-returns-value, arg-type, return-value]
        )
        await thread.start()
        await thread.connect(peer.incarnation, peer.metadata)
        read = thread.read(peer.incarnation, peer.region, [1], [2], deadline_s=30, into=pool.region)
        await made[0].until_posted()
        await thread.close(timeout_s=0.05)
        with pytest.raises(TransferFailed, match="closing"):
            await read.result
        assert thread.unhealthy.is_set()
        assert not read.is_stopped
        made[0].may_post.set()
        await thread.close()
        assert read.is_stopped

    run(test)


class Dying:
    """A transport with a bug."""

    def __init__(self, transport: Transport) -> None:
        self.inner = transport

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def poll(self, handle: TransportRead) -> bool:
        raise ZeroDivisionError("a bug")


def test_death_of_the_thread_is_a_loss_of_this_worker_and_no_bug_that_a_client_hears_of() -> None:
    """Everything that waits, and everything that is asked for after it, fails as work does whose worker is lost: the
    cluster does it again elsewhere. The worker is unhealthy, so its process ends."""
    assert TABLE[ReplicaLost.code].cluster_retries

    async def test() -> None:
        async with world(Dying) as w:  # type: ignore[arg-type]
            w.fabric.hold(w.peer.incarnation)
            reads = [w.read([i], [i]) for i in range(3)]
            for read in reads:
                with pytest.raises(ReplicaLost, match="a bug"):
                    await read.result
                await read.stopped  # the transport was closed
            assert w.thread.unhealthy.is_set()
            with pytest.raises(ReplicaLost, match="a bug"):
                w.read([1], [1])
            with pytest.raises(ReplicaLost, match="a bug"):
                await w.thread.connect(new_incarnation(), b"")

    run(test)


def test_a_factory_that_fails_fails_the_start() -> None:
    def factory() -> Transport:
        raise TransferFailed("no such device")

    async def test() -> None:
        thread = TransferThread(factory)
        with pytest.raises(TransferFailed, match="no such device"):
            await thread.start()
        await thread.close()

    run(test)


def test_closing_fails_and_stops_what_is_in_flight() -> None:
    async def test() -> None:
        async with world() as w:
            w.fabric.hold(w.peer.incarnation)
            read = w.read([1], [2])
            await w.thread.close()
            with pytest.raises(TransferFailed, match="closing"):
                await read.result
            assert read.is_stopped
            with pytest.raises(TransferFailed, match="closing"):
                w.read([1], [2])
            w.fabric.resume(w.peer.incarnation)

    run(test)


def test_a_peer_in_use_is_forgotten_only_after_its_reads() -> None:
    """(1) A read stalls; (2) disconnect is asked for; (3) the read still arrives; (4) then a read needs `connect`."""

    async def test() -> None:
        async with world() as w:
            w.fabric.hold(w.peer.incarnation)
            read = w.read([1], [2])
            w.thread.disconnect(w.peer.incarnation)
            w.fabric.resume(w.peer.incarnation)
            await read.result
            with pytest.raises(TransferFailed, match="not connected"):
                await w.read([1], [2]).result
            await w.thread.connect(w.peer.incarnation, w.peer.metadata)
            await w.read([1], [3]).result

    run(test)


class Remembering:
    """A transport that knows a peer from `connect` until `disconnect`, as NIXL's does, dead or not."""

    def __init__(self, transport: Transport) -> None:
        self.inner = transport
        self.known: set[Incarnation] = set()

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def connect(self, incarnation: Incarnation, metadata: bytes) -> None:
        self.known.add(incarnation)
        self.inner.connect(incarnation, metadata)

    def disconnect(self, incarnation: Incarnation) -> None:
        self.inner.disconnect(incarnation)
        self.known.discard(incarnation)


@asynccontextmanager
async def remembering() -> AsyncIterator[tuple[World, Remembering]]:
    made: list[Remembering] = []

    def wrap(transport: Transport) -> Transport:
        made.append(Remembering(transport))
        return made[0]  # type: ignore[return-value]

    async with world(wrap) as w:
        yield w, made[0]


async def until_known(transport: Remembering, *peers: FakePeer) -> None:
    """It is the transfer thread that forgets, after it has told of the read."""
    async with asyncio.timeout(30):
        while transport.known != {peer.incarnation for peer in peers}:  # noqa: ASYNC110 - another thread's set has no event
            await asyncio.sleep(0.001)


def test_a_peer_that_died_in_a_read_is_forgotten_with_its_last_read() -> None:
    """Six of them, one after the other, without anybody asking for it; the one that lives stays connected."""

    async def test() -> None:
        async with remembering() as (w, transport):
            for seed in range(2, 8):
                dying = FakePeer(w.fabric, seed=seed)
                await w.thread.connect(dying.incarnation, dying.metadata)
                w.fabric.hold(dying.incarnation)
                reads = [
                    w.thread.read(dying.incarnation, dying.region, [i], [i], deadline_s=30, into=w.pool.region)
                    for i in range(3)
                ]
                dying.kill()
                await asyncio.gather(*(read.stopped for read in reads))
            await until_known(transport, w.peer)
            await w.read([1], [2]).result

    run(test)


def test_a_dead_peer_that_could_not_be_connected_anew_is_forgotten() -> None:
    async def test() -> None:
        async with remembering() as (w, transport):
            w.peer.kill()
            w.thread.disconnect(w.peer.incarnation)
            with pytest.raises(TransferFailed):
                await w.thread.connect(w.peer.incarnation, w.peer.metadata)
            await until_known(transport)

    run(test)


def test_a_peer_whose_read_was_late_is_forgotten_when_it_is_asked_for() -> None:
    """Its connection is good, so that nobody but its client lets go of it."""

    async def test() -> None:
        async with remembering() as (w, transport):
            with pytest.raises(TransferFailed):
                await w.read([1], [2], deadline_s=-1.0).result
            assert transport.known == {w.peer.incarnation}
            w.thread.disconnect(w.peer.incarnation)
            await until_known(transport)

    run(test)


def test_the_pace_of_a_peer_that_is_gone_is_not_kept() -> None:
    """(1) Its client lets go of it while its read is in flight; (2) it dies; (3) the next peer's pace is all there is."""

    async def test() -> None:
        async with world() as w:
            w.fabric.hold(w.peer.incarnation)
            read = w.read([1], [2])
            w.thread.disconnect(w.peer.incarnation)
            w.peer.kill()
            await read.stopped
            assert w.thread.num_paces == 0

    run(test)


def test_connects_at_once_share_one_answer() -> None:
    async def test() -> None:
        async with world() as w:
            other = FakePeer(w.fabric, seed=5)
            await asyncio.gather(*(w.thread.connect(other.incarnation, other.metadata) for _ in range(5)))
            read = w.thread.read(other.incarnation, other.region, [0], [0], deadline_s=30, into=w.pool.region)
            await read.result
            assert w.pool.digest([0]) == other.digest([0])

    run(test)
