"""A stream that breaks while both ends live is taken up again, and the core hears nothing of it. Real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pdserve.core.worker import LINK_VERSIONS
from pdserve.rpc.server import make_server
from pdserve.rpc.v1 import common_pb2, decode_pb2, link_pb2, link_pb2_grpc
from pdserve.worker.link import RouterLink
from router.core import events as ev
from router.workers.link import LinkService
from router.workers.wire import welcome

WAIT_S = 60.0
LINK = ev.LinkId(1)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


class Proxy:
    """Carries TCP connections to a port, and cuts all of them on demand."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: set[asyncio.StreamWriter] = set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._open |= {writer, far_writer}
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(4096):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()

    def cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()


class Ends:
    """A worker's end and the router's end of one link, with a proxy between them."""

    def __init__(self, link_version: int) -> None:
        self.heard: list[Any] = []
        self.taken: list[int] = []
        self.lost = 0
        self.link_version = link_version
        self.over = asyncio.Event()
        """Set: the worker's process is known to have ended."""
        self.service = LinkService("", self.hear, lambda: True, return_s=WAIT_S, ended=self._ended)
        self.link: RouterLink
        self.proxy: Proxy

    async def _ended(self, address: str) -> None:
        await self.over.wait()

    def hear(self, event: Any) -> None:
        self.heard.append(event)
        if isinstance(event, ev.WorkerJoined):
            self.service.send(event.link, welcome(1, self.link_version))  # type: ignore[arg-type]

    @property
    def handles(self) -> list[int]:
        return [event.handle for event in self.heard if isinstance(event, ev.Reserved)]

    @property
    def kinds(self) -> list[type[Any]]:
        return [type(event) for event in self.heard if isinstance(event, ev.WorkerJoined | ev.WorkerLeft)]

    def on_lost(self) -> None:
        self.lost += 1

    def say(self, handle: int) -> None:
        """Each side says something to the other one."""
        self.link.send(link_pb2.WorkerMessage(reserved=decode_pb2.Reserved(handle=handle)))
        self.service.send(LINK, link_pb2.RouterMessage(cancel=link_pb2.Cancel(handle=handle)))


@asynccontextmanager
async def linked(link_version: int = LINK_VERSIONS.newest) -> AsyncIterator[Ends]:
    ends = Ends(link_version)
    server = make_server(max_receive_bytes=1 << 20)
    link_pb2_grpc.add_WorkerLinkServicer_to_server(ends.service, server)
    ends.proxy = Proxy(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    listener = await asyncio.start_server(ends.proxy.carry, "127.0.0.1", 0)
    ends.link = RouterLink(
        f"127.0.0.1:{listener.sockets[0].getsockname()[1]}",
        "",
        lambda: common_pb2.WorkerHello(worker_id="d", role=common_pb2.ROLE_DECODE, address="127.0.0.1:1"),
        common_pb2.WorkerLoad,
        heartbeat_interval_s=0.05,
        router_lost_s=WAIT_S,
        on_command=lambda message: ends.taken.append(message.cancel.handle),
        on_lost=ends.on_lost,
        make_beats=None,
    )
    running = asyncio.create_task(ends.link.run())
    try:
        async with asyncio.timeout(WAIT_S):
            await ends.link.connected.wait()
            yield ends
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        ends.proxy.cut()
        listener.close()
        await server.stop(None)
        await ends.service.close()


def test_a_link_that_is_cut_again_and_again_loses_nothing_and_says_nothing_twice() -> None:
    async def story() -> None:
        async with linked() as ends:
            for turn in range(6):
                for handle in range(200):
                    ends.say(200 * turn + handle)
                    if handle % 20 == 0:
                        await asyncio.sleep(0)
                ends.proxy.cut()
                for handle in range(5):
                    ends.say(10_000 + 5 * turn + handle)  # while there is no stream
                await until(lambda turn=turn: ends.link.streams_resumed > turn)  # type: ignore[misc]
            said: list[int] = []
            for turn in range(6):
                said += [*range(200 * turn, 200 * turn + 200), *range(10_000 + 5 * turn, 10_005 + 5 * turn)]
            await until(lambda: len(ends.handles) >= len(said) and len(ends.taken) >= len(said))
            assert ends.handles == said
            assert ends.taken == said
            assert (ends.kinds, ends.lost) == ([ev.WorkerJoined], 0)

    asyncio.run(story())


def test_a_worker_whose_process_has_ended_is_lost_at_once() -> None:
    """The wait for its return has a minute; the evidence ends it."""

    async def story() -> None:
        async with linked() as ends:
            ends.over.set()
            ends.proxy.cut()
            await until(lambda: ev.WorkerLeft in ends.kinds)
            assert ends.kinds[:2] == [ev.WorkerJoined, ev.WorkerLeft]

    asyncio.run(story())


def test_a_link_that_the_core_has_given_up_is_not_taken_up_again() -> None:
    async def story() -> None:
        async with linked() as ends:
            ends.service._by_key.clear()
            ends.proxy.cut()
            await until(lambda: ends.lost == 1 and len(ends.kinds) > 1)
            assert ends.link.streams_resumed == 0

    asyncio.run(story())


def test_an_older_side_goes_on_as_before() -> None:
    async def story() -> None:
        async with linked(link_version=4) as ends:
            ends.proxy.cut()
            await until(lambda: ends.lost == 1 and ends.kinds.count(ev.WorkerJoined) == 2)
            assert ends.link.streams_resumed == 0
            assert ends.kinds == [ev.WorkerJoined, ev.WorkerLeft, ev.WorkerJoined]

    asyncio.run(story())
