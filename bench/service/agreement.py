"""`python -m bench.service.agreement`: do our load generator, vLLM's and AIPerf say the same about one server?

One cluster runs, and the tools measure the same workload in turns, in another order each round: the same numbers of tokens and
of requests at the same time, by `/v1/completions`. Each tool makes its own random prompts: ours sends ids, the others send
text of so many tokens.

A tool that runs on the server's cores changes the server. So the first table compares each tool with what the server itself saw
in the same turns: the mean of the tool's requests over the mean of the router's histogram, as the median of the rounds with its
95 % interval. A tool agrees when the interval is within the tolerance. The second table says how long the server's processes
ran and waited for a core. The third one compares the tools with each other: the median of requests, or the mean of rounds for
rates, and whether the interval of each other tool overlaps ours. In a closed loop, the pause that a tool makes between two
requests lowers its rates.

Every tool runs in a session of its own, so all get the same share of the cores from Linux. `--shared-session` runs each tool in
the server's session as well, and shows what that costs. Each tool may set its own priority: ours makes its threads real-time
threads where the system allows it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.engine.peers.install import NotInstalled
from bench.service.load_tools import Measured, Tool, Turn, TurnFailed, tools
from bench.service.server_side import Observed, compared_table, cores_table, counters, seen
from pdserve.checkpoint.resolve import resolve
from pdserve.commands.console import make_console
from pdserve.config import MIB, EngineConfig
from pdserve_bench.report.compare import Interval, interval, mean_of, percentile_of
from testkit.processes import ProcessCluster

ROUNDS = 5
SERVED = "model"  # the name by which the tools ask for the model


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: a figure of one tool."""

    name: str
    tool: str
    unit: str
    value: Interval


def figures(tool: str, turns: Sequence[Measured]) -> list[Figure]:
    """Return the figures of a tool over all of its turns."""
    ttft_ms = np.array([one * 1000 for turn in turns for one in turn.ttft_s])
    tpot_ms = np.array([one * 1000 for turn in turns for one in turn.tpot_s])
    rates = {
        "output tokens": np.array([turn.output_tokens_per_s for turn in turns]),
        "requests": np.array([turn.requests_per_s for turn in turns]),
    }
    return [
        Figure("TTFT p50", tool, "ms", interval(percentile_of(ttft_ms, 50), seed=0)),
        Figure("TPOT p50", tool, "ms", interval(percentile_of(tpot_ms, 50), seed=0)),
        *(Figure(f"{name} mean", tool, "1/s", interval(mean_of(values), seed=0)) for name, values in rates.items()),
    ]


def overlap(a: Interval, b: Interval) -> bool:
    """Tell whether two intervals have a point in common."""
    return a.low <= b.high and b.low <= a.high


def table(found: Sequence[Sequence[Figure]]) -> Table:
    """Draw the figures of all tools, ours first."""
    made = Table(box=None, header_style="bold")
    for name in ("figure", "tool", "value", "95 % interval", "overlaps ours"):
        made.add_column(name, justify="left" if name in ("figure", "tool") else "right", no_wrap=True)
    for lines in zip(*found, strict=True):
        for index, one in enumerate(lines):
            told = "" if not index else "yes" if overlap(lines[0].value, one.value) else "NO"
            said = f"{one.value.low:.2f} to {one.value.high:.2f}"
            made.add_row("" if index else f"{one.name}, {one.unit}", one.tool, f"{one.value.estimate:.2f}", said, told)
    return made


def measure(
    all_tools: Sequence[Tool], turn: Turn, rounds: int, pids: Mapping[str, int], console: Console
) -> list[list[Observed]]:
    """Let the tools measure in turns. The first round is not kept. `pids` are the server's processes by their names."""
    kept: list[list[Observed]] = [[] for _ in all_tools]
    for number in range(rounds + 1):
        order = [(number + offset) % len(all_tools) for offset in range(len(all_tools))]
        for index in order:
            tool, before = all_tools[index], counters(turn.url, pids)
            with tempfile.TemporaryDirectory() as folder:
                measured = tool.measure(replace(turn, seed=1 + number * 10 + index), Path(folder))
            server = seen(before, counters(turn.url, pids), turn.requests)
            tpot_ms = f"TPOT {1000 * measured.means_s['TPOT']:.1f} ms, by the server {1000 * server.means_s['TPOT']:.1f} ms"
            console.print(f"round {number}: {tool.name}: {tpot_ms}", highlight=False)
            if number:
                kept[index].append(Observed(measured, server))
    return kept


def main() -> int:
    """Measure, and print the tables. Return 1 when a tool could not be run."""
    parser = argparse.ArgumentParser(prog="python -m bench.service.agreement")
    parser.add_argument("--model", default="default")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--shared-session", action="store_true", help="run each tool in the server's session as well")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds: {args.rounds} is below 2; the rates of one round have no interval")
    console = make_console()
    engine = EngineConfig(
        model=args.model, served_model_name=SERVED, kv_cache_memory=512 * MIB, threads=1, enable_prefix_caching=False
    )
    try:
        all_tools = tools(console.print)
        if args.shared_session:
            all_tools += [replace(tool, name=f"{tool.name}, shared", own_session=False) for tool in all_tools]
        with ProcessCluster(engine, prefill=1, decode=1) as cluster:
            tokenizer = resolve(args.model)
            shape = (args.prompt_tokens, args.output_tokens, args.requests, args.concurrency)
            turn = Turn(f"http://{cluster.http}", SERVED, tokenizer, *shape, seed=0)
            pids = {name: process.popen.pid for name, process in cluster.processes.items()}
            kept = measure(all_tools, turn, args.rounds, pids, console)
    except (NotInstalled, TurnFailed) as exc:
        console.print(str(exc), markup=False)
        return 1
    names = [tool.name for tool in all_tools]
    for made in (
        compared_table(names, kept),
        cores_table(names, kept),
        table([figures(name, [turn.tool for turn in turns]) for name, turns in zip(names, kept, strict=True)]),
    ):
        console.print(made, "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
