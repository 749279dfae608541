"""`python -m tools.hops`: the way of one chat request through a cluster, counted in Python calls and files of ours.

A router, a prefill worker and a decode worker run in this process, each with the threads that it has in a process of its own.
What a reader follows from the first byte of a request to the first command that leaves the router is a chain of calls, and
each change of file is a page that he turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import decode_worker.main
import prefill_worker.main
from pdserve.config import MIB, EngineConfig, RouterConfig, RouterProcessConfig, WorkerConfig
from pdserve.worker.engine_thread import EngineThread
from pdserve.worker.link import RouterLink
from router.main import serve
from router.service.model import ServedModel
from router.service.service import RouterService
from router.workers.link import Link
from router.workers.wire import _work

ROOT: Final = Path(__file__).resolve().parents[1]
ROOMS: Final = ("pdserve", "router", "prefill_worker", "decode_worker", "kvtransfer")
TOKENS: Final = 24
"""The output of the request. The cost of a further token is that of one request of twice as many tokens, less that of this."""
APART: Final = {"placement": "disaggregated", "ignore_eos": True}
WAIT_S: Final = 60.0
WORK: Final = _work.__code__
SEND: Final = Link.send.__code__
"""The first command has left the router once work has its wire format and the link is asked to send."""
PERIODIC: Final = frozenset([RouterService._tick.__code__, RouterLink._send_beat.__code__])
"""Work that comes by the clock. It would count as the work of the tokens beside which it falls."""
STEP: Final = EngineThread._step.__code__
STEP_S: Final = 0.01
"""A step of a real model takes so long. Steps of the tiny one are so short that several tokens would leave together."""
MEMBERS: Final = ("router", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Hops:
    """The calls and files of one request. Files that generators and imports enter count as well; tests and libraries do not."""

    files: frozenset[str]
    """The files in which a function ran, in any of the three."""
    command_calls: int
    """The calls of the router until the first command."""
    command_changes: int
    """The calls among them that came from another file than the call before."""
    legs: tuple[tuple[str, tuple[str, ...]], ...]
    """The files in the order in which the router enters them until the first command, each with the functions called there."""
    token_calls: dict[str, float]
    """The calls of a further token, by member."""


class Trace:
    """Counts calls by member. `hook` gives the function for `threading.setprofile`."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.files: set[str] = set()
        self.way: list[tuple[str, str]] = []
        """The router's calls until the first command: file and function."""
        self.runs = False
        self._arrives = self._bound = False
        self._names: dict[CodeType, str] = {}

    def hook(self, member: str) -> Callable[[FrameType, str, object], object]:
        """Return the function that counts the calls of one member."""
        left_out: dict[int, FrameType] = {}  # periodic work under way, by thread

        def called(frame: FrameType, event: str, _: object) -> None:
            thread = threading.get_ident()
            if thread in left_out:
                if event == "return" and left_out[thread] is frame:
                    del left_out[thread]
                return
            code = frame.f_code
            if event != "call" or not self.runs:
                return
            if code in PERIODIC:
                left_out[thread] = frame
                return
            if (name := self._names.get(code)) is None:
                name = self._names[code] = _file_of(code)
            if not name:
                return
            if code is STEP:
                time.sleep(STEP_S)
            self.calls[member] += 1
            self.files.add(name)
            if member == "router" and self._arrives:
                self.way.append((name, code.co_name))
                self._bound = self._bound or code is WORK
                self._arrives = not (self._bound and code is SEND)

        return called

    def begin(self) -> None:
        """Forget what was counted, and count from now on."""
        self.calls.clear()
        self.files.clear()
        self.way.clear()
        self._bound = False
        self._arrives = self.runs = True


def _file_of(code: CodeType) -> str:
    """Return the file of a function of ours below the root, and nothing for any other."""
    path = Path(code.co_filename)
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    return name if name.partition("/")[0] in ROOMS else ""


