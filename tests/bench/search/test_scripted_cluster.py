"""The search over real sockets: the production router and generator, and workers whose steps take known times.

Only what holds on a machine of any speed is asserted here. `test_live_search.py` asserts the figures on virtual time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import perf_counter

import pytest

from pdserve.client import AdminClient
from pdserve_bench.layout import Layout, Slo
from pdserve_bench.load.grpc_target import GrpcTarget
from pdserve_bench.load.target import RequestOptions
from pdserve_bench.search.goodput import GoodputSearch
from pdserve_bench.search.live import LiveMeasure, carry_out
from pdserve_bench.search.result import Point
from pdserve_bench.search.settings import SearchSettings
from pdserve_bench.search.shaper import LiveCluster
from pdserve_bench.workload.request import Arrivals
from pdserve_bench.workload.workload import load_workload
from testkit.fake_worker import DECODE, PREFILL
from testkit.scripted_worker import ScriptedWorker
from tests.bench.search.test_live_search import Seen
from tests.router.local_cluster import TOKEN, LocalCluster, local_cluster, tiny_model

PROMPT_S, STEP_S, PROMPT, OUTPUT = 0.025, 0.005, 25, 4


@dataclass
class ScriptedPools:
    """It shapes a cluster by ending all workers and starting others."""

    cluster: LocalCluster
    workers: list[ScriptedWorker] = field(default_factory=list)
    started: int = 0

    async def shape(self, layout: Layout) -> None:
        await self.restore()
        for role, count in ((PREFILL, layout.prefill), (DECODE, layout.decode)):
            for _ in range(count):
                self.started += 1
                worker = ScriptedWorker(
                    role,
                    self.cluster.link_address,
                    worker_id=f"scripted-{self.started}",
                    cluster_token=TOKEN,
                    model_fingerprint=tiny_model().card.fingerprint,
                    vocab_size=tiny_model().card.vocab_size,
                    prompt_token_s=PROMPT_S / PROMPT,
                    step_s=STEP_S,
                )
                self.workers.append(worker)
                await worker.start()

    async def check(self, layout: Layout) -> None:
        pass

    async def restore(self) -> None:
        for worker in self.workers:
            await worker.stop()
        self.workers.clear()


async def search(settings: SearchSettings, arrivals: Arrivals, budget_s: float) -> list[Point]:
    async with local_cluster(()) as cluster:
        workload = load_workload(
            f"random:{PROMPT}/{OUTPUT}", None, overrides=[f"vocab_size={tiny_model().card.vocab_size}"], max_model_len=256
        )
        target = GrpcTarget(cluster.grpc_address, RequestOptions())
        pools = ScriptedPools(cluster)
        with AdminClient(f"127.0.0.1:{cluster.admin_port}", TOKEN) as admin:
            live = LiveCluster(admin)
            measure = LiveMeasure(settings, workload, arrivals, target, live, 1, lambda rows: "")
            try:
                points, _ = await carry_out(
                    GoodputSearch(settings), measure, pools, Seen(), budget_s=budget_s, clock=perf_counter
                )
            finally:
                await pools.restore()
                await target.close()
    return points


@pytest.mark.slow
def test_no_layout_is_said_to_serve_more_than_its_workers_can():
    """A prefill worker computes 40 prompts a second. Two colocated workers compute 66.7: each step with a prompt also has a
    decode. Requests arrive evenly, so the goodput of an undisturbed machine is that capacity: `-s` shows what was found."""
    slo = Slo(0.15, 0.1)
    settings = SearchSettings(slo, 2, (0, 1), (512,), 512, 1, first_rate_per_s=20.0, mean_output_tokens=4.0, max_point_s=20.0)
    points = asyncio.run(search(settings, Arrivals(kind="constant"), budget_s=150.0))
    for one in points:
        print(one.layout.name, f"{one.rate_per_s:.1f}", one.requests, one.attained, one.overloaded, f"{one.measured_s:.1f}")
    for result in GoodputSearch(settings).results(points):
        capacity = 1 / PROMPT_S if result.layout.disaggregated else 2 / (PROMPT_S + STEP_S)
        print(result.layout.name, result.goodput_per_s / capacity, result.settled)
        assert result.low_per_s < 1.02 * capacity
    assert points[0].layout == settings.base(0)
    assert any(one.attained for one in points)
