"""The worker's end of the link, against a router that misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from pdserve.core.worker import LINK_VERSIONS
from pdserve.rpc.bundle import unbundled
from pdserve.rpc.channel import server_options
from pdserve.rpc.v1 import common_pb2, link_pb2, link_pb2_grpc
from pdserve.worker.link import RouterLink

WAIT_S = 60.0
BEAT_S = 0.05
LOST_S = 0.3  # where a silent router is to be left
NEVER_S = 600.0  # elsewhere: a test that stands still for a moment has not lost its router
KEPT_S = 3.0


class Router(link_pb2_grpc.WorkerLinkServicer):
    """Sends what it is told; answers a heartbeat with `answer`."""

    def __init__(self, script: Callable[[int], list[link_pb2.RouterMessage]], answer: bool | int) -> None:
        self.script = script
        self.answers = answer
        self.dialled = 0
        self.numbers: list[list[int]] = []
        self.said: list[link_pb2.WorkerMessage] = []

    async def Connect(self, messages: AsyncIterator[link_pb2.WorkerMessage], context: Any) -> None:
        self.dialled += 1
        seen: list[int] = []
        self.numbers.append(seen)
        for message in self.script(self.dialled):
            await context.write(message)
        async for message in messages:
            seen.append(message.number)
            self.said.append(message)
            if message.WhichOneof("body") == "heartbeat" and self.answers > 0:
                self.answers -= 1
                await context.write(link_pb2.RouterMessage(alive=link_pb2.Alive()))


class Side:
    """The worker: what it took, and how often it lost its link."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.versions: list[int] = []
        self.lost = 0
        self.link: RouterLink

    def on_command(self, message: link_pb2.RouterMessage) -> None:
        self.taken.append(message.cancel.handle)

    def on_lost(self) -> None:
        self.lost += 1


@asynccontextmanager
async def linked(router: Router, *, lost_s: float = NEVER_S) -> AsyncIterator[Side]:
    server = grpc.aio.server(options=server_options())
    link_pb2_grpc.add_WorkerLinkServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    side = Side()
    side.link = RouterLink(
        f"127.0.0.1:{port}",
        "",
        common_pb2.WorkerHello,
        common_pb2.WorkerLoad,
        heartbeat_interval_s=BEAT_S,
        router_lost_s=lost_s,
        on_command=side.on_command,
        on_lost=side.on_lost,
        on_welcome=side.versions.append,
    )
    task = asyncio.create_task(side.link.run())
    try:
        yield side
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(None)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


def welcome() -> link_pb2.RouterMessage:
    return link_pb2.RouterMessage(welcome=link_pb2.Welcome(router_incarnation=1), number=1)


def cancel(handle: int, number: int) -> link_pb2.RouterMessage:
    return link_pb2.RouterMessage(cancel=link_pb2.Cancel(handle=handle), number=number)


def test_a_command_that_comes_twice_is_taken_once():
    async def story() -> None:
        router = Router(lambda _: [welcome(), cancel(1, 2), cancel(1, 2), cancel(2, 3)], answer=0)
        async with linked(router) as side:
            await until(lambda: len(side.taken) >= 2)
            assert side.taken == [1, 2]
            assert side.lost == 0

    asyncio.run(story())


def test_a_lost_command_ends_the_link_and_with_it_what_it_carried():
    """The worker cannot know what was lost; the router recovers all of it on a new link."""

    async def story() -> None:
        router = Router(lambda dialled: [welcome(), cancel(1, 2), cancel(3, 4)] if dialled == 1 else [welcome()], answer=0)
        async with linked(router) as side:
            await until(lambda: router.dialled == 2)
            assert side.taken == [1], "nothing is taken after the gap"
            assert side.lost == 1

    asyncio.run(story())


def test_what_the_worker_says_is_numbered_anew_on_each_link():
    async def story() -> None:
        router = Router(lambda dialled: [welcome(), cancel(1, 9)] if dialled == 1 else [welcome()], answer=0)
        async with linked(router):
            await until(lambda: router.dialled == 2 and len(router.numbers[1]) >= 3)
            assert router.numbers[1][:3] == [1, 2, 3]

    asyncio.run(story())


def test_a_router_that_stops_answering_heartbeats_is_left():
    """A link that is cut in one direction only: the worker still sends, and hears nothing any more."""

    async def story() -> None:
        router = Router(lambda _: [welcome()], answer=2)
        async with linked(router, lost_s=LOST_S) as side:
            await until(lambda: side.lost >= 1 and router.dialled >= 2)

    asyncio.run(story())


def test_a_router_that_answers_is_kept_for_longer_than_the_bound():
    async def story() -> None:
        router = Router(lambda _: [welcome()], answer=1000)
        async with linked(router, lost_s=KEPT_S) as side:
            await until(lambda: bool(router.numbers) and len(router.numbers[0]) > 1.2 * KEPT_S / BEAT_S)
            assert router.dialled == 1
            assert side.lost == 0

    asyncio.run(story())


def test_a_router_that_reads_too_slowly_is_left_and_dialled_again(monkeypatch):
    """The queue is bounded, and its overflow ends the stream, not the worker."""
    monkeypatch.setattr("pdserve.worker.link.MAX_OUTBOUND", 3)

    async def story() -> None:
        router = Router(lambda _: [welcome()], answer=0)
        async with linked(router) as side:
            await until(lambda: router.dialled == 1)
            for _ in range(5):
                side.link.send(link_pb2.WorkerMessage())
            await until(lambda: router.dialled == 2)
            await until(lambda: side.lost == 1)

    asyncio.run(story())


