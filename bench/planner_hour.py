"""The planner over a compressed day on real workers, beside the same day on a simulated cluster.

`python -m bench.planner_hour [--minutes 60] [--plot FILE.png] [--json FILE]`

The real side is `pdserve up --autoscaling` with Ray, engines, KV transfers and the actuator. Its workers are slow machines
(`bench.slow_worker`), so that two cores have room for eight. Requests arrive over gRPC by the curve of `sim.perf.days`, and
half of the prompts begin like earlier ones. The simulated side (docs/design/0035) has the same requests, settings and sizes.
What it has to know of the workers is measured on the real ones: the times of steps and of starts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.planner_plot import plot_beside
from bench.slow_cluster import Look, RealDay, run_day
from bench.slow_worker import Step, write_costs
from pdserve.cluster.scaling.limits import limits_of, planner_settings, targets_of
from pdserve.config import ClusterConfig, load
from pdserve.core.block_hash import block_hashes, chain_salt, key_of
from pdserve_bench.workload.request import BenchRequest
from sim.perf.cluster import ClusterSpec, calm_router, run_cluster
from sim.perf.controllers import PlannerController
from sim.perf.costs import CostModel
from sim.perf.days import Day, share
from sim.perf.elastic import ElasticCluster, Elasticity
from sim.perf.report import quantile
from sim.perf.traces import TraceRequest
from sim.perf.workers import PerfWorkerShape

COSTS: Final = CostModel(
    name="tiny",
    prompt_base_s=0.02,
    prompt_token_s=0.001,
    prompt_pair_s=0.0,
    decode_base_s=0.04,
    decode_s=0.002,
    context_token_s=0.0,
    kv_bytes_per_token=1024,
    kv_tokens=16_384,
    transfer_bytes_s=1e9,
)
"""The steps of a slow worker. They take about ten times as long as the tiny model needs on one core of an AMD EPYC (0.07 ms a
token of a prompt, 2.6 to 8 ms for 1 to 16 sequences), so eight workers take less than a core. The KV of a prompt passes
within a millisecond, as in shared memory."""
HOP_S: Final = 0.003
"""A message on loopback with the event loops at both ends. First tokens take five, and came 16 ms after the prompt's steps."""
SLO_CLASS: Final = "day"
TTFT_S: Final = 2.0
"""Eight mean prompts, as for the generated loads of `sim.perf.loads`."""
TPOT_S: Final = 0.07
"""The step of 14 sequences; with the planner's room, of 11. The 1.4 steps of one sequence of those loads are near the least
that the planner takes to be within reach, where small errors of what it learns change sizes most."""
MAX_WORKERS: Final = 4
"""The most workers of each pool. The peak needs about three."""
BLOCK_SIZE: Final = 16
PREFIXES: Final = 4
PREFIX_BLOCKS: Final = 12
CACHED_SHARE: Final = 0.5
"""The share of the requests that begin with one of so many prefixes."""
SUFFIX_TOKENS: Final = 150
PROMPT_TOKENS: Final = 300
"""Mean lengths behind a prefix, and of prompts without one. 0.6 is the sigma of the logarithm of all lengths."""
OUTPUT_TOKENS: Final = 60
SIGMA: Final = 0.6
FIRST_ID: Final = 3
LAST_ID: Final = 511
"""The ids of the tiny model's tokens that are not special."""
PARTS: Final = 12
NEAR_SHARE: Final = 0.05
NEAR_WORKERS: Final = 1.0
FULL_MINUTES: Final = 60.0
"""The planner has its default delays in a day of an hour. A shorter day shortens those that are listed."""
DELAYS: Final = {"downscale_delay_s": 300.0, "flip_delay_s": 60.0, "cooldown_s": 30.0, "trend_s": 300.0, "smoothing_s": 30.0}
FLIP_S: Final = 0.2
"""An idle worker that `pdserve flip` moves to the other pool has no link for 0.1 to 0.2 s."""


