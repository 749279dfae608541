"""`make bench-vllm-proxy PROXY=FILE` measures what pdserve adds to servers of vLLM, beside the proxy of vLLM's own tests.

    python -m bench.router.vllm_proxy --proxy toy_proxy_server.py [--real] [--rounds 5]

FILE is `tests/v1/kv_connector/nixl_integration/toy_proxy_server.py` of vLLM's repository. A cluster of pdserve starts one
prefill and one decode server, and the proxy is put before the same two. Both get the same requests in turns, streamed over
HTTP. The servers are stand-ins (testkit.vllm_stand_in) that take 5 ms for a prompt and 10 ms for a token, or with --real
vLLM's CPU build (`make setup-vllm`).

CPU is that of router and workers, or that of the proxy. Behind the proxy a server turns texts into tokens and back itself, and
behind pdserve the router does, so with --real the CPU of the servers' front processes stands beside it. Their engines are
processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import psutil

from bench.router.cost import cpu_s
from pdserve.checkpoint.cache import default_cache_dir
from pdserve.commands.console import make_console
from pdserve.commands.tables import table
from pdserve.config import EngineConfig, VllmConfig
from testkit.processes import ProcessCluster

PROMPT_TOKENS: Final = 100
OUTPUT_TOKENS: Final = 16
REQUESTS: Final = {1: 12, 8: 64}
REAL_REQUESTS: Final = {1: 6, 8: 24}
"""How many requests a turn has, by how many there are at once. Real servers on one core take a second for each."""
FAULTS: Final = {"prefill_s": 0.005, "step_s": 0.01}
SETTLE_S: Final = 0.3
START_S: Final = 30.0
DEFAULT_MODEL: Final = EngineConfig().model
VLLM: Final = "vllm.entrypoints.openai.api_server"
FIRST_ID: Final = 3
LAST_ID: Final = 511
"""The ids of the tiny model's tokens that are not special. The other model has them as well."""


@dataclass(slots=True)
class Front:
    """One of the two that clients ask. `servers` are the front processes of the servers behind it."""

    name: str
    url: str
    model: str
    pids: Mapping[str, int]
    servers: Sequence[int]
    requests: Mapping[int, int]
    ttft_s: dict[int, list[float]] = field(default_factory=dict)
    e2e_s: dict[int, list[float]] = field(default_factory=dict)
    cpu_ms: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    servers_ms: dict[int, list[float]] = field(default_factory=dict)

    async def turn(self, session: aiohttp.ClientSession, concurrency: int, random_ids: random.Random) -> None:
        """Measure one turn. Each value is a mean of a request."""
        count = self.requests[concurrency]
        before, behind = self._cpu(), sum(map(cpu_s, self.servers))
        gate = asyncio.Semaphore(concurrency)

        async def one() -> tuple[float, float]:
            async with gate:
                return await self._ask(session, [random_ids.randint(FIRST_ID, LAST_ID) for _ in range(PROMPT_TOKENS)])

        times = await asyncio.gather(*[one() for _ in range(count)])
        await asyncio.sleep(SETTLE_S)
        took = {name: (after - before[name]) / count * 1e3 for name, after in self._cpu().items()}
        self.cpu_ms.setdefault(concurrency, []).append(took)
        self.servers_ms.setdefault(concurrency, []).append((sum(map(cpu_s, self.servers)) - behind) / count * 1e3)
        self.ttft_s.setdefault(concurrency, []).append(statistics.median(first for first, _ in times))
        self.e2e_s.setdefault(concurrency, []).append(statistics.median(whole for _, whole in times))

    def _cpu(self) -> dict[str, float]:
        return {name: cpu_s(pid) for name, pid in self.pids.items()}

    async def _ask(self, session: aiohttp.ClientSession, prompt: list[int]) -> tuple[float, float]:
        """Return the times to the first token and to the end. Raises RuntimeError unless all tokens came."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began_s, first_s, usage = time.perf_counter(), 0.0, None
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                if not first_s and event.get("choices"):
                    first_s = time.perf_counter() - began_s
        if usage is None or usage["completion_tokens"] != OUTPUT_TOKENS:
            raise RuntimeError(f"{self.name} gave {usage} instead of {OUTPUT_TOKENS} tokens")
        return first_s, time.perf_counter() - began_s


def engine_of(*, real: bool) -> EngineConfig:
    """Return the settings of the workers. Real servers share one core, since idle ones keep it busy."""
    faults = ("--faults", json.dumps(FAULTS))
    stand_in = VllmConfig(command=(sys.executable, "-m", "testkit.vllm_stand_in"), args=faults)
    vllm = VllmConfig(command=("taskset", "-c", "1", str(_vllm_python()), "-m", VLLM))
    return EngineConfig(
        model=DEFAULT_MODEL if real else "tiny",
        backend="vllm",
        device="cpu",
        max_model_len=512,
        max_num_seqs=16,
        enable_prefix_caching=False,
        vllm=vllm if real else stand_in,
    )


def _vllm_python() -> Path:
    return default_cache_dir() / "vllm" / "bin" / "python"


def server_of(cluster: ProcessCluster, name: str) -> tuple[int, int]:
    """Return the process id and the port of the server of a worker."""
    for child in psutil.Process(cluster.processes[name].popen.pid).children(recursive=True):
        command = child.cmdline()
        if "--port" in command and not any(part.endswith("guard.py") for part in command):
            return child.pid, int(command[command.index("--port") + 1])
    raise RuntimeError(f"{name} has no server")


@contextlib.contextmanager
def started_proxy(file: Path, prefill_port: int, decode_port: int) -> Iterator[tuple[int, str]]:
    """Run the proxy until the block ends, and give its process id and its URL."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    hosts = ("--prefiller-hosts", "127.0.0.1", "--decoder-hosts", "127.0.0.1")
    ports = ("--prefiller-ports", str(prefill_port), "--decoder-ports", str(decode_port))
    command = [str(_vllm_python()), str(file), "--port", str(port), *hosts, *ports]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            end_s = time.monotonic() + START_S
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                    break
                if process.poll() is not None or time.monotonic() > end_s:
                    raise RuntimeError(f"the proxy did not start: {' '.join(command)}")
                time.sleep(0.1)
            yield process.pid, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


