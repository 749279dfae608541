"""Policies of placement beside each other and beside an oracle, on a simulated cluster under a public trace.

`python -m bench.placement --trace FILE [--prefill 50 --decode 50 | --workers 100] [--policies a,b,c] [--plot FILE.png]`

FILE is Mooncake's trace (JSONL) or Azure's (CSV). Each policy of the registry places the requests of the whole trace on the
same cluster, with the production core and schedulers and modelled steps (docs/design/0033). The oracle has one cache without a
limit, and serves nothing: it says how few prompt tokens could be computed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pdserve.core.errors import ConfigError
from pdserve.core.slo import DEFAULT_CLASS, SloClass
from router.service.policies import BUILTINS, rankings_of
from sim.perf.cluster import ClusterSpec, calm_router, simulate
from sim.perf.costs import PRESETS
from sim.perf.report import SimReport
from sim.perf.traces import TraceRequest, faster, oracle_tokens, read_trace
from sim.perf.workers import PerfWorkerShape

TOLD_EVERY: Final = 50


@dataclass(frozen=True, slots=True)
class Result:
    """One policy's run. `wall_s` is the time that the simulation took."""

    policy: str
    report: SimReport
    wall_s: float


def spec_of(args: argparse.Namespace, policy: str) -> ClusterSpec:
    """Return the cluster of a run. The policy places on both pools, unless another one is named for decode workers."""
    targets = SloClass("default", ttft_s=args.ttft, tpot_s=args.tpot)
    prefill, decode = (0, args.workers) if args.workers else (args.prefill, args.decode)
    shape = PerfWorkerShape(
        PRESETS[args.preset],
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_tokens=args.kv_tokens,
    )
    return ClusterSpec(
        [shape] * prefill,
        [shape] * decode,
        calm_router(prefill_policy=policy, decode_policy=args.decode_policy or policy),
        classes={"default": targets if args.tell_targets else DEFAULT_CLASS},
        judged_by={"default": targets},
        seed=args.seed,
    )


_progress: SimpleQueue[int] | None = None
"""The queue to which a child process tells how many more requests have ended."""


def _begin(progress: SimpleQueue[int]) -> None:
    global _progress
    _progress = progress


def _run(args: argparse.Namespace, policy: str, requests: Sequence[TraceRequest]) -> Result:
    """Run one policy in a child process."""
    ended = count(1)

    def tell() -> None:
        if _progress is not None and next(ended) % TOLD_EVERY == 0:
            _progress.put(TOLD_EVERY)

    began_s = time.monotonic()
    return Result(policy, simulate(spec_of(args, policy), requests, tell), time.monotonic() - began_s)


def measure(
    args: argparse.Namespace, policies: Sequence[str], requests: Sequence[TraceRequest], console: Console
) -> list[Result]:
    """Run all policies, `args.jobs` at a time."""
    context = get_context("fork")
    told: SimpleQueue[int] = context.SimpleQueue()
    with (
        Progress(console=console, transient=True) as progress,
        ProcessPoolExecutor(args.jobs, context, _begin, (told,)) as pool,
    ):
        bar = progress.add_task(f"{len(policies)} policies", total=len(policies) * len(requests))
        runs = [pool.submit(_run, args, policy, requests) for policy in policies]
        left = set(runs)
        while left:
            left = wait(left, timeout=0.1).not_done
            while not told.empty():
                progress.advance(bar, told.get())
        return [run.result() for run in runs]


def table_of(results: Sequence[Result], requests: Sequence[TraceRequest], title: str) -> Table:
    """Return the table, with the oracle in the first row."""
    oracle, total = oracle_tokens(requests), sum(request.prompt_tokens for request in requests)
    columns = (
        "policy", "M tokens", "over oracle", "hit share", "TTFT p50 s", "p99 s", "TPOT p50 ms", "p99 ms", "refused",
        "in time", "goodput", "busy", "busiest", "took s",
    )  # fmt: skip
    table = Table(
        *columns,
        title=title,
        caption="M tokens: prompt tokens computed, in millions; goodput: requests in time for each second and worker; "
        "busy: mean share of the time in steps",
    )
    table.add_row("oracle", f"{oracle / 1e6:.1f}", "1.00", f"{1 - oracle / total:.1%}", *["-"] * 10)
    for result in results:
        report = result.report
        busy = [worker.busy_s / report.span_s for worker in report.workers if _computes(worker.worker_id, report)]
        table.add_row(
            result.policy,
            f"{report.computed_tokens / 1e6:.1f}",
            f"{report.computed_tokens / oracle:.2f}",
            f"{report.hit_share:.1%}",
            f"{report.ttft_s(0.5):.2f}",
            f"{report.ttft_s(0.99):.1f}",
            f"{1e3 * report.tpot_s(0.5):.0f}",
            f"{1e3 * report.tpot_s(0.99):.0f}",
            f"{report.refused}",
            f"{sum(one.attained for one in report.served) / len(report.served):.1%}",
            f"{report.goodput:.4f}",
            f"{sum(busy) / len(busy):.0%}",
            f"{max(busy):.0%}",
            f"{result.wall_s:.0f}",
        )
    return table