@dataclass(frozen=True, slots=True)
class HourRequest(TraceRequest):
    """A request whose prompt has tokens of the real model."""

    ids: tuple[int, ...] = ()

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The token ids of the prompt."""
        return self.ids

    def prefix_keys(self, block_size: int, model_salt: bytes) -> tuple[int, ...]:
        """Return the keys of the prompt's full blocks, as the router's admission computes them."""
        return tuple([key_of(one) for one in block_hashes(self.ids, block_size, salt=chain_salt(model_salt, ""))])


def day_of(minutes: float) -> Day:
    """Return a day of so many minutes. It begins at three in the morning, with little load."""
    return Day(minutes_per_hour=minutes / 24.0)


def requests_of(day: Day, peak_per_s: float, seed: int) -> list[HourRequest]:
    """Draw the requests of a day: Poisson arrivals, and lengths of a lognormal distribution."""
    rng = random.Random(seed)
    prefixes = [_ids(rng, PREFIX_BLOCKS * BLOCK_SIZE) for _ in range(PREFIXES)]
    requests: list[HourRequest] = []
    now_s = 0.0
    while (now_s := now_s + rng.expovariate(peak_per_s)) < day.length_s:
        if rng.random() >= share(day.hour_of(now_s)):
            continue
        if rng.random() < CACHED_SHARE:
            ids = rng.choice(prefixes) + _ids(rng, _length(rng, SUFFIX_TOKENS))
        else:
            ids = _ids(rng, _length(rng, PROMPT_TOKENS))
        requests.append(HourRequest(now_s, len(ids), _length(rng, OUTPUT_TOKENS), (), SLO_CLASS, ids=ids))
    return requests


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(FIRST_ID, LAST_ID + 1), k=count))


def _length(rng: random.Random, mean: int) -> int:
    """Draw a length from a sixth of the mean to four times as much, so that each request fits the tiny model's 2,048 tokens."""
    drawn = rng.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)
    return round(min(max(drawn, mean / 6), mean * 4))


def settings_of(args: argparse.Namespace) -> dict[str, object]:
    """Return the configuration of the cluster, as its file has it."""
    shorter = min(1.0, args.minutes / FULL_MINUTES)
    pool = {"replicas": 1, "min_replicas": 1, "max_replicas": MAX_WORKERS}
    engine = {
        "model": "tiny", "dtype": "float32", "device": "cpu", "threads": 1, "block_size": BLOCK_SIZE,
        "max_num_seqs": 16, "max_num_batched_tokens": 256, "kv_cache_memory": COSTS.kv_tokens * COSTS.kv_bytes_per_token,
    }  # fmt: skip
    return {
        "engine": engine,
        "router": {"default_class": SLO_CLASS, "slo_classes": {SLO_CLASS: {"ttft_s": TTFT_S, "tpot_s": TPOT_S}}},
        "prefill": pool,
        "decode": pool,
        "autoscaling": {
            "enabled": True,
            "interval_s": args.interval,
            "attainment": args.attainment,
            "planner": {"start_s": args.start, **{name: shorter * delay_s for name, delay_s in DELAYS.items()}},
        },
    }


# What both sides have in common ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answered:
    """One request as it was served. An `error` is the reason of a failure."""

    arrived_s: float
    ttft_s: float
    tpot_s: float
    disaggregated: bool
    error: str = ""

    @property
    def attained(self) -> bool:
        """True when the request was served within its targets."""
        return not self.error and self.ttft_s <= TTFT_S and self.tpot_s <= TPOT_S


@dataclass(frozen=True, slots=True)
class Side:
    """The day on one of the clusters. `changes` are the planner's, each with its time and reason."""

    answered: Sequence[Answered]
    looks: Sequence[Look]
    worker_s: float
    changes: Sequence[tuple[float, str]]
    flips: int

    @property
    def attainment(self) -> float:
        """The share of all requests that were served within their targets."""
        return sum(one.attained for one in self.answered) / max(1, len(self.answered))

    def quantile(self, value: Callable[[Answered], float], part: float) -> float:
        """Return the quantile of a value over the requests that were served."""
        return quantile([value(one) for one in self.answered if not one.error], part)


@dataclass(frozen=True, slots=True)
class Part:
    """The sizes of both pools in one part of the day: means and maxima of prefill and decode."""

    mean: tuple[float, float]
    most: tuple[int, int]


def parts_of(looks: Sequence[Look], length_s: float, parts: int = PARTS) -> list[Part | None]:
    """Return the sizes in each of so many equal parts of the day. None: nobody looked in this part."""
    found: list[list[Look]] = [[] for _ in range(parts)]
    for one in looks:
        if 0.0 <= one.at_s < length_s:
            found[int(one.at_s / length_s * parts)].append(one)
    return [
        Part(
            (sum(one.prefill for one in some) / len(some), sum(one.decode for one in some) / len(some)),
            (max(one.prefill for one in some), max(one.decode for one in some)),
        )
        if some
        else None
        for some in found
    ]


