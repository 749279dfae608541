"""The planner beside the best static split of workers into two pools, over a day on a simulated cluster.

`python -m bench.planner --trace FILE [--plot FILE.png] [--json FILE]`

FILE is Azure's trace of an hour (CSV) or Mooncake's (JSONL). It is repeated around the clock and thinned by the curve of
`sim.perf.days`. The planner runs first. All static splits follow that could be cheaper than the first one found to attain the
same: what was asked for, or what the planner attained where that is less. Then come those that could be the cheapest to attain
what was asked for (`sim.perf.statics` says which are left out, and why nothing is lost). All use the production core and
schedulers, and modelled steps (docs/design/0033 and 0035). A shortened day leaves the times of workers and of the planner as
they are. `bench.planner_loads` judges the planner on generated loads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import count
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from bench.planner_plot import plot
from pdserve.core.errors import ConfigError
from pdserve.core.slo import SloClass
from pdserve.planner.limits import Limits, PoolLimits, Targets
from sim.perf.cluster import ClusterSpec, calm_router, run_cluster
from sim.perf.controllers import PlannerController
from sim.perf.costs import PRESETS
from sim.perf.days import Day, requests_of
from sim.perf.elastic import ElasticCluster, Elasticity
from sim.perf.judge import compared
from sim.perf.report import PoolsAt
from sim.perf.statics import Split, best_of, run_split, search
from sim.perf.traces import TraceRequest, read_trace
from sim.perf.workers import PerfWorkerShape

TOLD_EVERY: Final = 200


@dataclass(frozen=True, slots=True)
class Planned:
    """The planner's run."""

    attainment: float
    worker_s: float
    flips: int
    changes: int
    """The plans whose sizes differed from the ones before."""
    ttft_p99_s: float
    tpot_p99_s: float
    history: list[PoolsAt]


_progress: SimpleQueue[int] | None = None
_day: list[TraceRequest] = []
"""The requests of the day. Child processes have them from their parent, since they are forks."""


def _begin(progress: SimpleQueue[int]) -> None:
    global _progress
    _progress = progress


def _teller() -> Callable[[], None]:
    ended = count(1)

    def tell() -> None:
        if _progress is not None and next(ended) % TOLD_EVERY == 0:
            _progress.put(TOLD_EVERY)

    return tell


def day_of(args: argparse.Namespace) -> Day:
    """Return the day of the arguments."""
    return Day(args.hours, args.begins, args.minutes_per_hour, args.speedup, args.seed)


def spec_of(args: argparse.Namespace) -> ClusterSpec:
    """Return the cluster with which the planner begins. Nothing is cached, since no two prompts begin alike."""
    shape = PerfWorkerShape(
        PRESETS[args.preset], max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens
    )
    return ClusterSpec(
        [shape] * args.begin_prefill,
        [shape] * args.begin_decode,
        calm_router(),
        prefix_caching=False,
        classes={"default": SloClass("default", ttft_s=args.ttft, tpot_s=args.tpot)},
        seed=args.seed,
    )


def run_planner(args: argparse.Namespace) -> Planned:
    """Run the day with the planner."""
    limits = Limits(PoolLimits(1, args.max_prefill), PoolLimits(1, args.max_decode), can_flip=not args.no_flips)
    controller = PlannerController(Targets(args.ttft, args.tpot, args.attainment), limits)
    elasticity = Elasticity(limits, interval_s=args.interval, start_s=args.start, flip_s=args.flip, slo_class="default")
    cluster = ElasticCluster(spec_of(args), _day, controller, elasticity, _teller())
    report, pools = run_cluster(cluster), cluster.pools
    attained = sum(one.attained for one in report.served) / len(_day)
    ttft_s, tpot_s = report.ttft_s(0.99), report.tpot_s(0.99)
    return Planned(attained, pools.worker_s, pools.flips, len(controller.plans) - 1, ttft_s, tpot_s, pools.history)


