"""The answer of one request on its connection: how many writes it takes, and who is told that the client left."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

import pytest
import uvicorn
from http_fakes import MODEL, FakeApi
from raw_http import Writes, post
from uvicorn.server import ServerState

from pdserve.config import RouterConfig
from pdserve.core.errors import Cancelled, Unavailable
from pdserve.core.report import Report
from pdserve.core.sampling import FinishReason, Placement
from router.api.answer import Delta
from router.api.request import GenerateInput
from router.http import build_app
from router.http.protocol import ConnectionTable, GuardedProtocol
from router.http.reply import Exchange, RunningCalls
from router.service.buffered_generation import BufferedGeneration

COMPLETIONS = "/v1/completions"
BODY = {"model": MODEL, "prompt": "p", "stream": True}
TIMEOUT_S = 60.0


async def connection(
    api: FakeApi, stalled_s: float = TIMEOUT_S, transport: Writes | None = None
) -> tuple[GuardedProtocol, Writes, ServerState]:
    config = uvicorn.Config(
        build_app(api, api.parser, RunningCalls(), RouterConfig()), lifespan="off", log_config=None, access_log=False
    )
    state = ServerState()
    protocol = GuardedProtocol(ConnectionTable(9), stalled_s, config=config, server_state=state, app_state={})
    transport = transport or Writes()
    protocol.connection_made(transport)
    return protocol, transport, state


async def ended(state: ServerState) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while state.tasks:
            await asyncio.gather(*state.tasks)


@pytest.mark.parametrize("words", [("a",), ("a", "b"), ("a", "b", "c", "d")])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_stream_takes_one_write_for_each_token(words: tuple[str, ...], version: bytes) -> None:
    """The head goes out with the first token, and the end with the last one."""

    async def run() -> None:
        protocol, transport, state = await connection(FakeApi(words=words))
        protocol.data_received(post(COMPLETIONS, BODY).replace(b"HTTP/1.1", b"HTTP/" + version))
        await ended(state)
        assert len(transport.parts) == len(words)
        assert transport.parts[0].startswith(b"HTTP/1.1 200 OK\r\n")
        assert transport.parts[-1].endswith(b"data: [DONE]\n\n" + (b"\r\n0\r\n\r\n" if version == b"1.1" else b""))
        assert (b"\r\ntransfer-encoding: chunked\r\n" in transport.parts[0]) == (version == b"1.1")
        assert all(b'"text":"%b"' % word.encode() in part for word, part in zip(words, transport.parts, strict=True))
        assert transport.closed == (version == b"1.0")
        assert (b"\r\nconnection: close\r\n" in transport.parts[0]) == (version == b"1.0")
        protocol.connection_lost(None)

    asyncio.run(run())


def test_a_client_that_takes_nothing_holds_its_answer_up() -> None:
    async def run() -> None:
        protocol, transport, state = await connection(FakeApi(words=("a",) * 5))
        protocol.pause_writing()
        protocol.data_received(post(COMPLETIONS, BODY))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not transport.parts
        protocol.resume_writing()
        await ended(state)
        assert len(transport.parts) == 5
        protocol.connection_lost(None)

    asyncio.run(run())


class Slow(Writes):
    """Its client never takes enough of the first part that `resume_writing` would be called."""

    protocol: GuardedProtocol

    def write(self, data: Any) -> None:
        super().write(data)
        if len(self.parts) == 1:
            self.protocol.pause_writing()

    def abort(self) -> None:
        self.closed = True
        self.protocol.connection_lost(ConnectionResetError())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_reads_a_byte_now_and_then_kept_its_answer_in_the_router(stream: bool) -> None:
    """The kernel ends a connection whose client takes nothing at all, and such a client takes something."""

    async def run() -> None:
        api = FakeApi(words=("a" * 100_000,) * 50)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            transport = Slow({"socket": ours})
            protocol, _, state = await connection(api, 0.05, transport)
            transport.protocol = protocol
            protocol.data_received(post(COMPLETIONS, {**BODY, "max_tokens": 50, "stream": stream}))
            await ended(state)
            assert transport.closed
            assert len(transport.parts) == 1
            assert len(transport.parts[0]) < 200_000
            assert struct.unpack("ii", ours.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)) == (1, 0)

    asyncio.run(run())


class Buffered(FakeApi):
    """Its one generation is the router's own."""

    generation: BufferedGeneration

    async def submit(self, request: GenerateInput) -> Any:
        self.generation = BufferedGeneration(request.request_id or "", (1,), lambda _: None)
        return self.generation


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("usage", [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}])
@pytest.mark.parametrize("choices", [1, 2])
def test_tokens_that_pile_up_before_a_slow_client_are_one_chunk(usage: Any, choices: int) -> None:
    """Its text, its tokens and the usage are what they would have been."""

    async def run() -> None:
        api = Buffered()
        prompt = "p" if choices == 1 else ["p", "q"]
        protocol, transport, state = await connection(api)
        protocol.data_received(post(COMPLETIONS, {**BODY, "prompt": prompt, "stream_options": usage}))
        await turns(10)
        generation = api.generation  # of the last choice
        for index in range(20):
            generation.push(Delta(index, (index,), f" {index}" if index != 7 else "", None))
            await turns(3)
            if index == 4:
                assert len(transport.parts) == 5
                protocol.pause_writing()
            if index == 14:
                assert len(transport.parts) <= 6
                protocol.resume_writing()
                await turns(5)
                assert len(transport.parts) <= 8
        generation.push(Delta(20, (20,), " 20", FinishReason.LENGTH))
        generation.end(Report(Placement.COLOCATED, "auto", 1, 21), None)
        await turns(5)
        events = [json.loads(line[6:]) for line in b"".join(transport.parts).split(b"\n") if line.startswith(b"data: {")]
        texts = [choice["text"] for event in events for choice in event["choices"]]
        assert "".join(texts) == "".join(f" {index}" for index in range(21) if index != 7)
        assert max(map(len, texts)) > len(" 10 11 12")
        if usage is not None and choices == 1:
            assert b'"completion_tokens":21' in b"".join(transport.parts)
        protocol.connection_lost(None)
        await ended(state)

    asyncio.run(run())