def failures_of(real: Side, simulated: Side, length_s: float) -> list[str]:
    """Return in words what of the real day is not as in the simulation. Empty: all is."""
    said = []
    apart = real.attainment - simulated.attainment
    if abs(apart) > NEAR_SHARE:
        said.append(f"the attainment is {100 * apart:+.1f} percentage points from the simulated one")
    sides = zip(parts_of(real.looks, length_s), parts_of(simulated.looks, length_s), strict=True)
    for number, (ours, theirs) in enumerate(sides, 1):
        if ours is None or theirs is None:
            said.append(f"part {number} has no sizes")
            continue
        for pool, mine, other in zip(("prefill", "decode"), ours.mean, theirs.mean, strict=True):
            if abs(mine - other) > NEAR_WORKERS:
                said.append(f"part {number} has {mine:.1f} {pool} workers, simulated {other:.1f}")
    return said


def fit(steps: Sequence[Step], like: CostModel) -> CostModel:
    """Return the costs that steps have had, by least squares of relative errors.

    Steps with prompts and decodes are left out: of these only the larger base counts. A kind that never ran alone, or had one
    size only, keeps the costs of `like`.
    """
    prompts = [(work.prompt_tokens, took_s) for work, took_s in steps if work.prompt_tokens and not work.decodes]
    decodes = [(work.decodes, took_s) for work, took_s in steps if work.decodes and not work.prompt_tokens]
    prompt_base_s, prompt_token_s = _line(prompts, (like.prompt_base_s, like.prompt_token_s))
    decode_base_s, decode_s = _line(decodes, (like.decode_base_s, like.decode_s))
    return replace(
        like, prompt_base_s=prompt_base_s, prompt_token_s=prompt_token_s, decode_base_s=decode_base_s, decode_s=decode_s
    )


def _line(points: Sequence[tuple[int, float]], otherwise: tuple[float, float]) -> tuple[float, float]:
    if len({size for size, _ in points}) < 2:
        return otherwise
    sizes, times_s = np.array([size for size, _ in points], float), np.array([took_s for _, took_s in points])
    rows = np.stack([1.0 / times_s, sizes / times_s], axis=1)
    base_s, each_s = np.linalg.lstsq(rows, np.ones(len(points)))[0]
    return float(base_s), float(each_s)


def off(steps: Sequence[Step], costs: CostModel, most: float) -> float:
    """Return the share of the steps whose time leaves that of the costs by more than a share."""
    return sum(abs(took_s / costs.step_s(work) - 1.0) > most for work, took_s in steps) / max(1, len(steps))


def real_side(real: RealDay) -> Side:
    """Return the real day by the times of its clients."""
    answered = [
        Answered(row.planned_s, row.ttft_s or 0.0, row.tpot_s or 0.0, row.served.placement == "disaggregated", row.error)
        for row in sorted(real.rows, key=lambda row: row.number)
    ]
    watched = real.watched
    end_s = watched.looks[-1].at_s if watched.looks else 0.0
    changes = [(end_s - one.age_s, one.text) for one in watched.last.scaling.history]
    return Side(answered, watched.looks, watched.worker_s, changes, watched.flips)


# The simulated day -------------------------------------------------------------------------------------------------------


def simulate(config: ClusterConfig, requests: Sequence[HourRequest], costs: CostModel, start_s: float, seed: int) -> Side:
    """Run the day on a simulated cluster with the planner, settings and sizes of the real one."""
    engine = config.engine
    shape = PerfWorkerShape(costs, *engine.largest_limits("cpu"), max_model_len=2048)
    spec = ClusterSpec(
        [shape],
        [shape],
        calm_router(),
        block_size=engine.block_size,
        max_tokens=1,  # each client asks for exactly the tokens that it gets
        classes=config.router.classes(),
        hop_s=HOP_S,
        seed=seed,
    )
    limits = replace(limits_of(config), can_flip=True)
    controller = PlannerController(targets_of(config), limits, planner_settings(config))
    elasticity = Elasticity(limits, config.autoscaling.interval_s, start_s, FLIP_S)
    cluster = ElasticCluster(spec, requests, controller, elasticity)
    report, pools = run_cluster(cluster), cluster.pools
    answered = [
        Answered(one.arrived_s, one.report.ttft_s, one.report.tpot_s, one.report.prefill_worker != "", one.error)
        for one in sorted(report.served, key=lambda one: one.arrived_s)
    ]
    looks = [Look(at.observed, at.members) for at in pools.history]
    changes = [(at_s, f"{one.prefill} + {one.decode}: {' '.join(one.reasons)}") for at_s, one in controller.plans]
    return Side(answered, looks, pools.worker_s, changes, pools.flips)


