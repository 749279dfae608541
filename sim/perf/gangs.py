"""Two pools of gangs on the cluster simulator, beside what the formulas of `pdserve capacity` expect at the same rate.

    python -m sim.perf.gangs --model llama-3-70b --gpu h100-sxm --tp 4 --prefill 2 --decode 2

Both have the same times of steps. The simulator adds the production router and scheduler, requests that arrive at random and
share batches and links, and messages. So it tests what the formulas make of these times: queues, batches and the exposed
transfer. It does not test the times themselves.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from random import Random
from typing import Final

from pdserve.capacity.devices import device
from pdserve.capacity.model_source import find_model
from pdserve.capacity.placements import decode_context, exposed_s, last_load, mean_queue_s
from pdserve.capacity.question import CapacityQuestion
from pdserve.capacity.verdict import TwoPools
from pdserve.capacity.worker_speed import WorkerSpeed
from pdserve.core.errors import ConfigError
from pdserve.core.slo import SloClass
from pdserve_bench.workload.traces import BLOCK_TOKENS
from sim.perf.cluster import ClusterSpec, calm_router, simulate
from sim.perf.costs import GangCosts
from sim.perf.traces import TraceRequest
from sim.perf.workers import PerfWorkerShape

REQUESTS: Final = 420
STEADY: Final = (0.35, 0.85)
"""The requests that count, by their place among all: before them batches still grow, and after them they shrink."""
SHARES: Final = (0.5, 0.8, 1.0)
"""The rates of the rows, as shares of the goodput that the formulas find."""


@dataclass(frozen=True, slots=True)
class GangPools:
    """The question, and the numbers of workers of both pools."""

    question: CapacityQuestion
    prefill: int
    decode: int

    def __post_init__(self) -> None:
        if self.question.tp is None or min(self.prefill, self.decode) < 1:
            raise ConfigError("--tp must be set, and --prefill and --decode must be at least 1")

    @property
    def pools(self) -> TwoPools:
        """A worker of each pool."""
        tp = self.question.tp or 1
        prefill, decode = self.question.prefill_degrees(tp), self.question.degrees(tp)
        return TwoPools(WorkerSpeed(self.question, prefill), WorkerSpeed(self.question, decode))

    @property
    def link_bytes_per_s(self) -> float:
        """The rate of a worker's link."""
        pools = self.pools
        return self.question.link_of(min(pools.prefill.gpus, pools.decode.gpus)).bytes_per_s

    @property
    def goodput_per_s(self) -> float:
        """The most requests a second within both targets, by the formulas."""
        prefill, decode = self.pools.rates(self.link_bytes_per_s)
        return min(self.prefill * prefill.requests_per_s, self.decode * decode.requests_per_s)


@dataclass(frozen=True, slots=True)
class GangTimes:
    """Mean times of requests at one rate."""

    ttft_s: float
    tpot_s: float
    attainment: float | None = None
    """The share within both targets. None: the formulas do not tell it."""


def expected(gangs: GangPools, rate_per_s: float) -> GangTimes:
    """Return the times that the formulas expect at a rate up to the goodput."""
    question, pools = gangs.question, gangs.pools
    gaps, context = question.osl - 1, decode_context(pools.decode)
    exposed_s_a_gap = exposed_s(pools.prefill, gangs.link_bytes_per_s) / gaps

    def tpot_s(batch: float) -> float:
        return pools.decode.decode_s(batch, context) + exposed_s_a_gap

    most = float(pools.decode.users_at(question.isl + question.osl))
    batch = last_load(lambda size: size / (gaps * tpot_s(size)) <= rate_per_s / gangs.decode, most)  # Little's law
    return GangTimes(mean_queue_s(pools.prefill.prefill_s(question.isl), rate_per_s / gangs.prefill), tpot_s(batch))


def simulated(gangs: GangPools, rate_per_s: float, seed: int = 5) -> GangTimes:
    """Return the times of simulated requests that arrive at random with this rate. Raises `ConfigError` for stages."""
    question, pools, draw = gangs.question, gangs.pools, Random(seed)
    blocks = -(-question.isl // BLOCK_TOKENS)
    requests, at_s = [], 0.0
    for number in range(REQUESTS):
        at_s += draw.expovariate(rate_per_s)
        own = tuple(range(number * blocks, (number + 1) * blocks))
        requests.append(TraceRequest(at_s, question.isl, question.osl, own))
    shapes = [
        PerfWorkerShape(GangCosts.of(worker, gangs.link_bytes_per_s), max_num_batched_tokens=question.max_num_batched_tokens)
        for worker in (pools.prefill, pools.decode)
    ]
    report = simulate(
        ClusterSpec(
            [shapes[0]] * gangs.prefill,
            [shapes[1]] * gangs.decode,
            calm_router(),
            prefix_caching=False,
            max_tokens=question.osl,
            classes={"default": SloClass("default")},
            judged_by={"default": SloClass("default", question.ttft_s, question.tpot_s)},
        ),
        requests,
    )
    first, last = (share * REQUESTS for share in STEADY)
    rows = [one for one in report.finished if first <= int(one.request_id[1:]) < last]
    return GangTimes(
        sum(one.report.ttft_s for one in rows) / len(rows),
        sum(one.report.tpot_s for one in rows) / len(rows),
        sum(one.attained for one in rows) / len(rows),
    )


def row(gangs: GangPools, share: float) -> str:
    """Return one row of the table."""
    rate_per_s = share * gangs.goodput_per_s
    formula, found = expected(gangs, rate_per_s), simulated(gangs, rate_per_s)
    times = (formula.ttft_s, found.ttft_s, formula.tpot_s, found.tpot_s)
    cells = [f"{rate_per_s:.1f}", *(f"{time * 1e3:.1f}" for time in times), f"{found.attainment:.0%}"]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Print the table. Return 0, or 2 for a wrong flag."""
    parser = argparse.ArgumentParser(description="Simulate two pools of gangs beside the formulas of `pdserve capacity`.")
    parser.add_argument("--model", default="llama-3-70b")
    parser.add_argument("--gpu", default="h100-sxm")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--isl", type=int, default=1024)
    parser.add_argument("--osl", type=int, default=512)
    parser.add_argument("--ttft", type=float, default=0.4)
    parser.add_argument("--tpot", type=float, default=0.025)
    args = parser.parse_args()
    try:
        gpus = max(1, args.tp * (args.prefill + args.decode))
        question = CapacityQuestion(
            find_model(args.model),
            device(args.gpu),
            gpus=gpus,
            tp=args.tp,
            isl=args.isl,
            osl=args.osl,
            ttft_s=args.ttft,
            tpot_s=args.tpot,
        )
        gangs = GangPools(question, args.prefill, args.decode)
        for share in SHARES:
            print(row(gangs, share))
    except ConfigError as exc:
        print(exc.message, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
