"""Clients over HTTP, each request on its own connection: long streams all the time, and a short request now and then."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from typing import Any, Final

from bench.deaths.table import Ask, Span
from bench.http_stream import post

ASK_EVERY_S: Final = 0.25
ASK_TIMEOUT_S: Final = 10.0
SILENT_S: Final = 60.0
"""A stream without a token for this time is lost, whatever its connection does."""
AGAIN_S: Final = 0.2
MOST_ERROR_CHARS: Final = 70


class Failed(Exception):
    """A request that was not answered to its end. The text says why, in a few words."""


@dataclass(slots=True)
class _Stream:
    began_s: float
    tokens_s: list[float] = field(default_factory=list)
    ended_s: float | None = None
    error: str = ""


class Clients:
    """The load on one HTTP address. `start` begins it and `stop` ends it; times are those of `time.monotonic`."""

    def __init__(self, address: str, streams: int, output_tokens: int) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host, int(port)
        self._count = streams
        self._long = {"prompt": "Once upon a time", "max_tokens": output_tokens, "ignore_eos": True, "stream": True}
        self._short = {"prompt": "Hello", "max_tokens": 2, "stream": True}
        self._streams: list[_Stream] = []
        self._asks: list[tuple[float, float, bool]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start all clients on the running loop."""
        self._tasks = [asyncio.create_task(self._stream_for_ever(seed)) for seed in range(self._count)]
        self._tasks.append(asyncio.create_task(self._ask_for_ever()))

    async def stop(self) -> None:
        """Cancel all requests. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def streaming(self) -> int:
        """Count the streams that have had tokens and still run."""
        return sum(one.ended_s is None and len(one.tokens_s) > 1 for one in self._streams)

    def errors(self) -> list[str]:
        """Return why streams have failed so far, each reason once."""
        return sorted({one.error for one in self._streams if one.error})

    def asked_since(self, since_s: float) -> list[Ask]:
        """Return the short requests that were sent at `since_s` or later and have ended."""
        return [Ask(sent - since_s, ended - since_s, served) for sent, ended, served in self._asks if sent >= since_s]

    def spans(self, since_s: float, until_s: float) -> list[Span]:
        """Return the streams that ran at `since_s`, as they were seen until `until_s`."""
        ran = [
            one
            for one in self._streams
            if one.tokens_s and one.tokens_s[0] < since_s and not (one.ended_s or until_s) < since_s
        ]
        return [Span(bool(one.error), _pause_s(one, since_s, until_s), one.error) for one in ran]

    async def _stream_for_ever(self, seed: int) -> None:
        while True:
            one = _Stream(time.monotonic())
            self._streams.append(one)
            try:
                await self._read(self._long | {"seed": seed}, one.tokens_s, SILENT_S)
            except (Failed, OSError, TimeoutError) as exc:
                one.error = (str(exc) or type(exc).__name__)[:MOST_ERROR_CHARS]
                await asyncio.sleep(AGAIN_S)
            finally:
                one.ended_s = time.monotonic()

    async def _ask_for_ever(self) -> None:
        running: set[asyncio.Task[None]] = set()  # a request that hangs must not hold up the next request
        try:
            while True:
                task = asyncio.create_task(self._ask())
                running.add(task)
                task.add_done_callback(running.discard)
                await asyncio.sleep(ASK_EVERY_S)
        finally:
            for task in running:
                task.cancel()

    async def _ask(self) -> None:
        sent_s, served = time.monotonic(), False
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await self._read(self._short, [], ASK_TIMEOUT_S)
            served = True
        except (Failed, OSError, TimeoutError):
            pass
        self._asks.append((sent_s, time.monotonic(), served))

    async def _read(self, body: dict[str, Any], tokens_s: list[float], silent_s: float) -> None:
        """Send a request, note when tokens come, and return at its end. Raises `Failed`, `OSError` or `TimeoutError`."""
        async with asyncio.timeout(silent_s):
            reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(post("/v1/completions", json.dumps(body).encode()))
            while True:
                async with asyncio.timeout(silent_s):
                    line = await reader.readline()
                if not line:
                    raise Failed("the connection was closed")
                if line.startswith(b"HTTP/1.1") and b" 200 " not in line:
                    raise Failed(f"HTTP {line.split()[1].decode()}")
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    _note(line[6:], tokens_s)
        finally:
            writer.transport.abort()


def _note(data: bytes, tokens_s: list[float]) -> None:
    """Note one event of a stream. Raises `Failed` for an error."""
    event = json.loads(data)
    if "error" in event:
        raise Failed(str(event["error"].get("code") or event["error"].get("message")))
    tokens_s.append(time.monotonic())


def _pause_s(one: _Stream, since_s: float, until_s: float) -> float:
    """Return the longest time without a token from `since_s` on. The gap around `since_s` counts as a whole."""
    before = max(at for at in one.tokens_s if at < since_s)
    end_s = min(until_s, one.ended_s or until_s)
    times = [before, *[at for at in one.tokens_s if since_s <= at <= end_s], end_s]
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)
