"""Elastic clusters: workers join, drain and flip at any time, and nothing is lost or left."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.worker import Role
from pdserve.planner.limits import Limits, PoolLimits, PoolSizes
from pdserve.planner.observations import Observations
from sim.perf.cluster import ClusterSpec, calm_router, run_cluster
from sim.perf.costs import LLAMA2_70B_A100
from sim.perf.elastic import ElasticCluster, Elasticity
from sim.perf.members import MOVES, Happening, MemberPhase
from sim.perf.report import SimReport
from sim.perf.traces import TraceRequest
from sim.perf.workers import PerfWorkerShape

LIMITS = Limits(PoolLimits(1, 4), PoolLimits(1, 4), can_flip=True)
SHAPE = PerfWorkerShape(LLAMA2_70B_A100, kv_tokens=512 * 64, max_model_len=16384, max_num_seqs=16)


def requests_of(seed: int, count: int = 60, *, every_s: float = 0.4) -> list[TraceRequest]:
    """Return requests, a third of which begin like an earlier one."""
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        blocks = tuple(range(10 * (rng.randrange(number + 1) if rng.random() < 0.3 else number), 10 * number + 8))[:8]
        tokens = rng.randint(1, 512 * len(blocks)) if blocks else 1
        requests.append(TraceRequest(number * every_s, tokens, rng.randint(1, 150), blocks or (number,)))
    return requests


@dataclass
class Scripted:
    """A controller that asks for these sizes, one after the other."""

    wanted: list[PoolSizes | None]
    seen: list[Observations] = field(default_factory=list)

    def sizes(self, observed: Observations) -> PoolSizes | None:
        self.seen.append(observed)
        return self.wanted.pop(0) if self.wanted else None


def elastic(requests: list[TraceRequest], wanted: list[PoolSizes | None], **settings: object) -> ElasticCluster:
    spec = ClusterSpec([SHAPE] * 2, [SHAPE] * 2, calm_router(), max_tokens=160)
    return ElasticCluster(spec, requests, Scripted([*wanted]), Elasticity(**{"limits": LIMITS, **settings}))  # type: ignore[arg-type]


def assert_all_served(report: SimReport, requests: list[TraceRequest]) -> None:
    assert sorted(one.request_id for one in report.finished) == sorted(f"r{number}" for number in range(len(requests)))
    for one in report.finished:
        assert one.report.output_tokens == requests[int(one.request_id[1:])].output_tokens
        assert one.report.attempts == 1


SIZES = st.builds(PoolSizes, st.integers(1, 4), st.integers(1, 4))


@given(
    seed=st.integers(0, 1000),
    wanted=st.lists(st.none() | SIZES, max_size=12),
    interval_s=st.sampled_from([0.3, 1.0, 2.7]),
    start_s=st.sampled_from([0.0, 1.3, 20.0]),
    flip_s=st.sampled_from([0.0, 0.7, 8.0]),
    can_flip=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_nothing_is_lost_or_left_whatever_the_sizes_do(seed, wanted, interval_s, start_s, flip_s, can_flip):
    """Each request gets all its tokens in its first attempt: a drain costs nobody a replay."""
    requests = requests_of(seed, 40)
    cluster = elastic(
        requests, wanted, interval_s=interval_s, start_s=start_s, flip_s=flip_s,
        limits=replace(LIMITS, can_flip=can_flip),
    )  # fmt: skip
    report = run_cluster(cluster)
    assert_all_served(report, requests)
    end_s = max(one.ended_s for one in report.served)
    assert cluster.pools.worker_s >= 2 * end_s - 1e-6
    if not wanted:
        assert cluster.pools.worker_s == pytest.approx(4 * end_s)
    assert can_flip or cluster.pools.flips == 0


def test_a_drained_worker_leaves_once_the_router_knows_of_its_last_commit():
    """Messages are slow. A prefill worker is empty two messages before the router hears that its KV was committed."""
    requests = requests_of(4)
    spec = ClusterSpec([SHAPE] * 2, [SHAPE] * 2, calm_router(), max_tokens=160, hop_s=0.08)
    controller = Scripted([PoolSizes(1, 2), PoolSizes(2, 2)] * 10)
    cluster = ElasticCluster(spec, requests, controller, Elasticity(LIMITS, interval_s=1.0, start_s=0.1))
    assert_all_served(run_cluster(cluster), requests)


def test_a_flip_is_one_process_and_another_life():
    requests = requests_of(1)
    cluster = elastic(requests, [PoolSizes(1, 3)], flip_s=2.0)
    links = set(cluster.workers)
    report = run_cluster(cluster)
    assert_all_served(report, requests)
    assert cluster.pools.flips == 1
    (flipped,) = [one for one in cluster.members if one.worker is not None and one.worker.flips]
    assert flipped.role is Role.DECODE
    assert flipped.worker is not None
    assert flipped.worker.link not in links
    assert flipped.worker.engine.output_tokens > 0
    assert cluster.pools.worker_s == pytest.approx(4 * max(one.ended_s for one in report.served))


def test_a_flip_keeps_the_cached_kv():
    """The second prompt is the first one again. Meanwhile the worker that computed it was a decode worker."""
    requests = [TraceRequest(0.0, 2048, 2, tuple(range(4))), TraceRequest(30.0, 2048, 2, tuple(range(4)))]
    spec = ClusterSpec([SHAPE] * 2, [SHAPE], calm_router(), max_tokens=160)
    wanted: list[PoolSizes | None] = [PoolSizes(1, 2), PoolSizes(1, 2), PoolSizes(2, 1), PoolSizes(2, 1), PoolSizes(1, 2)]
    controller = Scripted([None, *wanted, *wanted[2:4]])
    cluster = ElasticCluster(spec, requests, controller, Elasticity(LIMITS, interval_s=3.0, flip_s=0.5))
    report = run_cluster(cluster)
    assert_all_served(report, requests)
    assert cluster.pools.flips == 4
    (flipped,) = [worker for worker in report.workers if worker.worker_id == "prefill-0"]
    assert flipped.prefix_hit_tokens > 0


def test_a_worker_serves_once_its_start_is_over_and_costs_before():
    requests = requests_of(2, 40, every_s=1.0)
    cluster = elastic(requests, [PoolSizes(2, 3)], start_s=10.0, interval_s=1.0)
    report = run_cluster(cluster)
    by_ready = [(at.observed.now_s, at.observed.decode.ready, at.observed.decode.coming) for at in cluster.pools.history]
    assert all(ready == 2 and coming == 1 for now_s, ready, coming in by_ready if 1.0 < now_s < 11.0)
    assert all(ready == 3 and coming == 0 for now_s, ready, coming in by_ready if now_s > 11.5)
    assert cluster.pools.worker_s == pytest.approx(5 * max(one.ended_s for one in report.served) - 1.0)


def test_what_the_controller_sees_adds_up():
    """Rates times intervals are the counts of the run, and busy shares are between nothing and all."""
    requests = requests_of(3)
    cluster = elastic(requests, [None, PoolSizes(3, 2), None, PoolSizes(1, 4)], start_s=2.0, interval_s=5.0)
    report = run_cluster(cluster)
    seen = [at.observed for at in cluster.pools.history[1:]]  # the first reading has nothing to compare with
    asked = sum((one.demand.requests_per_s or 0.0) * one.interval_s for one in seen)
    assert asked == sum(5.0 < request.arrived_s <= seen[-1].now_s for request in requests)
    computed = sum((one.prefill.tokens_per_s or 0.0) * one.interval_s for one in seen)
    assert 0.5 * report.computed_tokens < computed <= report.computed_tokens
    drawn = sum((one.decode.tokens_per_s or 0.0) * one.interval_s for one in seen)
    total = sum(request.output_tokens - 1 for request in requests)
    assert 0.5 * total < drawn <= total
    assert any((one.prefill.utilisation or 0.0) > 0.1 for one in seen)


def test_the_table_of_phases_is_whole():
    """Every phase but the last can be left, and each happening is used."""
    assert {source for source, _ in MOVES} == set(MemberPhase) - {MemberPhase.GONE}
    assert {happening for _, happening in MOVES} == set(Happening)
