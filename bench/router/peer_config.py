"""What the router, its stand-in workers and the bare servers share in `bench.router.cost`.

A request says itself what it is to cost: `max_tokens` tokens, and as its seed the microseconds between two of them. A seed of 0
means that tokens come as fast as they are taken. So one client asks the router and the bare servers for the same work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerConfig:
    kind: str  # "workers", "grpc" or "http"
    streams: int  # requests that come together: their tokens share a step
    model_fingerprint: str = ""
    max_model_len: int = 0
    link: str = ""
    cluster_token: str = ""


class Ticks:
    """One timer for all streams, as one engine step is for all its requests; it runs while somebody waits."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def wait(self, interval_us: int) -> Awaitable[None]:
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            loop.call_later(interval_us / 1e6, self._fire)
        return self._next

    def _fire(self) -> None:
        assert self._next is not None
        fired, self._next = self._next, None
        fired.set_result(None)


def text_of(index: int) -> str:
    """The text of a token: as long as tokens are on average."""
    return f" w{index % 1000:03}"