def _run_split(args: argparse.Namespace, prefill: int, decode: int, enough: float) -> Split:
    return run_split(spec_of(args), prefill, decode, _day, enough, _teller())


def _wait(
    runs: Sequence[Future[Split]] | Sequence[Future[Planned]], told: SimpleQueue[int], bar: Callable[[int], None]
) -> None:
    left = set(runs)
    while left:
        left = wait(left, timeout=0.2).not_done  # type: ignore[assignment]
        while not told.empty():
            bar(told.get())


def measure(args: argparse.Namespace, console: Console) -> tuple[Planned, list[Split]]:
    """Run the planner, and then all static splits that count, `args.jobs` at a time."""
    context = get_context("fork")
    told: SimpleQueue[int] = context.SimpleQueue()
    with (
        Progress(console=console, transient=True) as progress,
        ProcessPoolExecutor(args.jobs, context, _begin, (told,)) as pool,
    ):

        def bar_of(text: str, runs: int) -> tuple[TaskID, Callable[[int], None]]:
            task = progress.add_task(text, total=runs * len(_day))
            return task, lambda ended: progress.advance(task, ended)

        task, advance = bar_of("planner", 1)
        planned = pool.submit(run_planner, args)
        _wait([planned], told, advance)
        progress.update(task, completed=len(_day))

        def run(splits: Sequence[tuple[int, int]], enough: float) -> list[Split]:
            workers = sum(splits[0])
            task, advance = bar_of(f"{len(splits)} splits of {workers} workers", len(splits))
            runs = [pool.submit(_run_split, args, prefill, decode, enough) for prefill, decode in splits]
            _wait(runs, told, advance)
            progress.update(task, completed=len(splits) * len(_day))
            return [one.result() for one in runs]

        shares = enough_of(args, planned.result()), args.attainment
        return planned.result(), search(run, args.max_prefill, args.max_decode, shares)


def enough_of(args: argparse.Namespace, planned: Planned) -> float:
    """Return the share that a static split must attain to be compared with the planner."""
    return min(args.attainment, planned.attainment)


def grid_of(splits: Sequence[Split], title: str) -> Table:
    """Return the table with the attainment of all splits."""
    most = max(one.decode for one in splits)
    table = Table("prefill \\ decode", *map(str, range(1, most + 1)), title=title)
    found = {(one.prefill, one.decode): one for one in splits}
    for prefill in range(1, max(one.prefill for one in splits) + 1):
        table.add_row(str(prefill), *[_cell(found.get((prefill, decode))) for decode in range(1, most + 1)])
    table.caption = "share of the requests in time; < : ended early, could not attain enough; -: costs more than the best one"
    return table


def _cell(split: Split | None) -> str:
    if split is None:
        return "-"
    return f"{split.attainment:.2%}" if split.whole else f"< {split.attainment:.1%}"


def table_of(args: argparse.Namespace, planned: Planned, splits: Sequence[Split], title: str) -> Table:
    """Return the table with the planner and the best splits: that attain the same, and that attain what was asked for."""
    scale = args.minutes_per_hour / 60.0
    columns = ("sizes", "worker-hours of a day", "in time", "TTFT p99 s", "TPOT p99 ms", "changes", "flips")
    table = Table(*columns, title=title)

    def row(name: str, worker_s: float, attained: float, ttft_s: float, tpot_s: float, *more: str) -> None:
        hours = f"{worker_s / 3600.0 / scale:.1f}"
        table.add_row(name, hours, f"{attained:.2%}", f"{ttft_s:.2f}", f"{1e3 * tpot_s:.1f}", *more)

    row(
        "planner", planned.worker_s, planned.attainment, planned.ttft_p99_s, planned.tpot_p99_s,
        str(planned.changes), str(planned.flips),
    )  # fmt: skip
    same, asked = (best_of(splits, enough) for enough in (enough_of(args, planned), args.attainment))
    said = [] if planned.attainment >= args.attainment else [f"the planner misses the {args.attainment:.2%} asked for"]
    if asked is None:
        said.append(f"no static split within the limits attains the {args.attainment:.2%} asked for")
    for best in dict.fromkeys(one for one in (same, asked) if one is not None):
        name = f"{best.prefill} prefill, {best.decode} decode"
        row(name, best.worker_s, best.attainment, best.ttft_p99_s, best.tpot_p99_s, "0", "0")
        said.append(compared(planned.worker_s, planned.attainment, best))
    table.caption = "\n".join(said)
    return table


