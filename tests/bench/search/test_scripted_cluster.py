"""The search over real sockets: the production router and generator, and workers whose steps take known times.

Only what holds on a machine of any speed is asserted here. `test_live_search.py` asserts the figures on virtual time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import perf_counter

import pytest

from pdserve.client import AdminClient
from pdserve.rpc.v1 import common_pb2, link_pb2
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
from testkit.fake_worker import DECODE, PREFILL, FakeWorker, _Sequence
from tests.bench.search.test_live_search import Seen
from tests.router.local_cluster import TOKEN, LocalCluster, local_cluster, tiny_model

PROMPT_S, STEP_S, PROMPT, OUTPUT = 0.025, 0.005, 25, 4


@dataclass(slots=True)
class ScriptedWorker(FakeWorker):
    """A `FakeWorker` whose steps take known times, so that the capacity of a cluster is known in advance.

    A step computes at most one whole prompt, and one token of each sequence whose prompt is computed. It takes `prompt_token_s`
    for each token of the prompt, and `step_s` if it has such sequences. Steps follow each other on a time line of their own, so
    a timer that is late does not make the worker slower.
    """

    prompt_token_s: float = 0.0
    step_s: float = 0.0

    _computed: set[int] = field(default_factory=set)  # handles of sequences whose prompt was computed here
    _prompt_busy_s: float = 0.0
    _decode_busy_s: float = 0.0
    _began_s: float = 0.0

    def heartbeat(self) -> common_pb2.WorkerLoad:
        """Return the heartbeat for the present state, with the time of all steps so far."""
        load = FakeWorker.heartbeat(self)
        load.prompt_busy_s, load.decode_busy_s = self._prompt_busy_s, self._decode_busy_s
        load.uptime_s = asyncio.get_running_loop().time() - self._began_s
        return load

    async def _step_loop(self) -> None:
        loop = asyncio.get_running_loop()
        self._began_s = end_s = loop.time()
        while True:
            if not self._work.is_set():
                await self._work.wait()
                end_s = loop.time()
            prompt, decodes = self._next_step()
            if prompt is None and not decodes:
                self._work.clear()
                continue
            took_s = self.step_s if decodes else 0.0
            if prompt is None:
                self._decode_busy_s += took_s
            else:
                took_s += self.prompt_token_s * len(prompt.prompt_ids)
                self._prompt_busy_s += took_s
            end_s += took_s
            await asyncio.sleep(max(0.0, end_s - loop.time()))
            self._finish_step([*decodes, *([] if prompt is None else [prompt])])

    def _next_step(self) -> tuple[_Sequence | None, list[_Sequence]]:
        """Return the prompt of the next step, and the sequences that get a token in it."""
        runs = [one for one in self._sequences.values() if one.runs]
        ready = [one for one in runs if one.attached or one.handle in self._computed]
        prompt = next((one for one in runs if not one.attached and one.handle not in self._computed), None)
        return prompt, ready[: self.max_num_seqs]

    def _finish_step(self, step: list[_Sequence]) -> None:
        """Send the tokens of a step. Sequences that were cancelled meanwhile get none."""
        live = [one for one in step if one.handle in self._sequences]
        rows = [self._advance(one) for one in live]
        self._computed.update(one.handle for one in live)
        self._computed &= self._sequences.keys()
        if rows:
            self._send(step_batch=link_pb2.StepBatch(rows=rows))


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