@contextlib.contextmanager
def traced_cluster(trace: Trace) -> Iterator[str]:
    """Run a router and a worker of each role in threads of this process, and yield the router's HTTP address."""
    engine = EngineConfig(model="tiny", kv_cache_memory=16 * MIB, threads=1)
    settings = RouterConfig(http_port=0, grpc_port=0, link_port=0, admin_port=0, metrics_port=0, probe_workers=False)
    ready: Future[dict[str, Any]] = Future()
    stop: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def run() -> None:
        end = asyncio.Event()
        stop.set_result((asyncio.get_running_loop(), end))
        async with serve(RouterProcessConfig(settings, engine), ServedModel.load(engine)) as (told, _):
            ready.set_result(told)
            await end.wait()

    with contextlib.ExitStack() as stack:
        stack.callback(threading.setprofile, None)
        threading.setprofile(trace.hook("router"))  # type: ignore[arg-type]
        router = threading.Thread(target=lambda: asyncio.run(run()), name="router")
        router.start()
        stack.callback(router.join)
        loop, end = stop.result(WAIT_S)
        stack.callback(loop.call_soon_threadsafe, end.set)
        told = ready.result(WAIT_S)
        for member, start in (("prefill", prefill_worker.main.start), ("decode", decode_worker.main.start)):
            threading.setprofile(trace.hook(member))  # type: ignore[arg-type]
            worker = start(WorkerConfig(f"{member}-0", str(told["link"]), engine=engine))
            stack.callback(worker.stop)
        yield str(told["http"])


def ask(address: str, max_tokens: int) -> None:
    """Stream one chat request to its end. Raises `RuntimeError` when it is not answered."""
    connection = http.client.HTTPConnection(address, timeout=WAIT_S)
    with contextlib.closing(connection):
        message = {"role": "user", "content": "hello there"}
        body = {"model": "tiny", "messages": [message], "max_tokens": max_tokens, "stream": True}
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body | APART), headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != http.client.OK or b"[DONE]" not in text:
            raise RuntimeError(f"the request got {answer.status}: {text[:1000]!r}")


def wait_ready(address: str) -> None:
    """Wait until workers of both roles take requests. Raises `TimeoutError`."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        with contextlib.closing(http.client.HTTPConnection(address, timeout=WAIT_S)) as connection:
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        time.sleep(0.02)
    raise TimeoutError(f"the cluster was not ready within {WAIT_S:.0f} s")


def measure(times: int = 3) -> Hops:
    """Trace one request of an idle cluster. The least of several requests counts: heartbeats come in between."""
    trace = Trace()
    with traced_cluster(trace) as address:
        wait_ready(address)
        for count in (TOKENS, 2 * TOKENS):  # what runs once: files that are imported late, connections, caches
            ask(address, count)
        runs: dict[int, list[Counter[str]]] = {TOKENS: [], 2 * TOKENS: []}
        ways, files = [], []
        for _ in range(times):
            for count, seen in runs.items():
                trace.begin()
                ask(address, count)
                trace.runs = False
                seen.append(Counter(trace.calls))
                ways.append(tuple(trace.way))
                files.append(frozenset(trace.files))
    way = min(ways, key=len)
    legs = [
        (name, tuple(function for _, function in calls)) for name, calls in itertools.groupby(way, key=lambda call: call[0])
    ]
    least = {count: {member: min(one[member] for one in seen) for member in MEMBERS} for count, seen in runs.items()}
    token = {member: (least[2 * TOKENS][member] - least[TOKENS][member]) / TOKENS for member in MEMBERS}
    return Hops(min(files, key=len), len(way), len(legs) - 1, tuple(legs), token)


def main() -> None:
    """Print the way of a request."""
    hops = measure()
    for name, functions in hops.legs:
        print(f"{len(functions):4d}  {name}: {', '.join(functions)}")
    print(
        f"{len(hops.files)} files; until the first command {hops.command_calls} calls, {hops.command_changes} changes of file"
    )
    print("a further token: " + ", ".join(f"{member} {calls:.0f} calls" for member, calls in hops.token_calls.items()))


if __name__ == "__main__":
    sys.exit(main())
