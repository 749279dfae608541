"""The engine alone, before servers that misbehave in the middle of requests: what it counts, tells and keeps afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import psutil
import pytest
from stand_ins import attached

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.core.ids import SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.rpc.v1 import common_pb2
from pdserve.worker.messages import Abort, Activate, AddLent, DiscardKv, EngineKv, Reserve, StepEvents
from pdserve.worker.vllm.client import VllmClient
from pdserve.worker.vllm.engine import VllmEngine

pytestmark = pytest.mark.cluster

Answer = Callable[[asyncio.StreamWriter, dict[str, Any]], Any]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TICKET = {
    "do_remote_prefill": True, "remote_block_ids": [[1]], "remote_num_tokens": 3, "remote_engine_id": "e",
    "remote_request_id": "r", "remote_host": "h", "remote_port": 1,
}  # fmt: skip
KV = EngineKv(1, json.dumps(TICKET).encode())
SPEC = RequestSpec((5, 6, 7), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))


def event(*token_ids: int, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": finish, "token_ids": list(token_ids), "logprobs": None}]}


def line(value: Any) -> bytes:
    content = value if isinstance(value, bytes) else b"data: " + json.dumps(value).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(content), content)


class Hostile:
    """A server that answers each request as told, one after the other."""

    def __init__(self) -> None:
        self.answer: Answer = lambda _writer, _body: None
        self.connections: set[asyncio.Task[None]] = set()

    def begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.connections.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [int(one.split(b":")[1]) for one in head.lower().split(b"\r\n") if one.startswith(b"content-length")]
                body = json.loads(await reader.readexactly(length[0])) if length else {}
                outcome = self.answer(writer, body)
                if asyncio.iscoroutine(outcome):
                    await outcome
                if writer.is_closing():
                    return
                await writer.drain()


@contextlib.asynccontextmanager
async def opened(engine: VllmEngine) -> AsyncIterator[tuple[VllmEngine, Hostile, list[StepEvents]]]:
    """Open an engine whose requests go to a hostile server from now on."""
    said: list[StepEvents] = []
    hostile = Hostile()
    server = await asyncio.start_server(hostile.begin, "127.0.0.1", 0)
    view = await engine.open()
    view.take = said.append
    await engine._connected.close()
    engine._client = VllmClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield engine, hostile, said
        assert_idle(engine)
    finally:
        await engine.close()
        server.close()
        await asyncio.wait_for(asyncio.gather(*hostile.connections), 30)


def assert_idle(engine: VllmEngine) -> None:
    """Nothing is left of any request."""
    activity = engine._activity
    left = activity.streaming, activity._with_prompt, activity._with_output, len(engine._sequences)
    assert left == (0, 0, 0, 0)
    assert {task.get_name() for task in engine._tasks} <= {"load of vLLM", "watch over vLLM"}
    assert engine._worker_load().computed_prompt_tokens >= 0


async def settled(engine: VllmEngine) -> None:
    """Wait until all work of requests has ended."""
    await eventually(lambda: len(engine._tasks) <= 2 and engine._flushing is None)


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what changes has no event
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def config():
    with attached() as engine_config:
        yield WorkerConfig("w", "127.0.0.1:1", engine_config)


@pytest.fixture
def engine(config):
    def make(role: common_pb2.Role) -> VllmEngine:
        one = VllmEngine(config, role, lambda *_: None, lambda _: None)
        one.load()
        return one

    return make


def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


def stream(*parts: Any, end: bool = True, then: Callable[[asyncio.StreamWriter], Any] = lambda _: None) -> Answer:
    def answer(writer: asyncio.StreamWriter, _body: dict[str, Any]) -> None:
        writer.write(HEAD + b"".join(line(part) for part in parts) + (b"0\r\n\r\n" if end else b""))
        then(writer)

    return answer


WHOLE = [event(number) for number in range(10, 14)]
STREAMS: dict[str, tuple[Answer, bool]] = {  # and whether the output is whole
    "right": (stream(*WHOLE, event(14, finish="length")), True),
    "all at once": (stream(event(10, 11, 12, 13, 14, finish="length")), True),
    "tokens after the end": (stream(*WHOLE, event(14, finish="length"), event(15), event(16, finish="stop")), True),
    "an error after the end": (stream(*WHOLE, event(14, finish="length"), {"error": {"message": "x", "code": 400}}), True),
    "garbage after the end": (stream(*WHOLE, event(14, finish="length"), b"data: {\n\n"), True),
    "no end of the stream": (stream(*WHOLE, event(14, finish="length"), end=False), True),
    "cut after the end": (stream(*WHOLE, event(14, finish="length"), end=False, then=close), True),
    "no finish reason": (stream(*WHOLE, event(14)), True),
    "too many": (stream(*WHOLE, event(14, 15, 16, finish="stop")), True),
    "cut": (stream(*WHOLE, end=False, then=close), False),
    "short": (stream(*WHOLE, event(finish="length")), False),
    "empty": (stream(), False),
    "two choices": (stream({"choices": event(10)["choices"] * 2}), False),
    "unknown end": (stream(event(10, finish="abort")), False),
    "unknown id": (stream(event(100_000)), False),
    "error": (stream({"error": {"message": "x", "code": 500}}), False),
    "refusal": (stream({"error": {"message": "x", "code": 400}}), False),
    "only comments": (stream(*[b": x\n\n"] * 100, {"choices": []}), False),
}


@pytest.mark.parametrize("way", ["local", "fetched"])
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_counted_to_its_end_whatever_it_says(engine, name: str, way: str) -> None:
    answer, is_whole = STREAMS[name]

    async def main() -> None:
        async with opened(engine(common_pb2.ROLE_DECODE)) as (one, hostile, said):
            hostile.answer = answer
            spec = SPEC if way == "fetched" else RequestSpec(SPEC.prompt_ids, SamplingParams(max_tokens=5, temperature=0.0))
            one._submit(Reserve(SeqId(1), spec, way == "local"))
            if way == "fetched":
                one._submit(Activate(SeqId(1), 9, KV))
            await settled(one)
            ids = [token.token_id for events in said for token in events.tokens]
            errors = [error for events in said for _, error in events.given_up]
            ends = [token.finish_reason for events in said for token in events.tokens if token.finish_reason]
            assert (len(ends), len(errors)) == ((1, 0) if is_whole else (0, 1))
            assert ids == list(range(10, 15))[: len(ids)]
            assert all(isinstance(error, PdserveError) and error.code != "internal_bug" for error in errors)

    asyncio.run(main())


def test_nothing_is_left_of_500_requests_that_are_dropped_at_any_time(engine) -> None:
    """Before their task has run, before the answer, between tokens and after the end."""
    random.seed(7)

    async def answer(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        if not body:  # for its load
            writer.close()
            return
        await asyncio.sleep(random.random() * 0.01)
        tokens = body["sampling_params"]["max_tokens"]
        writer.write(HEAD)
        for number in range(tokens):
            writer.write(line(event(10 + number, finish="length" if number == tokens - 1 else None)))
            await asyncio.sleep(random.random() * 0.003)
        if random.random() < 0.2:
            writer.close()
        else:
            writer.write(b"0\r\n\r\n")

    async def main() -> None:
        async with opened(engine(common_pb2.ROLE_DECODE)) as (one, hostile, _):
            hostile.answer = answer
            process, before = psutil.Process(), 0
            for number in range(1, 501):
                seq_id, local = SeqId(number), random.random() < 0.5
                one._submit(Reserve(seq_id, SPEC, local))
                if not local:
                    one._submit(Activate(seq_id, 9, KV))
                wait_s = random.choice([0.0, 0.0, random.random() * 0.03])
                if random.random() < 0.8:
                    asyncio.get_running_loop().call_later(wait_s, one._submit, Abort(seq_id))
                if number % 10 == 0:
                    one._submit(DiscardKv(SPEC.prompt_ids, KV))
                    await asyncio.sleep(0.02)
                if number == 100:
                    await settled(one)
                    before = process.num_fds()
            await settled(one)
            assert_idle(one)
            await asyncio.sleep(0.2)
            assert process.num_fds() <= before + 40, "connections that wait for the next request count too"

    asyncio.run(main())


def test_a_prefill_that_answers_anything_leaves_nothing(engine) -> None:
    whole = {**event(9, finish="length"), "kv_transfer_params": TICKET}
    answers = [
        whole, {**whole, "kv_transfer_params": {**TICKET, "remote_prefill_cached_tokens": 1 << 80}}, event(9, finish="length"),
        event(9, 8, finish="length"), event(finish="length"), {}, [], None, {"error": {"message": "x", "code": 400}}, event(9),
    ]  # fmt: skip

    async def main() -> None:
        async with opened(engine(common_pb2.ROLE_PREFILL)) as (one, hostile, said):
            for number, value in enumerate(answers, 1):
                content = json.dumps(value).encode()
                plain = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)
                hostile.answer = lambda writer, _, plain=plain: writer.write(plain)
                one._submit(AddLent(SeqId(number), SPEC))
                await settled(one)
                assert_idle(one)
            assert len([token for events in said for token in events.tokens]) == 2
            assert len([error for events in said for error in events.given_up]) == len(answers) - 2

    asyncio.run(main())


def test_a_page_of_metrics_that_is_forbidden_is_asked_for_again(engine, monkeypatch) -> None:
    monkeypatch.setattr("pdserve.worker.vllm.engine.POLL_S", 0.01)
    asked = []

    def answer(writer: asyncio.StreamWriter, _body: dict[str, Any]) -> None:
        asked.append(0)
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

    async def main() -> None:
        async with opened(engine(common_pb2.ROLE_DECODE)) as (_, hostile, _):
            hostile.answer = answer
            await eventually(lambda: len(asked) >= 3)

    asyncio.run(main())


@pytest.mark.parametrize("faults", [{}, {"root": "other"}, {"release": "0.33.0"}])
def test_a_server_that_comes_back_as_another_is_not_believed(config, monkeypatch, faults: dict[str, str]) -> None:
    """A server at a URL ends and comes back by itself. With another model it would serve wrong tokens with a normal end."""
    monkeypatch.setattr("pdserve.worker.vllm.engine.POLL_S", 0.01)

    async def main(url: str) -> None:
        deaths: list[BaseException] = []
        one = VllmEngine(config, common_pb2.ROLE_DECODE, lambda *_: None, deaths.append)
        await asyncio.to_thread(one.load)
        async with opened(one) as (_, hostile, _):
            asked: list[int] = []
            hostile.answer = lambda writer, _: (asked.append(0), writer.close())
            await eventually(lambda: asked)
            looks: list[int] = []
            check = one._check_same
            monkeypatch.setattr(one, "_check_same", lambda: (looks.append(0), check())[1])
            one._server.url, before = url, one._client
            one._client = VllmClient(url)
            await before.close()
            await eventually(lambda: deaths if faults else looks)
            await asyncio.sleep(0.1)
        assert [type(one) for one in deaths] == ([ConfigError] if faults else [])

    with attached(**faults) as back:
        wait_until_it_serves(back.vllm.url)
        asyncio.run(main(back.vllm.url))


def wait_until_it_serves(url: str) -> None:
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        time.sleep(0.05)
