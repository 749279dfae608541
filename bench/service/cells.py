"""The cells of the comparison with other servers, and one turn of a cell against one server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve_bench.layout import Slo
from pdserve_bench.load.generator import run_load
from pdserve_bench.load.http_target import BaseUrl, HttpOptions, HttpTarget
from pdserve_bench.load.schedule import RunLimits
from pdserve_bench.load.target import LoadAnswer, LoadCall, RequestOptions
from pdserve_bench.report.summary import Distribution, summarise
from pdserve_bench.row import BenchRow
from pdserve_bench.workload.request import BenchRequest, Ids

MODEL: Final = "bench"
REQUEST_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One load: `streams` requests run at any time, each with the given numbers of prompt and output tokens."""

    prompt_tokens: int
    output_tokens: int
    streams: int
    requests: int
    """The number of requests of one turn. It is a multiple of `streams`, so that all streams work until the end."""
    goal: float
    """The least ratio of output tokens a second: the better layout of ours above the other server."""
    itl_goal: float | None = None
    """The greatest allowed ratio of p99 ITL: our 1P+1D over the other server. None: there is no such goal."""

    @property
    def name(self) -> str:
        """The name of the cell in the table."""
        return f"{self.prompt_tokens:,}/{self.output_tokens} x {self.streams}"


CELLS: Final = (
    Cell(256, 64, 1, 3, 2.0),
    Cell(256, 64, 8, 16, 2.0),
    Cell(256, 64, 32, 64, 2.0, itl_goal=1 / 15),
    Cell(1024, 32, 8, 16, 1.5),
)


class TurnFailed(Exception):
    """A server did not answer all requests of a turn whole. The message names the server, the cell and the first failure."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a cell. Times are seconds; `texts` are the answers by the number of the request."""

    output_tokens_per_s: float
    ttft_s: Distribution
    itl_s: Distribution
    lag_s: float
    """The largest time by which the generator was late."""
    texts: tuple[str, ...]


class _Keeping:
    """A target that also keeps the texts of the answers."""

    def __init__(self, target: HttpTarget) -> None:
        self._target = target
        self.texts: dict[int, str] = {}

    async def send(self, call: LoadCall, answer: LoadAnswer) -> None:
        """Send the call, and keep the text of its answer."""
        await self._target.send(call, answer)
        self.texts[call.number] = "".join(answer.texts)

    async def close(self) -> None:
        """Close all connections."""
        await self._target.close()


def prompts_of(cell: Cell, rng: random.Random, vocab: int) -> list[Ids]:
    """Return random prompts. Even their first blocks differ, so no server has any of them cached."""
    return [tuple(rng.randrange(vocab) for _ in range(cell.prompt_tokens)) for _ in range(cell.requests)]


def take_turn(name: str, address: str, cell: Cell, prompts: Sequence[Ids]) -> Turn:
    """Send the prompts to a server, and return the figures. Raises `TurnFailed` unless every answer is whole.

    address: the HTTP address, as HOST:PORT.
    """
    rows, texts = asyncio.run(_load(address, cell, prompts))
    check_whole(name, cell, rows)
    found = summarise(rows, lambda _: Slo(None, None))
    rate, lag = found.output_tokens_per_s, found.send_lag_s
    if rate is None or lag is None or found.ttft_s is None or found.itl_s is None:
        raise TurnFailed(f"{name}, {cell.name}: an answer had no two tokens")
    return Turn(rate, found.ttft_s, found.itl_s, lag.max, texts)


async def _load(address: str, cell: Cell, prompts: Sequence[Ids]) -> tuple[list[BenchRow], tuple[str, ...]]:
    options = RequestOptions(model=MODEL, ignore_eos=True, temperature=0.0)
    target = _Keeping(HttpTarget(BaseUrl.parse(f"http://{address}"), options, HttpOptions()))
    requests = (BenchRequest(number, (ids,), cell.output_tokens) for number, ids in enumerate(prompts))
    limits = RunLimits(max_concurrency=cell.streams, request_timeout_s=REQUEST_TIMEOUT_S)
    try:
        rows = await run_load(requests, target, limits)
    finally:
        await target.close()
    return rows, tuple(text for _, text in sorted(target.texts.items()))


def check_whole(name: str, cell: Cell, rows: Sequence[BenchRow]) -> None:
    """Raise `TurnFailed` unless each request has a row with all its output tokens."""
    for row in rows:
        if not row.ok or row.output_tokens != cell.output_tokens:
            why = row.error or f"it had {row.output_tokens} output tokens, not {cell.output_tokens}"
            raise TurnFailed(f"{name}, {cell.name}, request {row.number}: {why}")
    if len(rows) != cell.requests:
        raise TurnFailed(f"{name}, {cell.name}: {len(rows)} of {cell.requests} requests were answered")


def agreement(ours: Sequence[str], theirs: Sequence[str]) -> float:
    """Return the mean share of our answers that lies before the first difference to theirs, in characters."""
    return sum(map(_equal_share, ours, theirs)) / len(ours)


def _equal_share(a: str, b: str) -> float:
    if a == b:
        return 1.0
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same / max(len(a), len(b))