def _computes(worker_id: str, report: SimReport) -> bool:
    """Tell whether the worker computes prompts: all do where none is a prefill worker."""
    return worker_id.startswith("prefill") or not any(one.worker_id.startswith("prefill") for one in report.workers)


def plot(path: Path, title: str, results: Sequence[Result], requests: Sequence[TraceRequest]) -> None:
    """Draw how much each policy computes, and the share of requests whose TTFT is longer than a time. It needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [result.policy for result in results]
    left.barh(names, [result.report.computed_tokens / 1e6 for result in results], color=[f"C{i}" for i in range(len(names))])
    left.axvline(oracle_tokens(requests) / 1e6, color="black", linestyle="--", label="oracle: one cache without a limit")
    left.axvline(sum(request.prompt_tokens for request in requests) / 1e6, color="grey", linestyle=":", label="all prompts")
    left.invert_yaxis()
    left.set(xlabel="prompt tokens computed, millions", xlim=(0, None))
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    for place, result in enumerate(results):
        times = sorted(one.report.ttft_s for one in result.report.finished)
        shares = [1 - i / len(times) for i in range(len(times))]
        right.plot(times, shares, color=f"C{place}", label=result.policy)
    right.set(xscale="log", yscale="log", xlabel="TTFT, s", ylabel="share of requests with a longer TTFT", ylim=(1e-3, 1))
    right.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    right.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    right.xaxis.set_minor_formatter(NullFormatter())
    right.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    right.grid(True, which="both", alpha=0.2)
    right.legend(loc="lower left")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Read the arguments, run all policies, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake's JSONL or Azure's CSV")
    parser.add_argument("--prefill", type=int, default=50, help="prefill workers")
    parser.add_argument("--decode", type=int, default=50, help="decode workers")
    parser.add_argument("--workers", type=int, default=0, help="so many workers that do both, instead of two pools")
    parser.add_argument("--policies", default=",".join(BUILTINS), help="names of the registry, or module:function")
    parser.add_argument("--decode-policy", default="", help="the policy of decode workers; that of the run if none is named")
    parser.add_argument("--preset", choices=PRESETS, default="llama2_70b_a100", help="model and GPU whose steps are modelled")
    parser.add_argument("--kv-tokens", type=int, default=None, help="tokens whose KV fits a worker, instead of the preset's")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="sequences that a worker runs at the same time")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="tokens of one step of a worker")
    parser.add_argument("--speedup", type=float, default=4.0, help="arrivals come so many times as fast as in the trace")
    parser.add_argument("--requests", type=int, default=None, help="only the first so many requests")
    parser.add_argument("--ttft", type=float, default=10.0, help="target for TTFT in seconds")
    parser.add_argument("--tpot", type=float, default=0.1, help="target for TPOT in seconds")
    parser.add_argument(
        "--tell-targets", action="store_true", help="the router knows the targets: it refuses requests that would be late"
    )
    parser.add_argument("--jobs", type=int, default=2, help="policies that run at the same time, each in a process")
    parser.add_argument("--seed", type=int, default=0, help="seed of the heartbeats' phases and of what policies draw")
    parser.add_argument("--plot", type=Path, help="file for the drawing")
    args = parser.parse_args()
    policies = args.policies.split(",")
    try:
        for policy in policies:
            rankings_of(spec_of(args, policy).router, lambda setting, fault: None)
        requests = faster(read_trace(args.trace), args.speedup)[: args.requests]
    except ConfigError as exc:
        parser.error(str(exc))
    pools = f"{args.workers} workers" if args.workers else f"{args.prefill} prefill and {args.decode} decode workers"
    title = f"{len(requests):,} requests at {args.speedup:g} times the rate of the trace, {pools}, {args.preset}"
    results = measure(args, policies, requests, console := Console(width=180))
    console.print(table_of(results, requests, title))
    if args.plot is not None:
        plot(args.plot, title, results, requests)


if __name__ == "__main__":
    main()
