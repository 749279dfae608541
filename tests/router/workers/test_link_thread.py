"""Links on their own thread: what the main loop does or fails to do is not felt by workers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdserve.core.block_hash import PrefixDelta
from pdserve.core.blocks import BlockCounts
from pdserve.core.errors import ConfigError
from pdserve.core.worker import WorkerLoad
from router.core import events as ev
from router.workers import link as router_link
from router.workers.link import LinkThread
from router.workers.wire import welcome
from testkit.fake_worker import DECODE, FakeWorker

WAIT_S = 60.0


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await story

    asyncio.run(bounded())


class Core:
    """Welcomes everyone, and breaks when it hears what it is told to break on."""

    def __init__(self) -> None:
        self.links = LinkThread("")
        self.heard: list[ev.WorkerEvent] = []
        self.breaks_on: type[Any] | None = None

    def tell(self, event: ev.WorkerEvent) -> None:
        self.heard.append(event)
        if type(event) is self.breaks_on:
            raise AssertionError("planted")
        if isinstance(event, ev.WorkerJoined):
            self.links.send(event.link, welcome(1))  # type: ignore[arg-type]


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Core, str]]:
    core = Core()
    port = await core.links.start(core.tell, "127.0.0.1", 0)
    try:
        yield core, f"127.0.0.1:{port}"
    finally:
        await core.links.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "links"]


def beat_elsewhere(address: str, count: int) -> tuple[threading.Thread, threading.Event, list[int]]:
    """A worker on a thread and loop of its own, that ends when it has `count` answers or was hung up on."""
    linked, seen = threading.Event(), list[int]()

    async def beat() -> None:
        async with asyncio.timeout(WAIT_S), FakeWorker(DECODE, address, heartbeat_interval_s=0.02) as worker:
            linked.set()
            await worker.wait_for(lambda: worker.alive_seen >= count or worker.refused is not None)
            seen.append(worker.alive_seen)

    return threading.Thread(target=asyncio.run, args=(beat(),)), linked, seen


def test_heartbeats_are_answered_while_the_main_loop_stands_still() -> None:
    async def story() -> None:
        async with served() as (core, address):
            thread, linked, seen = beat_elsewhere(address, 50)
            thread.start()
            await asyncio.to_thread(linked.wait, WAIT_S)
            thread.join(WAIT_S)  # without a breath of this loop
            assert seen
            assert seen[0] >= 50
            while not any(isinstance(event, ev.WorkerLeft) for event in core.heard):  # noqa: ASYNC110 - bounded by `run`
                await asyncio.sleep(0.01)
            kinds = [type(event) for event in core.heard]
            assert (kinds[0], kinds[-1]) == (ev.WorkerJoined, ev.WorkerLeft)
            assert kinds.count(ev.HeartbeatSeen) >= 50

    run(story())


def test_a_main_loop_that_hangs_for_ever_is_not_vouched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_link, "STUCK_S", 0.0)
    thread = LinkThread("")
    assert thread._main_takes()
    thread._heard_since_s = 0.0
    assert not thread._main_takes()


def test_a_bug_of_the_core_costs_the_link_that_met_it_and_no_other() -> None:
    async def story() -> None:
        async with served() as (core, address), FakeWorker(DECODE, address, "d-0", heartbeat_interval_s=60) as steady:
            core.breaks_on = ev.HeartbeatSeen
            async with FakeWorker(DECODE, address, "d-1", heartbeat_interval_s=0.02) as other:
                await other.wait_for(lambda: other.refused is not None)
            assert steady.refused is None

    run(story())


@pytest.mark.parametrize("limit", ["MAX_HEARD", "MAX_HEARD_OF_LINK"])
def test_what_the_main_loop_leaves_unheard_waits_at_its_sender_and_ends_no_link(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(1) The main loop takes nothing while a worker sends 100 heartbeats, and five may wait. (2) It takes all of them."""
    monkeypatch.setattr(router_link, limit, 5)
    monkeypatch.setattr(router_link, "ROOM_S", 0.001)

    async def story() -> None:
        async with served() as (core, address), FakeWorker(DECODE, address, heartbeat_interval_s=60) as worker:
            core.links._heard_since_s = time.monotonic()  # as if this loop had been woken, and had no turn yet
            worker._outbound.bundles = False  # one message, whatever is in it, may exceed the limits
            for _ in range(100):
                worker._send(heartbeat=worker.heartbeat())
            for _ in range(50):
                await asyncio.sleep(0.002)
                assert len(core.links._heard) <= 5
            assert len(worker._outbound._waiting) > 50, "little is on the way, so later messages become bundles"
            core.links._take_heard()
            await worker.wait_for(lambda: worker.alive_seen == 100)
            assert [type(event) for event in core.heard[1:]].count(ev.HeartbeatSeen) == len(core.heard) - 1
            assert worker.refused is None

    run(story())


