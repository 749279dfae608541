"""The interface of a source of requests to the workload. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol

from pdserve_bench.workload.request import BenchRequest
from pdserve_bench.workload.spec import ClassMix
from pdserve_bench.workload.tokens import TokenMaker


@dataclass(frozen=True, slots=True)
class Means:
    """The means over the requests of a source."""

    prompt_tokens: float
    output_tokens: float
    start_share: float = 1.0
    """The share of the requests that wait for no other one."""
    recorded_rate_per_s: float | None = None
    """The mean rate of a recorded source. None: it has no times."""


class RequestSource(Protocol):
    """A source that was read and checked."""

    notes: tuple[str, ...]
    """Sentences that say what was cut or left out."""
    digest: str
    """The SHA-256 of the source's file. Empty: it has none."""
    means: Means

    def requests(self, tokens: TokenMaker, seed: int) -> Iterator[BenchRequest]:
        """Yield the requests. `send_at_s` is the recorded time, or None."""


class Classes:
    """The SLO classes of a workload. The class of a request is drawn by a stream of its own."""

    def __init__(self, mixes: dict[str, ClassMix]) -> None:
        """Take the classes; without any, all requests belong to the default class."""
        self._names = [*mixes] or [""]
        self._mixes = [*mixes.values()] or [ClassMix(weight=1.0)]
        self._weights = [mix.weight for mix in self._mixes]

    def draws(self, seed: int) -> Iterator[tuple[str, ClassMix]]:
        """Yield endless classes with their lengths."""
        random, indices = Random(f"{seed}:classes"), range(len(self._names))
        while True:
            index = random.choices(indices, self._weights)[0]
            yield self._names[index], self._mixes[index]
