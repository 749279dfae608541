"""Links on their own thread: what the main loop does or fails to do is not felt by workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdserve.core.errors import ConfigError
from router.core import events as ev
from router.workers import link_thread
from router.workers.link_thread import LinkThread
from router.workers.wire import welcome
from testkit.fake_worker import DECODE, FakeWorker

WAIT_S = 20.0


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
    monkeypatch.setattr(link_thread, "STUCK_S", 0.0)
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


def test_more_than_the_main_loop_may_leave_unheard_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_thread, "MAX_HEARD", 5)

    async def story() -> None:
        async with served() as (core, address):
            thread, linked, seen = beat_elsewhere(address, 1000)
            thread.start()
            await asyncio.to_thread(linked.wait, WAIT_S)
            thread.join(WAIT_S)  # this loop takes nothing meanwhile
            assert seen
            assert seen[0] < 1000
            assert len(core.links._heard) <= 5 + 1  # and that the link has ended

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
        monkeypatch.setattr(link_thread, "stop_server", broken)
        assert links._stop is not None
        links._loop.call_soon_threadsafe(links._stop.set)
        await told.wait()
        await links.close()

    with caplog.at_level("CRITICAL"):
        run(story())
    assert "thread of workers' links broke" in caplog.text
