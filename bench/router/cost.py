"""`make bench-router` measures what the router costs, since every token of every request passes it.

    python -m bench.router.cost [--streams 64] [--rounds 5]

The real router process serves a real client over gRPC and over HTTP (SSE chat). Scripted workers behind it hand every
request from prefill to decode. Only the CPU time of the router's process is counted. Beside each figure stands its
floor, measured in the same rounds: a bare server on the same library that writes the same answers and has nothing
behind it.

The cost of a request is that of an answer of two tokens, the first from prefill and the second from decode: the whole
handoff. The cost of a token is what each further token adds. Paced means that all streams get a token every 50 ms;
flooded means that tokens come as fast as they are taken, and pile up before the slowest part.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc.aio
import uvloop

from bench.router.client import Client, GrpcClient, HttpClient
from bench.router.peer_config import PeerConfig
from pdserve.commands.console import make_console
from pdserve.commands.tables import table
from pdserve.config import EngineConfig, RouterConfig, RouterProcessConfig
from router.service.model import ServedModel
from testkit.processes import Process

REQUEST_WAVES: Final = 4
REQUEST_TOKENS: Final = 2
PACED_INTERVAL_US: Final = 50_000
PACED_TOKENS: Final = 25
FLOODED_TOKENS: Final = 192
SETTLE_S: Final = 0.1  # the work after the last answer, such as a log line, counts too
FIELD_US: Final = {"vllm-router": (102, 33, 6.2), "raw asyncio": (31, 20, 2.7)}
"""CPU of other HTTP pass-throughs, measured elsewhere on a machine of this class: a request, a paced token, a flooded token."""


@dataclass(slots=True)
class Target:
    """One server, and the CPU time in us that it took in each round."""

    pid: int
    client: Client
    streams: int
    per_request: list[float] = field(default_factory=list)
    per_token_paced: list[float] = field(default_factory=list)
    per_token_flooded: list[float] = field(default_factory=list)

    async def request(self) -> None:
        """Measure whole requests for one round."""
        cost_us = await self._cost_us(REQUEST_TOKENS, 0, waves=REQUEST_WAVES)
        self.per_request.append(cost_us / (REQUEST_WAVES * self.streams))

    async def paced(self) -> None:
        """Measure paced tokens for one round. The round's cost of a request is subtracted, so `request` must come first."""
        self.per_token_paced.append(await self._per_token(PACED_TOKENS, PACED_INTERVAL_US))

    async def flooded(self) -> None:
        """Measure flooded tokens for one round, after `request` as well."""
        self.per_token_flooded.append(await self._per_token(FLOODED_TOKENS, 0))

    async def _per_token(self, tokens: int, interval_us: int) -> float:
        cost_us = await self._cost_us(tokens, interval_us)
        return (cost_us / self.streams - self.per_request[-1]) / (tokens - REQUEST_TOKENS)

    async def _cost_us(self, tokens: int, interval_us: int, *, waves: int = 1) -> float:
        before_s = cpu_s(self.pid)
        for _ in range(waves):
            await self.client.ask(tokens, interval_us)
        await asyncio.sleep(SETTLE_S)
        return (cpu_s(self.pid) - before_s) * 1e6


Results = dict[str, tuple[Target, Target]]
"""The router and its floor, by front end (gRPC, HTTP)."""


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of another process, to the nanosecond. /proc counts only hundredths of a second."""
    return time.clock_gettime((~pid << 3) | 2)  # the clock of clock_getcpuclockid(3), which Python lacks


@contextlib.asynccontextmanager
async def targets(streams: int) -> AsyncIterator[Results]:
    """Run the router and its floor for each front end, until the block ends."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-")))

        def start(module: str, config: Any, name: str) -> Process:
            process = Process(module, config, folder, name)
            stack.callback(process.stop)
            process.wait_ready()
            return process

        engine, token = EngineConfig(model="tiny"), secrets.token_hex(16)
        model = ServedModel.load(engine)
        ports = RouterConfig(http_port=0, grpc_port=0, link_port=0, placement="disaggregated", probe_workers=False)
        router = start("router", RouterProcessConfig(ports, engine, token), "router")
        workers = PeerConfig(
            "workers", streams, model.card.fingerprint, model.max_model_len, link=router.ready["link"], cluster_token=token
        )
        start("bench.router.peers", workers, "workers")
        floors = [start("bench.router.peers", PeerConfig(kind, streams), kind) for kind in ("grpc", "http")]

        async def over_grpc(server: Process) -> Target:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.ready["grpc"]))
            return Target(server.popen.pid, GrpcClient(channel, streams), streams)

        async def over_http(server: Process) -> Target:
            client = await HttpClient.connect(server.ready["http"], streams, stack)
            return Target(server.popen.pid, client, streams)

        yield {
            "gRPC": (await over_grpc(router), await over_grpc(floors[0])),
            "HTTP": (await over_http(router), await over_http(floors[1])),
        }


async def measure(streams: int, rounds: int) -> Results:
    """Measure the router and its floors in `rounds` interleaved rounds."""
    async with targets(streams) as fronts:
        every = [target for pair in fronts.values() for target in pair]
        for target in every:  # warms up: connections, caches and first imports are not measured
            await target.client.ask(FLOODED_TOKENS, 0)
        for _ in range(rounds):
            for target in every:
                await target.request()
            for target in every:
                await target.flooded()
            for target in every:
                await target.paced()
        return fronts


def show(results: Results, streams: int, rounds: int) -> None:
    """Print the table."""
    title = f"CPU of the router, us; {streams} streams, medians of {rounds} interleaved rounds (lowest to highest)"
    made = table(title, ("front end", "a"), ("router", "floor", "ratio", *FIELD_US))
    kinds = (("request", "per_request"), ("token, paced", "per_token_paced"), ("token, flooded", "per_token_flooded"))
    for front, (router, floor) in results.items():
        for row, (name, kind) in enumerate(kinds):
            ours, least = getattr(router, kind), getattr(floor, kind)
            ratio = statistics.median(a / b for a, b in zip(ours, least, strict=True))
            others = [f"{figures[row]:g}" if front == "HTTP" else "" for figures in FIELD_US.values()]
            made.add_row(front, name, _spread(ours), _spread(least), f"{ratio:.2f}", *others)
        made.add_section()
    make_console().print(made)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description="Measure the CPU time of the router for a request and for a token, beside its floor."
    )
    parser.add_argument("--streams", type=int, default=64, help="number of requests at once")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    show(uvloop.run(measure(args.streams, args.rounds)), args.streams, args.rounds)


if __name__ == "__main__":
    main()
