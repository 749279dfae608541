"""The router's end of the link: what a worker's numbers tell."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from pdserve.core.block_hash import MAX_DELTA_KEYS
from pdserve.core.errors import InternalBug
from pdserve.core.ids import Handle
from pdserve.rpc.bundle import unbundled
from pdserve.rpc.server import make_server
from pdserve.rpc.v1 import common_pb2, decode_pb2, link_pb2, link_pb2_grpc
from router.core import events as ev
from router.workers.link import LinkService
from router.workers.wire import hello_from_wire, welcome

WAIT_S = 60.0


class Core:
    """What the core heard; it welcomes everyone."""

    def __init__(self) -> None:
        self.heard: list[ev.Event] = []
        self.left = asyncio.Event()
        self.service = LinkService("", self.tell)

    def tell(self, event: ev.Event) -> None:
        self.heard.append(event)
        if isinstance(event, ev.WorkerJoined):
            self.service.send(event.link, welcome(1))  # type: ignore[arg-type]
        if isinstance(event, ev.WorkerLeft):
            self.left.set()

    @property
    def reserved(self) -> list[Handle]:
        return [event.handle for event in self.heard if isinstance(event, ev.Reserved)]


@asynccontextmanager
async def dialled(*, takes_bundles: bool = False) -> AsyncIterator[tuple[Core, grpc.aio.StreamStreamCall]]:
    core = Core()
    server = make_server(max_receive_bytes=1 << 20)
    link_pb2_grpc.add_WorkerLinkServicer_to_server(core.service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(WAIT_S), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = link_pb2_grpc.WorkerLinkStub(channel).Connect()
        hello = common_pb2.WorkerHello(worker_id="d", role=common_pb2.ROLE_DECODE)
        await call.write(link_pb2.WorkerMessage(hello=hello, number=1, takes_bundles=takes_bundles))
        yield core, call
        call.cancel()
    await server.stop(None)


def reserved(handle: int, number: int) -> link_pb2.WorkerMessage:
    return link_pb2.WorkerMessage(reserved=decode_pb2.Reserved(handle=handle), number=number)


async def read_to_end(call: grpc.aio.StreamStreamCall) -> None:
    """Raises the status of a call that did not end well."""
    while await call.read() is not grpc.aio.EOF:
        pass
    await call


def test_commands_are_numbered_from_one():
    async def story() -> None:
        async with dialled() as (core, call):
            first = await call.read()
            assert (first.WhichOneof("body"), first.number) == ("welcome", 1)
            core.service.send(ev.LinkId(1), link_pb2.RouterMessage(cancel=link_pb2.Cancel(handle=1)))
            assert (await call.read()).number == 2

    asyncio.run(story())


def test_what_a_worker_says_twice_is_heard_once():
    async def story() -> None:
        async with dialled() as (core, call):
            for message in (reserved(1, 2), reserved(1, 2), reserved(2, 3)):
                await call.write(message)
            await call.done_writing()
            await core.left.wait()
            assert core.reserved == [1, 2]

    asyncio.run(story())


def test_a_lost_message_ends_the_link_before_anything_after_it_is_heard():
    async def story() -> None:
        async with dialled() as (core, call):
            for message in (reserved(1, 2), reserved(3, 4)):
                await call.write(message)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_to_end(call)
            await core.left.wait()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "message 3 of the link was lost" in (caught.value.details() or "")
            assert core.reserved == [1]

    asyncio.run(story())


def bundle(number: int, *handles: int) -> link_pb2.WorkerMessage:
    return link_pb2.WorkerMessage(bundle=[reserved(handle, 0).SerializeToString() for handle in handles], number=number)


def test_a_bundle_is_heard_message_by_message_and_only_once():
    async def story() -> None:
        async with dialled() as (core, call):
            for message in (bundle(2, 1, 2), bundle(2, 1, 2), reserved(3, 3)):
                await call.write(message)
            await call.done_writing()
            await core.left.wait()
            assert core.reserved == [1, 2, 3]

    asyncio.run(story())


def test_a_bundle_that_cannot_be_read_ends_the_link():
    async def story() -> None:
        async with dialled() as (core, call):
            await call.write(link_pb2.WorkerMessage(bundle=[reserved(1, 0).SerializeToString(), b"\xff"], number=2))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_to_end(call)
            await core.left.wait()
            assert "bundle 2 of the link cannot be read" in (caught.value.details() or "")
            assert core.reserved == []

    asyncio.run(story())


@pytest.mark.parametrize("takes_bundles", [True, False])
def test_commands_of_one_moment_are_a_bundle_for_a_worker_that_takes_bundles(takes_bundles: bool):
    async def story() -> None:
        async with dialled(takes_bundles=takes_bundles) as (core, call):
            assert (await call.read()).takes_bundles
            for handle in (1, 2, 3):
                core.service.send(ev.LinkId(1), link_pb2.RouterMessage(cancel=link_pb2.Cancel(handle=handle)))
            got = [await call.read()]
            while len(got) < 3 and not takes_bundles:
                got.append(await call.read())
            assert [one.cancel.handle for message in got for one in unbundled(message)] == [1, 2, 3]
            assert [message.number for message in got] == ([2] if takes_bundles else [2, 3, 4])

    asyncio.run(story())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("name", ["prompt_tokens_per_s", "decode_step_s", "engine_stalled_s"])
def test_a_measured_number_that_is_none_ends_the_link(name: str, value: float):
    async def story() -> None:
        async with dialled() as (core, call):
            await call.write(link_pb2.WorkerMessage(heartbeat=common_pb2.WorkerLoad(**{name: value}), number=2))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_to_end(call)
            await core.left.wait()
            assert f"WorkerLoad.{name}: must be from 0 to a finite number, got {value}" in (caught.value.details() or "")
            assert [type(event) for event in core.heard] == [ev.WorkerJoined, ev.WorkerLeft]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("delta", "said"),
    [
        (link_pb2.PrefixDelta(number=1, added=bytes(8 * MAX_DELTA_KEYS), removed=bytes(8)), "65537 keys; at most 65536"),
        (link_pb2.PrefixDelta(number=1, added=bytes(9)), "PrefixDelta 1: "),
        (link_pb2.PrefixDelta(number=1, removed=bytes(7)), "PrefixDelta 1: "),
    ],
)
def test_a_delta_of_too_many_keys_or_of_parts_of_keys_ends_the_link(delta: link_pb2.PrefixDelta, said: str):
    async def story() -> None:
        async with dialled() as (core, call):
            await call.write(link_pb2.WorkerMessage(prefix_delta=delta, number=2))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_to_end(call)
            await core.left.wait()
            assert said in (caught.value.details() or "")
            assert [type(event) for event in core.heard] == [ev.WorkerJoined, ev.WorkerLeft]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("worker_id", "said"), [("", "without role or worker_id"), ("x" * 254, "has 254 characters; at most 253")]
)
def test_a_worker_id_that_every_metric_would_repeat_is_refused(worker_id: str, said: str):
    wire = common_pb2.WorkerHello(worker_id=worker_id, role=common_pb2.ROLE_DECODE)
    with pytest.raises(InternalBug, match=said):
        hello_from_wire(wire)


@pytest.mark.parametrize("text", ["evil\x1b[31m", "\x9b31m", "two\nlines", "x" * 1001])
@pytest.mark.parametrize("name", ["worker_id", "address", "model_fingerprint", "dtype", "quantization", "flip_obstacle"])
def test_a_text_that_would_command_or_fill_an_operators_terminal_is_refused(name: str, text: str):
    wire = common_pb2.WorkerHello(**{"worker_id": "d", "role": common_pb2.ROLE_DECODE, name: text})
    with pytest.raises(InternalBug, match=name) as caught:
        hello_from_wire(wire)
    assert caught.value.message.isprintable()


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", ["step_timeout_s", "peak_flops_per_s", "peak_bytes_per_s"])
def test_a_hello_with_a_broken_number_is_refused(name: str, number: float):
    wire = common_pb2.WorkerHello(**{"worker_id": "d", "role": common_pb2.ROLE_DECODE, name: number})
    with pytest.raises(InternalBug, match=f"Hello.{name}: must be from 0 to a finite number"):
        hello_from_wire(wire)


def test_a_message_of_a_newer_worker_is_told_once_and_ends_nothing(caplog):
    async def story() -> None:
        async with dialled() as (core, call):
            newer = link_pb2.WorkerMessage.FromString(bytes((0xFA, 0x3F, 0x00)))  # field 1023, of length 0
            for number in (2, 3):
                newer.number = number
                await call.write(newer)
            await call.write(reserved(7, 4))
            while not core.reserved:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
            assert not core.left.is_set()

    asyncio.run(story())
    assert caplog.text.count("decode worker d sent a message that this router does not know") == 1
    assert "upgrade this router" in caplog.text


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("hung up", "hung up or died"),
        ("died", "hung up or died"),
        ("died after a word", "the engine is stuck"),
        ("closed", "the core closed it"),
    ],
)
def test_the_log_tells_every_end_of_a_link_and_why(end: str, why: str, caplog):
    async def story() -> None:
        async with dialled() as (core, call):
            assert (await call.read()).WhichOneof("body") == "welcome"
            match end:
                case "hung up":
                    await call.done_writing()
                case "died after a word":  # the core may close the link after that, or not
                    await call.write(link_pb2.WorkerMessage(worker_lost=link_pb2.WorkerLost(message=why), number=2))
                    while not any(isinstance(event, ev.WorkerLost) for event in core.heard):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    call.cancel()
                case "died":  # gRPC cancels the call, as where the worker's process is killed
                    call.cancel()
                case _:
                    core.service.hang_up(ev.LinkId(1), InternalBug(why))
            await core.left.wait()

    asyncio.run(story())
    assert re.findall(r"decode worker d at .* ended: (.*)", caplog.text) == [why]
