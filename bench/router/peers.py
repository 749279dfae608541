"""The other processes of `bench.router.cost`, each started with a YAML of one of the configurations below.

    python -m bench.router.peers --config FILE --exit-with-parent

A request says itself what it is to cost: `max_tokens` tokens, and as its seed the microseconds between two of them, 0 for
as fast as they are taken. So one client asks the router, whose workers are here, and the bare servers the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import uvloop

from pdserve.config import load


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


async def _run(config: PeerConfig) -> None:
    from bench.router import floors as router_floors
    from bench.router import workers as router_workers  # they take from here what they share

    serve: Callable[[PeerConfig], Any] = {
        "workers": router_workers.serve,
        "grpc": router_floors.serve_grpc,
        "http": router_floors.serve_http,
    }[config.kind]
    async with serve(config) as ready:
        print(json.dumps(ready), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description="A peer of `python -m bench.router.cost`, which starts it.")
    parser.add_argument("--config", required=True)
    parser.add_argument("--exit-with-parent", action="store_true", required=True)
    uvloop.run(_run(load(PeerConfig, parser.parse_args().config)))


if __name__ == "__main__":
    main()