# The page ----------------------------------------------------------------------------------------------------------------


def table_of(real: Side, simulated: Side, day: Day) -> Table:
    """Return the table of the sizes of both sides in each part of the day."""
    columns = ("from", "requests", "in time", "simulated", "prefill", "simulated", "decode", "simulated")
    table = Table(*columns, title="mean and largest sizes of the pools")
    length_s = day.length_s
    pairs = zip(parts_of(real.looks, length_s), parts_of(simulated.looks, length_s), strict=True)
    for number, (ours, theirs) in enumerate(pairs):
        begin_s, end_s = number * length_s / PARTS, (number + 1) * length_s / PARTS
        ones = [[one for one in side.answered if begin_s <= one.arrived_s < end_s] for side in (real, simulated)]
        shares = [f"{sum(one.attained for one in some) / len(some):.1%}" if some else "-" for some in ones]
        sizes = [_size(part, pool) for pool in (0, 1) for part in (ours, theirs)]
        table.add_row(f"{day.hour_of(begin_s):g} h", str(len(ones[0])), *shares, *sizes)
    return table


def _size(part: Part | None, pool: int) -> str:
    return "-" if part is None else f"{part.mean[pool]:.1f}, {part.most[pool]}"


def summary_of(real: Side, simulated: Side) -> Table:
    """Return the table of the whole day."""
    columns = ("", "in time", "failed", "TTFT p50 s", "p99", "TPOT p50 ms", "p99", "two pools", "worker-hours", "flips")
    table = Table(*columns, title="the whole day; real times are those of the clients")
    for name, side in (("real", real), ("simulated", simulated)):
        ttft = [side.quantile(lambda one: one.ttft_s, part) for part in (0.5, 0.99)]
        tpot = [1e3 * side.quantile(lambda one: one.tpot_s, part) for part in (0.5, 0.99)]
        two_pools = sum(one.disaggregated for one in side.answered) / max(1, len(side.answered))
        table.add_row(
            name, f"{side.attainment:.2%}", str(sum(bool(one.error) for one in side.answered)),
            *[f"{value_s:.3f}" for value_s in ttft], *[f"{value_ms:.1f}" for value_ms in tpot],
            f"{two_pools:.1%}", f"{side.worker_s / 3600.0:.2f}", str(side.flips),
        )  # fmt: skip
    return table


def distance_of(real: Side, simulated: Side, length_s: float) -> tuple[float, float]:
    """Return the mean distance of the sizes of both pools over the parts of the day, in workers."""
    pairs = [
        (ours.mean, theirs.mean)
        for ours, theirs in zip(parts_of(real.looks, length_s), parts_of(simulated.looks, length_s), strict=True)
        if ours is not None and theirs is not None
    ]
    prefill, decode = ([abs(ours[pool] - theirs[pool]) for ours, theirs in pairs] for pool in (0, 1))
    return sum(prefill) / max(1, len(pairs)), sum(decode) / max(1, len(pairs))


def parser_of() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=FULL_MINUTES, help="minutes of the whole day")
    parser.add_argument("--rate", type=float, default=7.0, help="requests a second at eleven, when the load is largest")
    parser.add_argument("--attainment", type=float, default=0.97, help="share of the requests that should meet their targets")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between two calls of the planner")
    parser.add_argument("--start", type=float, default=10.0, help="seconds in which the planner expects a worker to start")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests")
    parser.add_argument("--plot", type=Path, help="file for the drawing; one for dark pages has -dark in its name")
    parser.add_argument("--json", type=Path, help="file for all results")
    return parser