def parser_of() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="Azure's CSV or Mooncake's JSONL")
    parser.add_argument("--minutes-per-hour", type=float, default=10.0, help="minutes that stand for an hour of the day")
    parser.add_argument("--hours", type=float, default=24.0, help="hours of the day")
    parser.add_argument("--begins", type=float, default=8.0, help="the hour at which the day begins")
    parser.add_argument("--speedup", type=float, default=1.0, help="arrivals come so many times as fast as in the trace")
    parser.add_argument("--preset", choices=PRESETS, default="llama2_70b_a100", help="model and GPU whose steps are modelled")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="sequences that a worker runs at the same time")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="tokens of one step of a worker")
    parser.add_argument("--ttft", type=float, default=1.5, help="target for TTFT in seconds")
    parser.add_argument("--tpot", type=float, default=0.06, help="target for TPOT in seconds")
    parser.add_argument("--attainment", type=float, default=0.97, help="share of the requests that should meet both targets")
    parser.add_argument("--max-prefill", type=int, default=8, help="the most prefill workers")
    parser.add_argument("--max-decode", type=int, default=10, help="the most decode workers")
    parser.add_argument("--begin-prefill", type=int, default=3, help="prefill workers with which the planner begins")
    parser.add_argument("--begin-decode", type=int, default=4, help="decode workers with which the planner begins")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between two calls of the planner")
    parser.add_argument("--start", type=float, default=60.0, help="seconds from the order of a worker until it serves")
    parser.add_argument("--flip", type=float, default=5.0, help="seconds from the end of a worker's role until it serves again")
    parser.add_argument("--no-flips", action="store_true", help="workers keep their roles")
    parser.add_argument("--jobs", type=int, default=2, help="splits that run at the same time, each in a process")
    parser.add_argument("--seed", type=int, default=0, help="seed of the thinning and of the heartbeats' phases")
    parser.add_argument("--plot", type=Path, help="file for the drawing; one for dark pages has -dark in its name")
    parser.add_argument("--json", type=Path, help="file for all results")
    return parser


def main() -> None:
    """Read the arguments, run the planner and the splits, and print both tables."""
    parser = parser_of()
    args = parser.parse_args()
    try:
        _day.extend(requests_of(read_trace(args.trace), day_of(args)))
    except ConfigError as exc:
        parser.error(str(exc))
    began_s = time.monotonic()
    planned, splits = measure(args, console := Console(width=140))
    best = best_of(splits, args.attainment)
    console.print(grid_of(splits, f"{len(_day):,} requests, {args.preset}: static splits"))
    targets = f"TTFT {args.ttft:g} s and TPOT {1e3 * args.tpot:g} ms for {args.attainment:.1%}"
    console.print(table_of(args, planned, splits, targets))
    console.print(f"{len(splits) + 1} runs took {time.monotonic() - began_s:.0f} s")
    if args.json is not None:
        found = {"arguments": {k: str(v) for k, v in vars(args).items()}, "planner": asdict(planned) | {"history": None}}
        args.json.write_text(json.dumps(found | {"splits": [asdict(one) for one in splits]}, indent=1) + "\n")
    if args.plot is not None:
        plot(args.plot, day_of(args), planned.history, best)


if __name__ == "__main__":
    main()
