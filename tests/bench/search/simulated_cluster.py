"""A cluster of the simulator as a search measures it: production router and schedulers, cost models, virtual time."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from pdserve_bench.layout import Layout, Slo
from pdserve_bench.search.goodput import RunAction
from pdserve_bench.search.result import Figures, Point
from pdserve_bench.search.settings import SearchSettings
from pdserve_bench.search.trial import Decision, Trial
from sim.perf.cluster import ClusterSpec, PerfCluster, run_cluster
from sim.perf.costs import OPT_13B_A100
from sim.perf.traces import TraceRequest
from sim.perf.workers import PerfWorkerShape
from tests.bench.search.servers import NO_FIGURES

PROMPT, OUTPUT = 768, 64
SLO = Slo(0.5, 0.06)


class _Decided(Exception):
    """The trial has decided, so the rest of the run says nothing."""


def trace(rate_per_s: float, duration_s: float, seed: int) -> list[TraceRequest]:
    """Return requests whose arrivals are random, and whose lengths vary by a half around their means."""
    rng = random.Random(seed)
    requests, at_s, block = [], 0.0, 0
    while True:
        at_s += rng.expovariate(rate_per_s)
        if at_s >= duration_s:
            return requests
        prompt, output = rng.randint(PROMPT // 2, PROMPT * 3 // 2), rng.randint(OUTPUT // 2, OUTPUT * 3 // 2)
        count = -(-prompt // 512)
        requests.append(TraceRequest(at_s, prompt, output, tuple(range(block, block + count))))
        block += count


def spec_of(layout: Layout) -> ClusterSpec:
    """Return the simulated cluster of a layout."""
    shape = PerfWorkerShape(OPT_13B_A100, layout.max_num_seqs, layout.chunk_tokens, max_model_len=4096)
    return ClusterSpec([shape] * layout.prefill, [shape] * layout.decode, max_tokens=OUTPUT * 3 // 2, prefix_caching=False)


def run(layout: Layout, requests: list[TraceRequest], trial: Trial) -> float:
    """Run requests until they end or the trial has decided, and return the virtual time."""
    for one in requests:
        trial.plan(one.arrived_s, one.arrived_s + SLO.ttft_s + SLO.tpot_s * one.output_tokens)  # type: ignore[operator]

    def judge() -> None:
        served = cluster.report.served[-1]
        good = not served.error and SLO.met(served.report.ttft_s, served.report.tpot_s)
        if trial.end(int(served.request_id[1:]), served.ended_s, good) is not None:
            raise _Decided

    cluster = PerfCluster(spec_of(layout), requests, judge)
    try:
        run_cluster(cluster)
    except _Decided:
        return cluster.clock.now_s
    trial.close(cluster.clock.now_s)
    return cluster.clock.now_s


def attainment(layout: Layout, rate_per_s: float, duration_s: float = 200.0) -> float:
    """Return the share of good requests in a long run that nothing ends early."""
    requests = trace(rate_per_s, duration_s, 12345)
    cluster = PerfCluster(spec_of(layout), requests)
    served = [one for one in run_cluster(cluster).served if one.arrived_s > 10.0]
    return sum(not one.error and SLO.met(one.report.ttft_s, one.report.tpot_s) for one in served) / len(served)


@dataclass(slots=True)
class SimulatedCluster:
    """It measures rates of layouts, and counts the virtual time that this took."""

    settings: SearchSettings
    spent_s: float = 0.0

    def measure(self, action: RunAction, repeat: int) -> Point:
        """Return the point of a run."""
        trial = Trial(self.settings.trial(action.rate_per_s, action.min_yes_s, action.max_s))
        took_s = run(action.layout, trace(action.rate_per_s, action.max_s, repeat), trial)
        self.spent_s += took_s
        seen = trial.estimate
        figures: Figures = replace(NO_FIGURES, output_tokens_per_s=action.rate_per_s * OUTPUT, tpot_p50_s=0.03)
        return Point(
            action.layout, action.rate_per_s, seen.requests, seen.attained, seen.low, seen.high, took_s, figures,
            overloaded=trial.decision is Decision.OVERLOADED,
        )  # fmt: skip