def run(args: argparse.Namespace, console: Console) -> None:
    """Run both sides, and print how far they are apart."""
    day = day_of(args.minutes)
    requests = requests_of(day, args.rate, args.seed)
    bench = [
        BenchRequest(number, (one.ids,), one.output_tokens, one.arrived_s, prompt_tokens=one.prompt_tokens)
        for number, one in enumerate(requests)
    ]
    with tempfile.TemporaryDirectory(prefix="hour", dir="/tmp") as name:
        folder = Path(name)
        (folder / "cluster.yaml").write_text(json.dumps(settings_of(args)))  # JSON is YAML
        config = load(ClusterConfig, folder / "cluster.yaml")
        write_costs(folder, COSTS)
        day_found = asyncio.run(_until_told(run_day(folder, bench)))
    real, watched, steps = real_side(day_found), day_found.watched, day_found.steps
    costs = fit(steps, COSTS)
    found = {"arguments": {k: str(v) for k, v in vars(args).items()}, "real": asdict(real), "costs": asdict(costs)}
    found["starts_s"] = watched.starts_s
    keep(args.json, found)  # an hour is not to be lost with the simulation of it
    starts_s = watched.starts_s or [args.start]
    simulated = simulate(config, requests, costs, sum(starts_s) / len(starts_s), args.seed)
    console.print(table_of(real, simulated, day))
    console.print(summary_of(real, simulated))
    for line in (*measured(day_found, costs), *verdict(real, simulated, day.length_s)):
        console.print(line)
    keep(args.json, found | {"simulated": asdict(simulated), "failures": failures_of(real, simulated, day.length_s)})
    if args.plot is not None:
        plot_beside(args.plot, day, {"real": real.looks, "simulated": simulated.looks})


def keep(path: Path | None, found: Mapping[str, object]) -> None:
    """Write results into a file, if one is named."""
    if path is not None:
        path.write_text(json.dumps(found) + "\n")


def measured(day: RealDay, costs: CostModel) -> list[str]:
    """Return in words what was measured on the real workers, and how the router itself counted the requests in time."""
    demand, starts_s = day.watched.last.demand, day.watched.starts_s or [0.0]
    ttft = demand.ttft_met / max(1, demand.ttft_met + demand.ttft_missed)
    tpot = demand.tpot_met / max(1, demand.tpot_met + demand.tpot_missed)
    return [
        f"{len(day.rows):,} requests; the router counts {ttft:.2%} within TTFT {TTFT_S:g} s and {tpot:.2%} within "
        f"TPOT {TPOT_S:g} s",
        f"{len(day.steps):,} steps: {1e3 * costs.prompt_base_s:.1f} ms and {1e3 * costs.prompt_token_s:.3f} ms a prompt token, "
        f"{1e3 * costs.decode_base_s:.1f} ms and {1e3 * costs.decode_s:.2f} ms a decode; "
        f"{off(day.steps, costs, 0.1):.1%} are more than 10 % off",
        f"{len(day.watched.starts_s)} starts took {sum(starts_s) / len(starts_s):.1f} s, at most {max(starts_s):.1f} s",
    ]


def verdict(real: Side, simulated: Side, length_s: float) -> list[str]:
    """Return how far both sides are apart in words, and whether that is near enough."""
    prefill, decode = distance_of(real, simulated, length_s)
    within = f"within {100 * NEAR_SHARE:g} percentage points of attainment and {NEAR_WORKERS:g} worker of each pool"
    failures = failures_of(real, simulated, length_s)
    return [
        f"mean distance of the sizes: {prefill:.2f} prefill workers, {decode:.2f} decode workers",
        f"NOT {within}: {'; '.join(failures)}" if failures else f"The real day is {within} of the simulated one.",
    ]


async def _until_told(day: Coroutine[Any, Any, RealDay]) -> RealDay:
    """Run the day so that Ctrl-C and SIGTERM cancel it: what was started is stopped first."""
    task = asyncio.ensure_future(day)
    for told in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(told, task.cancel)
    return await task


def main() -> None:
    """Read the arguments and run both sides."""
    parser = parser_of()
    args = parser.parse_args()
    for name in ("minutes", "rate", "interval", "start"):
        if not getattr(args, name) > 0.0:
            parser.error(f"--{name}: {getattr(args, name):g} is not above 0")
    try:
        run(args, Console(width=140))
    except asyncio.CancelledError:
        parser.exit(130, "stopped; nothing of the cluster is left\n")


if __name__ == "__main__":
    main()