def test_a_port_that_is_taken_is_named_and_leaves_no_thread() -> None:
    async def story() -> None:
        async with served() as (_, address):
            second = LinkThread("")
            with pytest.raises(ConfigError, match="--link-port"):
                await second.start(lambda event: None, "127.0.0.1", int(address.rpartition(":")[2]))
            await second.close()

    run(story())


def test_a_thread_that_breaks_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(server: Any) -> None:
        await server.stop(None)
        raise AssertionError("planted")

    async def story() -> None:
        links, told = LinkThread(""), asyncio.Event()
        await links.start(lambda event: None, "127.0.0.1", 0, told.set)
        assert links._loop is not None
        monkeypatch.setattr(router_link, "stop_server", broken)
        assert links._stop is not None
        links._loop.call_soon_threadsafe(links._stop.set)
        await told.wait()
        await links.close()

    with caplog.at_level("CRITICAL"):
        run(story())
    assert "thread of workers' links broke" in caplog.text


def test_others_have_turns_while_events_come_faster_than_they_are_taken() -> None:
    async def story() -> None:
        async with served() as (core, _):
            turns: list[int] = []

            def tell(event: ev.WorkerEvent) -> None:
                core.heard.append(event)
                if not turns and len(core.heard) < 200_000:
                    core.links._hear(event)

            core.links._deliver = tell
            core.links._hear(ev.HeartbeatSeen(ev.LinkId(1), WorkerLoad(BlockCounts(1, 1, 0, 0, 0))))
            asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(turns.append, len(core.heard)))
            while not turns or core.links._heard:  # noqa: ASYNC110 - bounded by `run`
                await asyncio.sleep(0.01)
            assert turns[0] < 200_000

    run(story())


@pytest.mark.parametrize("kind", ["heartbeats", "keys"])
def test_a_worker_that_sends_without_end_waits_and_no_other_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_link, "MAX_HEARD_OF_LINK", 100)
    load = WorkerLoad(BlockCounts(1, 1, 0, 0, 0))
    keys = PrefixDelta(1, tuple(range(160)), (), 0)

    async def story() -> None:
        async with served() as (core, _):
            while core.links._has_room(ev.LinkId(1)):
                core.links._hear(
                    ev.HeartbeatSeen(ev.LinkId(1), load) if kind == "heartbeats" else ev.PrefixSeen(ev.LinkId(1), keys)
                )
            assert len(core.links._heard) == (100 if kind == "heartbeats" else 10)
            assert core.links._has_room(ev.LinkId(2))
            core.links._hear(ev.HeartbeatSeen(ev.LinkId(2), load))
            while core.links._heard:  # noqa: ASYNC110 - bounded by `run`
                await asyncio.sleep(0.01)
            assert core.links._has_room(ev.LinkId(1))
            for link in (1, 2):
                core.links._hear(ev.WorkerLeft(ev.LinkId(link)))
            while core.links._heard:  # noqa: ASYNC110 - bounded by `run`
                await asyncio.sleep(0.01)
            assert not core.links._heard_weight
            assert not core.links._taken_weight

    run(story())