def test_settling_waits_until_the_router_has_heard_everything():
    """A worker that leaves must not take its last tokens along: they may still wait to be written."""

    async def story() -> None:
        router = Router(lambda _: [welcome()], answer=1000)
        async with linked(router) as side:
            await until(lambda: bool(router.numbers) and len(router.numbers[0]) > 2)
            for _ in range(500):
                side.link.send(link_pb2.WorkerMessage())
            await side.link.settle()
            assert len(router.numbers[0]) >= 500 + 2

    asyncio.run(story())


def test_settling_with_a_router_that_stopped_answering_is_bounded():
    async def story() -> None:
        router = Router(lambda _: [welcome()], answer=2)
        async with linked(router, lost_s=KEPT_S) as side:
            await until(lambda: bool(router.numbers) and len(router.numbers[0]) > 2)
            async with asyncio.timeout(WAIT_S):
                await side.link.settle()

    asyncio.run(story())


def test_a_bundle_of_commands_is_taken_in_order_and_only_once():
    pieces = [cancel(handle, 0).SerializeToString() for handle in (1, 2)]
    bundle = link_pb2.RouterMessage(bundle=pieces, number=2)

    async def story() -> None:
        async with linked(Router(lambda _: [welcome(), bundle, bundle, cancel(3, 3)], answer=0)) as side:
            await until(lambda: len(side.taken) >= 3)
            assert side.taken == [1, 2, 3]
            assert side.lost == 0

    asyncio.run(story())


def test_a_bundle_that_cannot_be_read_ends_the_link():
    broken = link_pb2.RouterMessage(bundle=[cancel(1, 0).SerializeToString(), b"\xff"], number=2)

    async def story() -> None:
        router = Router(lambda dialled: [welcome(), broken] if dialled == 1 else [welcome()], answer=0)
        async with linked(router) as side:
            await until(lambda: router.dialled == 2)
            assert (side.taken, side.lost) == ([], 1)

    asyncio.run(story())


@pytest.mark.parametrize("bundled", [True, False])
@pytest.mark.parametrize("takes_bundles", [True, False])
def test_messages_of_one_moment_are_a_bundle_for_a_router_that_takes_bundles(takes_bundles: bool, bundled: bool):
    first = welcome()
    first.takes_bundles = takes_bundles
    if bundled:  # with a command of the same moment
        parts = [one.SerializeToString() for one in (first, cancel(1, 0))]
        first = link_pb2.RouterMessage(bundle=parts, number=1)

    async def story() -> None:
        router = Router(lambda _: [first], answer=0)
        async with linked(router) as side:
            await side.link.connected.wait()
            for _ in range(3):
                side.link.send(link_pb2.WorkerMessage(worker_lost=link_pb2.WorkerLost(message="x")))
            lost = "worker_lost"
            await until(lambda: [one.WhichOneof("body") for m in router.said for one in unbundled(m)].count(lost) == 3)
            assert router.said[0].takes_bundles
            assert [m.number for m in router.said] == list(range(1, len(router.said) + 1))
            assert any(m.bundle for m in router.said) == takes_bundles

    asyncio.run(story())


@pytest.mark.parametrize("version", [0, 1])
def test_both_sides_speak_the_version_that_the_router_names(version):
    async def story() -> None:
        named = link_pb2.RouterMessage(welcome=link_pb2.Welcome(link_version=version), number=1)
        router = Router(lambda _: [named, cancel(1, 2)], answer=0)
        async with linked(router) as side:
            await until(lambda: bool(side.taken))
            assert side.versions == [version]

    asyncio.run(story())


def test_a_router_of_another_age_is_dialled_again_and_never_served(caplog):
    """The worker says which side must be upgraded. It waits for that, since routers are upgraded while workers run."""

    async def story() -> None:
        too_new = link_pb2.RouterMessage(welcome=link_pb2.Welcome(link_version=99), number=1)
        router = Router(lambda dialled: [too_new if dialled <= 2 else welcome(), cancel(dialled, 2)], answer=0)
        async with linked(router) as side:
            await until(lambda: bool(side.taken))
            assert side.taken == [3]
            assert side.lost == 0

    asyncio.run(story())
    said = f"the router speaks version 99 of the link's protocol, this worker speaks {LINK_VERSIONS}: upgrade the older one"
    assert caplog.text.count(said) == 2


def test_a_message_of_a_newer_router_is_told_once_and_ends_nothing(caplog):
    async def story() -> None:
        newer = link_pb2.RouterMessage.FromString(bytes((0xFA, 0x3F, 0x00)))  # field 1023, of length 0
        first, second = (link_pb2.RouterMessage.FromString(newer.SerializeToString()) for _ in range(2))
        first.number, second.number = 2, 3
        router = Router(lambda _: [welcome(), first, second, cancel(5, 4)], answer=0)
        async with linked(router) as side:
            await until(lambda: bool(side.taken))
            assert (side.taken, side.lost) == ([5], 0)

    asyncio.run(story())
    assert caplog.text.count("a message that this worker does not know") == 1
    assert "upgrade this worker" in caplog.text
