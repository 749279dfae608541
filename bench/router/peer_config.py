"""Settings and timing that the stand-in workers and the bare servers of `bench.router.cost` share.

A request itself says what it shall cost: `max_tokens` is the number of tokens, and `seed` is the number of microseconds between
two tokens. A seed of 0 means that tokens come as fast as they are taken. So one client asks the router and the bare servers for
the same work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final

WORD: Final = b" w"
"""The text of each token begins with this mark, and no other part of an answer has it."""


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """The settings of one stand-in process."""

    kind: str  # "workers", "grpc" or "http"
    streams: int  # requests at once; their tokens share a step
    model_fingerprint: str = ""
    max_model_len: int = 0
    link: str = ""
    cluster_token: str = ""


class Ticks:
    """One timer for all streams, as one engine step serves all its requests. It runs only while a stream waits."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def wait(self, interval_us: int) -> Awaitable[None]:
        """Return a future that the next tick ends. The first caller after a tick sets the next tick, `interval_us` later."""
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
    """Return the text of a token. It has the average length of real tokens' texts."""
    return f"{WORD.decode()}{index % 1000:03}"
