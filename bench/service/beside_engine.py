"""`make bench-service` measures the cost of the service beside its bare engine.

    python -m bench.service.beside_engine [--streams 1 8] [--prompt-tokens 128] [--tokens 64] [--requests 2] [--rounds 15]

The service is `pdserve up` with one colocated worker, asked over HTTP with streaming. The bare engine is one engine thread in
a process of its own, without router, HTTP and text. Both get the same prompts, lengths and arrivals: each stream asks its next
prompt when it has the last token of the one before. Both run all the time and take turns; a ratio compares the two turns of a
round, and has a 95 % interval of its median. The clients of the service run in this process, which does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.http_stream import HttpStream, post
from bench.ratios import ratio
from bench.service.bare_engine import TIMEOUT_S, Turn, Work, started
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import EngineConfig

GOAL: Final = 1.25
PDSERVE: Final = (sys.executable, "-m", "pdserve.cli")
READY_TIMEOUT_S: Final = 240.0


class _Stream(HttpStream):
    """One connection. `first_s` and `last_s` are the times of the first and last token of its answer."""

    def __init__(self) -> None:
        super().__init__()
        self.first_s = self.last_s = 0.0

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self.first_s == 0.0 and b"data: " in data:
            self.first_s = now_s
        if b'"finish_reason":"length"' in data:
            self.last_s = now_s
        super().data_received(data)

    async def ask(self, request: bytes) -> bytes:
        self.first_s = self.last_s = 0.0
        return await super().ask(request)


def completion(prompt: Sequence[int], tokens: int) -> bytes:
    """Return the bytes of an HTTP request for a streamed completion."""
    body: dict[str, Any] = {"model": "bench", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    return post("/v1/completions", json.dumps(body).encode())


async def serve(address: str, work: Work) -> Turn:
    """Run one turn against the service. Raises `AssertionError` unless every answer is whole."""
    host, _, port = address.rpartition(":")
    loop, turn = asyncio.get_running_loop(), Turn()
    streams = [(await loop.create_connection(_Stream, host, int(port)))[1] for _ in work.streams]
    requests = [[completion(prompt, work.tokens) for prompt in prompts] for prompts in work.streams]

    async def one(stream: _Stream, bodies: Sequence[bytes]) -> None:
        for body in bodies:
            asked_s = time.perf_counter()
            answer = await stream.ask(body)
            assert answer.startswith(b"HTTP/1.1 200"), answer[:1000]
            assert f'"completion_tokens":{work.tokens}'.encode() in answer, answer[-1000:]
            turn.add(asked_s, stream.first_s, stream.last_s, work.tokens)

    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(one(stream, bodies) for stream, bodies in zip(streams, requests, strict=True)))
        turn.wall_s = time.perf_counter() - began_s
    finally:
        for stream in streams:
            stream.close()
    return turn


@contextmanager
def service(config: EngineConfig) -> Iterator[str]:
    """Run `pdserve up`, and yield its HTTP address. Raises `RuntimeError` when it does not start."""
    flags = ["--prefill", "0", "--decode", "1", "--http-port", "0", "--model", config.model, "--served-model-name", "bench"]
    flags += ["--dtype", config.dtype, "--set", f"engine.threads={config.threads}"]
    process = subprocess.Popen((*PDSERVE, "up", *flags), stdout=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    try:
        seen, end_s = "", time.monotonic() + READY_TIMEOUT_S
        while "ready; Ctrl-C" not in seen:
            line = process.stdout.readline()
            if not line or time.monotonic() > end_s:
                raise RuntimeError(f"pdserve up did not start:\n{seen}")
            seen += line
        found = re.search(r"HTTP +http://(\S+)/v1", seen)
        assert found is not None, seen
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def work_of(rng: random.Random, vocab: int, streams: int, requests: int, prompt: int, tokens: int) -> Work:
    """Return work with random prompts, so that neither side has any of them cached."""

    def one() -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(prompt))

    return Work(tuple(tuple(one() for _ in range(requests)) for _ in range(streams)), tokens)


MEASURES: Final[dict[str, Callable[[Turn], float]]] = {
    "whole turn": lambda turn: turn.wall_s,
    "TTFT": lambda turn: statistics.median(turn.ttft_s),
    "time per token": lambda turn: statistics.median(turn.tpot_s),
}


def report(found: dict[int, list[tuple[Turn, Turn]]], tokens: dict[int, int], title: str) -> Table:
    """Return the table. `found` holds the two turns of each round by number of streams, the service's turn first; `tokens`
    holds the tokens of one turn by number of streams.
    """
    made = Table("streams", "", title=title)
    for column in ("service", "bare engine", "service / bare", "95 %", "goal"):
        made.add_column(column, justify="right")
    for streams, turns in found.items():
        rates = [statistics.median(tokens[streams] / turn.wall_s for turn in side) for side in zip(*turns, strict=True)]
        made.add_row(str(streams), "tokens/s", f"{rates[0]:.0f}", f"{rates[1]:.0f}")
        for name, of in MEASURES.items():
            ours, bare = ([of(turn) for turn in side] for side in zip(*turns, strict=True))
            of = ratio(ours, bare)
            cells = (f"{1e3 * statistics.median(side):.1f} ms" for side in (ours, bare))
            goal = f"{GOAL}" if name == "whole turn" else ""
            made.add_row("", name, *cells, f"{of.median:.2f}", f"{of.low:.2f} to {of.high:.2f}", goal)
        made.add_section()
    return made


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2, help="requests of each stream, one after the other")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    card = ModelCard.load(resolve(args.model))
    config = EngineConfig(model=args.model, dtype="bfloat16", threads=args.threads)
    rng = random.Random(0)
    found: dict[int, list[tuple[Turn, Turn]]] = {streams: [] for streams in args.streams}
    tokens: dict[int, int] = {}
    with started(config) as bare, service(config) as address:
        for number in range(-1, args.rounds):  # the first round warms up and is not counted
            for streams in args.streams:
                work = work_of(rng, card.vocab_size, streams, args.requests, args.prompt_tokens, args.tokens)
                tokens[streams] = work.num_tokens
                sides = [lambda work=work: asyncio.run(serve(address, work)), lambda work=work: bare.run(work)]
                order = (0, 1) if number % 2 else (1, 0)
                turns = {side: sides[side]() for side in order}
                if number >= 0:
                    found[streams].append((turns[0], turns[1]))
    title = (
        f"{card.name}, {args.threads} threads, {args.prompt_tokens} prompt and {args.tokens} output tokens, "
        f"{args.requests} requests a stream, medians of {args.rounds} rounds"
    )
    Console(width=120).print(report(found, tokens, title))


if __name__ == "__main__":
    main()