def test_a_header_with_a_line_end_is_not_written() -> None:
    async def run() -> None:
        api = FakeApi()
        api.gate.clear()
        protocol, transport, state = await connection(api)
        protocol.data_received(post(COMPLETIONS, BODY))
        with pytest.raises(RuntimeError):
            await Exchange(protocol.cycle).start(200, [(b"x-request-id", b"a\r\nset-cookie: b")], b"", more=False)
        assert not transport.parts
        protocol.connection_lost(None)
        await ended(state)

    asyncio.run(run())


async def forever() -> None:
    await asyncio.Event().wait()


async def exchange(api: FakeApi) -> tuple[Exchange, GuardedProtocol, ServerState]:
    """The exchange of a request whose answer waits behind the gate."""
    api.gate.clear()
    protocol, _, state = await connection(api)
    protocol.data_received(post(COMPLETIONS, BODY))
    return Exchange(protocol.cycle), protocol, state


async def over(api: FakeApi, protocol: GuardedProtocol, state: ServerState) -> None:
    api.gate.set()
    protocol.connection_lost(None)
    await ended(state)


def test_work_ends_with_the_reason_and_its_task_goes_on() -> None:
    async def run() -> None:
        running, api = RunningCalls(), FakeApi()
        asked, protocol, state = await exchange(api)
        asyncio.get_running_loop().call_soon(asked.client_left)
        with pytest.raises(Cancelled, match="the client left"):
            await running.run(asked, forever())
        asyncio.get_running_loop().call_soon(running.cancel_all)
        with pytest.raises(Unavailable, match="closing"):
            await running.run(asked, forever())
        assert not len(running)
        await asyncio.sleep(0)  # the task was not left cancelled
        await over(api, protocol, state)

    asyncio.run(run())


def test_a_task_that_is_cancelled_from_outside_is_cancelled() -> None:
    async def run() -> None:
        running, api = RunningCalls(), FakeApi()
        asked, protocol, state = await exchange(api)
        task = asyncio.create_task(running.run(asked, forever()))
        await asyncio.sleep(0)
        task.cancel()
        running.cancel_all()
        with pytest.raises(asyncio.CancelledError):
            await task
        await over(api, protocol, state)

    asyncio.run(run())
