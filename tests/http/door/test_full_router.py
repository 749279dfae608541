"""More clients than connections: who gets a place, who makes room, and what the others are told."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # the fake router of all tests of HTTP

from http_fakes import MODEL, FakeApi, served
from raw_http import TIMEOUT_S, Answer, connect, exchange, head, post, read_answer

from router.http import protocol
from router.http.protocol import LEAST_REFUSED, PATIENCE_S, ConnectionTable

BODY: dict[str, Any] = {"model": MODEL, "prompt": "p"}
COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def brief_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.1)


def test_idle_connections_and_dribbled_heads_make_room_for_who_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "PATIENCE_S", 0.0)

    async def run() -> None:
        async with served(FakeApi(), max_connections=16) as base:
            idle = [await connect(base) for _ in range(40)]
            for _, writer in idle:
                if not writer.transport.is_closing():
                    writer.write(b"GET / HTTP/1.1\r\nx: ")
            for _ in range(40):
                assert (await exchange(base, post(COMPLETIONS, BODY))).status == 200
            for _, writer in idle:
                writer.close()

    asyncio.run(run())


def test_connections_that_all_serve_are_a_503_for_who_comes() -> None:
    """The client has sent its request by then, also a large one. Its connection was reset over the answer."""

    async def run() -> None:
        api = FakeApi()
        api.gate.clear()
        async with served(api, max_connections=16) as base:
            busy = [await connect(base) for _ in range(16)]
            for _, writer in busy:
                writer.write(post(COMPLETIONS, BODY))
            async with asyncio.timeout(TIMEOUT_S):
                while len(api.requests) < 16:  # noqa: ASYNC110 - bounded
                    await asyncio.sleep(0.01)
            for size in (0, 500_000):
                reader, writer = await connect(base)
                writer.write(post(COMPLETIONS, {**BODY, "pad": "x" * size}))
                await writer.drain()
                refused = await read_answer(reader)
                assert (refused.status, refused.headers["connection"], refused.headers["retry-after"]) == (503, "close", "1")
                assert "16" in refused.error["message"]
                assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
                writer.close()
            api.gate.set()
            assert [(await read_answer(reader)).status for reader, _ in busy] == [200] * 16
            assert (await exchange(base, head("GET", "/health"))).status == 200
            for _, writer in busy:
                writer.close()

    asyncio.run(run())


def test_a_crowd_saw_resets_and_not_the_503_that_was_promised() -> None:
    """With 16 places and 48 clients at once, 22 saw a broken pipe: who had just come was pushed out."""

    async def run() -> None:
        api = FakeApi()
        api.gate.clear()
        async with served(api, max_connections=16) as base:

            async def one() -> Answer:
                reader, writer = await connect(base)
                await asyncio.sleep(0.01)  # the whole crowd comes before its first request
                writer.write(post(COMPLETIONS, BODY))
                answer = await read_answer(reader)
                if answer.status == 503:
                    refused.append(answer)
                    if len(refused) == 32:
                        api.gate.set()
                writer.close()
                return answer

            refused: list[Answer] = []
            answers = await asyncio.gather(*(one() for _ in range(48)))
            assert sorted(answer.status for answer in answers) == [200] * 16 + [503] * 32
            assert {answer.headers["retry-after"] for answer in refused} == {"1"}

    asyncio.run(run())


async def endless(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x" * 50_000)
        await writer.drain()
        await asyncio.sleep(0)


def test_a_refused_client_that_sends_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", TIMEOUT_S)
    monkeypatch.setattr(protocol, "MAX_DROPPED_BYTES", 100_000)

    async def run() -> None:
        api = FakeApi()
        async with served(api) as base:
            reader, writer = await connect(base)
            writer.write(b"no HTTP at all\r\n\r\n")
            assert (await read_answer(reader)).status == 400
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(endless(writer), TIMEOUT_S)
            writer.close()

    asyncio.run(run())


class _Place:
    gave_way = False
    has_unsent = False

    def give_way(self) -> None:
        self.gave_way = True


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_who_was_answered_goes_first_and_who_has_come_goes_later_and_who_serves_stays() -> None:
    clock = _Clock()
    table = ConnectionTable(3, clock=clock)
    a, b, c, d, e, f = (_Place() for _ in range(6))
    assert all(table.admit(place) for place in (a, b, c))
    assert not table.admit(d)  # all three have just come
    table.forget(d)
    table.serves(a)
    table.serves(b)
    table.waits(b)
    b.has_unsent = True
    assert not table.admit(d)  # b has not got its answer yet
    table.forget(d)
    b.has_unsent = False
    assert table.admit(d)
    assert [place.gave_way for place in (a, b, c, d)] == [False, True, False, False]
    clock.now_s = PATIENCE_S
    assert table.admit(e)
    assert table.admit(f)
    assert [place.gave_way for place in (c, d, e, f)] == [True, True, False, False]
    table.serves(e)
    table.waits(e)
    table.begins(e)
    assert not table.admit(c)  # e has begun a further request
    for place in (e, f):
        table.serves(place)
    assert not table.admit(b)
    table.forget(a)
    assert table.admit(b)
    table.waits(a)  # a late word of one that has gone
    assert len(table) == 3


def test_those_who_are_being_refused_are_bounded_and_the_first_of_them_go_first() -> None:
    table = ConnectionTable(1, clock=_Clock())
    assert table.admit(_Place())
    crowd = [_Place() for _ in range(LEAST_REFUSED + 2)]
    assert not any(table.admit(place) for place in crowd)
    assert [place.gave_way for place in crowd] == [True] * 2 + [False] * LEAST_REFUSED