async def measure(fronts: Sequence[Front], rounds: int, seed: int) -> None:
    """Measure both in turns, after a turn of each that is not counted."""
    random_ids = random.Random(seed)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120.0)) as session:
        for front in fronts:
            await front.turn(session, 8, random_ids)
            for counted in (front.ttft_s, front.e2e_s, front.cpu_ms, front.servers_ms):
                counted.clear()
        for number in range(rounds):
            for concurrency in REQUESTS:
                for front in fronts if number % 2 else reversed(fronts):
                    await front.turn(session, concurrency, random_ids)


def show(fronts: Sequence[Front], rounds: int, *, real: bool) -> None:
    """Print the table."""
    ours, proxy = fronts
    servers = "vLLM's CPU build" if real else "stand-ins"
    title = f"pdserve and the proxy before the same two servers ({servers}); medians of {rounds} interleaved rounds"
    made = table(title, ("at once", "a request's"), ("pdserve", "proxy", "ratio"))
    for concurrency in REQUESTS:
        for name, figures in (("time to the first token, ms", "ttft_s"), ("whole time, ms", "e2e_s")):
            each = [[1e3 * value for value in getattr(front, figures)[concurrency]] for front in fronts]
            made.add_row(str(concurrency), name, *_beside(*each))
        cpu = [[sum(one.values()) for one in front.cpu_ms[concurrency]] for front in fronts]
        made.add_row(str(concurrency), "CPU, ms", *_beside(*cpu))
        parts = [f"{name} {statistics.median(one[name] for one in ours.cpu_ms[concurrency]):.1f}" for name in ours.pids]
        made.add_row("", "", ", ".join(parts), "", "")
        if real:
            behind = [front.servers_ms[concurrency] for front in (ours, proxy)]
            made.add_row(str(concurrency), "CPU of the servers' front processes, ms", *_beside(*behind))
            whole = [[a + b for a, b in zip(one, other, strict=True)] for one, other in zip(cpu, behind, strict=True)]
            made.add_row(str(concurrency), "both, ms", *_beside(*whole))
        made.add_section()
    make_console().print(made)


def _beside(ours: list[float], theirs: list[float]) -> tuple[str, str, str]:
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return f"{statistics.median(ours):.1f}", f"{statistics.median(theirs):.1f}", f"{ratio:.2f}"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description="Measure what pdserve adds to servers of vLLM, beside the proxy of vLLM's tests."
    )
    parser.add_argument("--proxy", type=Path, required=True, help="toy_proxy_server.py of vLLM's repository")
    parser.add_argument("--real", action="store_true", help="with vLLM's CPU build instead of stand-ins")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with ProcessCluster(engine_of(real=args.real)) as cluster:
        servers = [server_of(cluster, name) for name in cluster.worker_names]
        pids = {name: process.popen.pid for name, process in cluster.processes.items()}
        fronts_pids = [pid for pid, _ in servers]
        requests = REAL_REQUESTS if args.real else REQUESTS
        with started_proxy(args.proxy, servers[0][1], servers[1][1]) as (pid, url):
            fronts = (
                Front("pdserve", f"http://{cluster.http}", "", pids, fronts_pids, requests),
                Front("proxy", url, "served", {"proxy": pid}, fronts_pids, requests),
            )
            asyncio.run(measure(fronts, args.rounds, args.seed))
        show(fronts, args.rounds, real=args.real)


if __name__ == "__main__":
    main()
