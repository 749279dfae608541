"""Run another process of `bench.router.cost`: the stand-in workers, or a bare gRPC or HTTP server.

    python -m bench.router.peers --config FILE --exit-with-parent

FILE is the YAML of a `bench.router.peer_config.PeerConfig`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import uvloop

from bench.router import floors, workers
from bench.router.peer_config import PeerConfig
from pdserve.config import load


async def _run(config: PeerConfig) -> None:
    serve: Callable[[PeerConfig], Any] = {
        "workers": workers.serve,
        "grpc": floors.serve_grpc,
        "http": floors.serve_http,
    }[config.kind]
    async with serve(config) as ready:
        print(json.dumps(ready), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    """Run the process until its standard input ends."""
    parser = argparse.ArgumentParser(description="Run a stand-in process of `python -m bench.router.cost`.")
    parser.add_argument("--config", required=True)
    parser.add_argument("--exit-with-parent", action="store_true", required=True)
    uvloop.run(_run(load(PeerConfig, parser.parse_args().config)))


if __name__ == "__main__":
    main()
