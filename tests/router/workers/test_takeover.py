"""A stream that takes a link up may itself end before it is served. Whatever comes first, the link has one owner to the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from pdserve.core.errors import Unavailable
from pdserve.core.worker import LINK_VERSIONS
from pdserve.rpc.v1 import common_pb2, link_pb2
from router.core import events as ev
from router.workers.beat_port import BeatPort
from router.workers.link import LinkService
from router.workers.wire import welcome

WAIT_S = 60.0
LINK = ev.LinkId(1)
HELLO = link_pb2.WorkerMessage(hello=common_pb2.WorkerHello(worker_id="d", role=common_pb2.ROLE_DECODE), number=1)


class Call:
    """One call of a worker, as gRPC shows it to the service."""

    def __init__(self, first: link_pb2.WorkerMessage) -> None:
        self.to_read = asyncio.Queue[Any]()
        self.to_read.put_nowait(first)
        self.written: list[str | None] = []
        self.ends = asyncio.Event()
        self.may_end = asyncio.Event()
        """A read that is cancelled does not end before this."""
        self.aborts = asyncio.Event()
        self.may_tell = asyncio.Event()
        """The status of the call is not written before this."""
        self.may_tell.set()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def read(self) -> Any:
        try:
            return await self.to_read.get()
        except asyncio.CancelledError:
            self.ends.set()
            await self.may_end.wait()
            raise

    async def write(self, message: link_pb2.RouterMessage) -> None:
        self.written.append(message.WhichOneof("body"))

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        self.aborts.set()
        await self.may_tell.wait()
        raise grpc.aio.AbortError(details)


class Story:
    """A service and the calls of one worker. The worker's process is never known to have ended."""

    def __init__(self, return_s: float) -> None:
        self.beats = BeatPort(lambda: True)
        self.service = LinkService("", self._hear, return_s=return_s, beats=self.beats, ended=self._ended)
        self.waits = 0
        self.fails = False
        """True: it cannot be found out whether the process has ended."""
        self.left = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []
        self.made: list[Call] = []
        self.first = self.calls(HELLO)

    def _hear(self, event: Any) -> None:
        if isinstance(event, ev.WorkerJoined):
            self.service.send(event.link, welcome(1, LINK_VERSIONS.newest))
        if isinstance(event, ev.WorkerLeft):
            self.left.set()

    async def _ended(self, address: str) -> None:
        self.waits += 1
        if self.fails:
            raise OverflowError("a bug")
        await asyncio.Event().wait()

    def calls(self, first: link_pb2.WorkerMessage) -> Call:
        call = Call(first)
        self.made.append(call)
        self.tasks.append(asyncio.create_task(self.service.Connect(None, call)))
        return call

    def resumes(self) -> Call:
        (key,) = self.service._by_key
        return self.calls(link_pb2.WorkerMessage(resume=link_pb2.Resume(link_key=key)))

    def nothing_is_left(self) -> bool:
        return not self.service._links and not self.service._by_key and not self.beats._links


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event; the story's timeout bounds it
        await asyncio.sleep(0.001)


@asynccontextmanager
async def welcomed(return_s: float) -> AsyncIterator[Story]:
    story = Story(return_s)
    async with asyncio.timeout(WAIT_S):
        await until(lambda: "welcome" in story.first.written)
        yield story
        for call, task in zip(story.made, story.tasks, strict=True):
            call.may_end.set()
            task.cancel()
        await asyncio.gather(*story.tasks, return_exceptions=True)
        await story.service.close()
        assert story.nothing_is_left()


def test_a_stream_that_ends_before_it_is_served_leaves_no_link_without_an_owner() -> None:
    """(1) The worker takes its link up with a second stream. (2) The first one begins to end. (3) The second one ends
    meanwhile. The wait for the worker's return ends the link."""

    async def story() -> None:
        async with welcomed(return_s=0.01) as story:
            story.resumes()
            await story.first.ends.wait()
            story.tasks[1].cancel()
            await story.left.wait()
            assert story.nothing_is_left()

    asyncio.run(story())


def test_a_stream_that_ends_before_it_is_served_ends_a_link_that_was_closed_meanwhile() -> None:
    async def story() -> None:
        async with welcomed(return_s=WAIT_S) as story:
            story.resumes()
            await story.first.ends.wait()
            story.service._links[LINK].closed.set()
            story.tasks[1].cancel()
            await story.left.wait()
            assert (story.nothing_is_left(), story.waits) == (True, 0)

    asyncio.run(story())


def test_one_wait_is_begun_however_many_streams_end_before_they_are_served() -> None:
    """A second wait would end the link under the stream that is served at last."""

    async def story() -> None:
        async with welcomed(return_s=WAIT_S) as story:
            story.first.to_read.put_nowait(grpc.aio.EOF)
            await until(lambda: story.waits)
            link = story.service._links[LINK]
            await link.streams.acquire()  # as a stream does that has not ended yet
            for number in (1, 2):
                story.resumes()
                await asyncio.sleep(0)
                story.tasks[number].cancel()
                await asyncio.gather(story.tasks[number], return_exceptions=True)
            last = story.resumes()
            link.streams.release()
            await until(lambda: "resumed" in last.written)
            assert (story.waits, link.waiting, link.broken, story.left.is_set()) == (1, None, False, False)

    asyncio.run(story())


def test_a_stream_that_is_replaced_before_it_is_served_leaves_the_link_to_its_successor() -> None:
    async def story() -> None:
        async with welcomed(return_s=WAIT_S) as story:
            story.resumes()
            await story.first.ends.wait()
            last = story.resumes()
            await asyncio.sleep(0)
            story.tasks[1].cancel()
            await asyncio.gather(story.tasks[1], return_exceptions=True)
            story.first.may_end.set()
            await until(lambda: "resumed" in last.written)
            assert (story.waits, story.service._links[LINK].broken) == (0, False)

    asyncio.run(story())


def test_a_link_that_is_closed_while_a_stream_takes_it_up_is_not_heard_any_more() -> None:
    """(1) A second stream comes, while the link may still be taken up. (2) The core closes the link. (3) The first stream ends
    it. The second one must not put its key back among those that are heard and answered."""

    async def story() -> None:
        async with welcomed(return_s=WAIT_S) as story:
            second = story.resumes()
            await asyncio.sleep(0)
            story.service.hang_up(LINK, Unavailable("given up"))
            story.first.may_end.set()
            await second.aborts.wait()
            assert story.nothing_is_left()
            assert second.written == []

    asyncio.run(story())


def test_a_link_is_taken_up_while_the_status_of_its_old_stream_cannot_be_written() -> None:
    """What the worker has not read stands before it, and its old connection may be dead without having been closed."""

    async def story() -> None:
        async with welcomed(return_s=WAIT_S) as story:
            story.first.may_end.set()
            story.first.may_tell.clear()
            second = story.resumes()
            await story.first.aborts.wait()
            await until(lambda: "resumed" in second.written)
            assert not story.tasks[0].done()

    asyncio.run(story())


def test_an_error_is_no_evidence_that_a_process_has_ended() -> None:
    async def story() -> None:
        async with welcomed(return_s=WAIT_S) as story:
            story.fails = True
            story.first.may_end.set()
            story.first.to_read.put_nowait(grpc.aio.EOF)
            await until(lambda: story.waits)
            last = story.resumes()
            await until(lambda: "resumed" in last.written)
            assert not story.left.is_set()

    asyncio.run(story())
