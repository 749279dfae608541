"""`make bench-disconnect` measures how long blocks stay held after their client has left, beside the time of one engine step.

A step that is under way ends before anything is freed. A client that leaves at a random moment therefore waits for half a step
on average, and for a whole step at most: that is the floor. This benchmark sees the blocks free later than that, by up to one
heartbeat, with which workers report their blocks, and by one look at the router's state.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pdserve.config import MIB, EngineConfig
from pdserve.rpc.v1 import admin_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc
from testkit.client import generate_all, request
from testkit.processes import ProcessCluster, is_empty

TIMES: Final = 20
HEARTBEAT_S: Final = 0.005
LOOK_S: Final = 0.0005
TIMEOUT_S: Final = 60.0
BUDGET_TOKENS: Final = 32
PROMPT_TOKENS: Final = 900  # 29 steps, so that there is time to leave in the middle
OUTPUT_TOKENS: Final = 512
TOKENS_READ: Final = 8
SHORT: Final = list(range(100, 116))
LONG: Final = [100 + i % 100 for i in range(PROMPT_TOKENS)]

Leave = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of a request at which its client leaves."""

    name: str
    prompt: Sequence[int]
    tokens_read: int
    taken_on: frozenset[int]
    """The roles whose workers hold blocks at that moment."""


STREAMING: Final = Moment("while it streams", SHORT, TOKENS_READ, frozenset({common_pb2.ROLE_DECODE}))
PREFILLING: Final = Moment("during its prefill", LONG, 0, frozenset({common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE}))


class Watch:
    """A view of the router's state over one open connection, so that a look costs little."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = admin_pb2_grpc.AdminStub(channel)

    def until(self, holds: Callable[[inference_pb2.GetClusterStateResponse], bool]) -> None:
        """Look at the state until `holds` accepts it. Raises `TimeoutError` after 60 s."""
        end_s = time.monotonic() + TIMEOUT_S
        while not holds(self._stub.GetClusterState(inference_pb2.GetClusterStateRequest(), timeout=TIMEOUT_S)):
            if time.monotonic() > end_s:
                raise TimeoutError(f"the cluster did not reach the expected state within {TIMEOUT_S:.0f} s")
            time.sleep(LOOK_S)


def taken(state: inference_pb2.GetClusterStateResponse, roles: frozenset[int]) -> bool:
    """Tell whether every worker of these roles holds blocks."""
    return all(worker.load.blocks.held for worker in state.workers if worker.hello.role in roles)


def by_grpc(cluster: ProcessCluster, moment: Moment) -> Leave:
    """Open a gRPC stream, and read the moment's tokens. The returned function cancels the stream and closes its channel."""
    sampling = {"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    channel = grpc.insecure_channel(cluster.grpc)
    call: Any = inference_pb2_grpc.InferenceStub(channel).Generate(
        request(moment.prompt, common_pb2.PLACEMENT_DISAGGREGATED, **sampling), timeout=TIMEOUT_S
    )
    for _ in itertools.islice(call, moment.tokens_read):
        pass

    def leave() -> None:  # it also keeps the call alive: gRPC cancels a call without references
        call.cancel()
        channel.close()

    return leave


def by_http(cluster: ProcessCluster, moment: Moment) -> Leave:
    """Open an HTTP stream, and read the moment's tokens. The returned function closes its socket."""
    body = {
        "prompt": list(moment.prompt),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "placement": "disaggregated",
    }
    connection = http.client.HTTPConnection(cluster.http, timeout=TIMEOUT_S)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    if not moment.tokens_read:
        return connection.close
    response = connection.getresponse()
    for _ in range(2 * moment.tokens_read):  # an event is a line and an empty line
        response.readline()

    def leave() -> None:
        response.close()
        connection.close()

    return leave


def measure(cluster: ProcessCluster, watch: Watch, moment: Moment, open_stream: Callable[..., Leave]) -> float:
    """Return the seconds from the moment at which the client leaves until all blocks of both workers are free."""
    leave = open_stream(cluster, moment)
    watch.until(lambda state: taken(state, moment.taken_on))
    left_s = time.monotonic()
    leave()
    watch.until(is_empty)
    return time.monotonic() - left_s


def step_s(cluster: ProcessCluster, moment: Moment) -> float:
    """Return the seconds of one step of a request that runs alone: a decode step, or a prefill step with the whole token
    budget.
    """
    tokens = 2 if moment is PREFILLING else 64
    sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    message = request(moment.prompt, common_pb2.PLACEMENT_DISAGGREGATED, **sampling)
    reports = [generate_all(cluster.grpc, [message])[0].report for _ in range(3)]
    if moment is PREFILLING:
        return statistics.median(report.prefill_s for report in reports) / -(-PROMPT_TOKENS // BUDGET_TOKENS)
    return statistics.median(report.tpot_s for report in reports)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="default, tiny, or any value that `pdserve up --model` takes")
    parser.add_argument("--times", type=int, default=TIMES, help="number of disconnects of each kind")
    args = parser.parse_args()
    engine = EngineConfig(
        model=args.model,
        kv_cache_memory=128 * MIB,
        max_num_batched_tokens=BUDGET_TOKENS,
        max_model_len=2048,
        threads=1,
        enable_prefix_caching=False,  # the prompts repeat, and must be computed each time
    )
    table = Table(title=f"Client leaves -> all blocks free on both workers: {args.model}, {args.times} times each")
    for column in ("leaves", "by", "median ms", "max ms", "one step ms (floor)"):
        table.add_column(column, justify="right" if "ms" in column else "left")
    console = Console()
    with (
        ProcessCluster(engine, prefill=1, decode=1, worker={"heartbeat_interval_s": HEARTBEAT_S}) as cluster,
        grpc.insecure_channel(cluster.admin) as channel,
    ):
        watch = Watch(channel)
        for moment in (STREAMING, PREFILLING):
            floor_s = step_s(cluster, moment)
            for way, open_stream in (("gRPC", by_grpc), ("HTTP", by_http)):
                runs = track(range(args.times), f"{way}, {moment.name}", console=console, transient=True)
                times_s = [measure(cluster, watch, moment, open_stream) for _ in runs]
                figures = (statistics.median(times_s), max(times_s), floor_s)
                table.add_row(moment.name, way, *(f"{figure * 1e3:.1f}" for figure in figures))
        cluster.assert_empty()
    console.print(table)
    console.print(f"Workers report every {HEARTBEAT_S * 1e3:.0f} ms here, which is part of each figure.")


if __name__ == "__main__":
    main()
