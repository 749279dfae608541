"""Whole runs of small clusters: they repeat, they lose nothing, and policies order as they should."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.waiting import LEVEL_S
from router.service.policies import BUILTINS
from sim.perf.cluster import ClusterSpec, calm_router, simulate
from sim.perf.costs import LLAMA2_70B_A100, OPT_13B_A100
from sim.perf.report import SimReport
from sim.perf.traces import TraceRequest, faster, oracle_tokens, read_azure, read_mooncake
from sim.perf.workers import PerfWorkerShape

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "data"
SHAPE = PerfWorkerShape(LLAMA2_70B_A100, kv_tokens=512 * 128, max_model_len=32768, max_num_seqs=32)


def conversations(seed: int, count: int = 160, *, every_s: float = 0.25, groups: int = 12) -> list[TraceRequest]:
    """Return requests of a few conversations: each turn begins with all blocks of the one before."""
    rng = random.Random(seed)
    histories = [[0, 1000 * (group + 1)] for group in range(groups)]
    fresh, requests = 100_000, []
    for number in range(count):
        group = rng.randrange(groups)
        more = rng.randint(1, 4)
        histories[group] = histories[group][:20] + list(range(fresh, fresh + more))
        fresh += more
        blocks = tuple(histories[group])
        tokens = 512 * len(blocks) - rng.randrange(512)
        arrived_s = number * every_s * rng.uniform(0.9, 1.1)
        requests.append(TraceRequest(arrived_s, tokens, rng.randint(1, 120), blocks, session_id=str(group)))
    return sorted(requests, key=lambda request: request.arrived_s)


def cluster(prefill: int = 5, decode: int = 5, **settings: object) -> ClusterSpec:
    return ClusterSpec([SHAPE] * prefill, [SHAPE] * decode, calm_router(**settings))


def told(report: SimReport) -> list[object]:
    return [report.served, report.workers, report.span_s]


def test_two_runs_of_one_seed_are_equal():
    requests = conversations(1, 80)
    assert told(simulate(cluster(), requests)) == told(simulate(cluster(), requests))


@pytest.mark.parametrize(("prefill", "decode"), [(5, 5), (0, 10)], ids=["disaggregated", "colocated"])
def test_every_request_ends_once_and_nothing_is_left(prefill, decode):
    """`simulate` asserts that pools, leases and the core's books are empty at the end."""
    requests = conversations(2)
    report = simulate(cluster(prefill, decode), requests)
    assert sorted(one.request_id for one in report.served) == sorted(f"r{number}" for number in range(len(requests)))
    assert len(report.finished) == len(requests)
    for one in report.served:
        request = requests[int(one.request_id[1:])]
        assert one.report.output_tokens == request.output_tokens
        assert 0 < one.computed_tokens <= request.prompt_tokens
    assert oracle_tokens(requests) <= report.computed_tokens <= sum(request.prompt_tokens for request in requests)


@pytest.mark.quick("prefix_aware", "goodput", "random")
@pytest.mark.parametrize("policy", BUILTINS)
def test_every_policy_of_the_registry_serves_all(policy):
    requests = conversations(5, 60)
    spec = cluster(3, 3, prefill_policy=policy, decode_policy=policy)
    report = simulate(spec, requests)
    assert len(report.finished) == len(requests)
    assert oracle_tokens(requests) <= report.computed_tokens
    assert told(report) == told(simulate(spec, requests))


@pytest.mark.parametrize("seed", [6])
def test_prefixes_that_are_looked_for_are_computed_less_often(seed):
    """The rest of what round_robin computes above the oracle is at least halved, and nobody waits longer for it."""
    requests = conversations(seed)
    turns, aware = (simulate(cluster(prefill_policy=name), requests) for name in ("round_robin", "prefix_aware"))
    oracle = oracle_tokens(requests)
    assert oracle <= aware.computed_tokens
    assert 2 * (aware.computed_tokens - oracle) < turns.computed_tokens - oracle
    assert aware.ttft_s(0.5) < turns.ttft_s(0.5)
    assert aware.ttft_s(0.99) < turns.ttft_s(0.99)


def mixed_classes(seed: int) -> list[TraceRequest]:
    """Return short requests of a class with targets for both times, and longer ones of a class that may wait for 2 s."""
    rng = random.Random(seed)
    requests, at_s = [], 0.0
    for number in range(150):
        at_s += rng.expovariate(1 / 0.12)
        chat = rng.random() < 0.6
        tokens = rng.randint(100, 1500) if chat else rng.randint(2000, 4000)
        blocks = tuple(range(10 * number, 10 * number - (-tokens // 512)))
        name = "chat" if chat else "batch"
        requests.append(TraceRequest(at_s, tokens, rng.randint(20, 120), blocks, slo_class=name))
    return requests


@pytest.mark.parametrize("seed", [1])
def test_goodput_attains_more_than_the_least_load_on_unequal_workers(seed):
    """Two of five workers of each pool take three times as long. Only predictions know which of them is in time for whom."""
    speeds = (1, 1, 1, 3, 3)
    shapes = [
        PerfWorkerShape(OPT_13B_A100.scaled(speed), max_num_seqs=32, max_model_len=8192, max_num_batched_tokens=2048)
        for speed in speeds
    ]
    found = {}
    for policy in ("least_loaded", "goodput"):
        router = calm_router(prefill_policy=policy, decode_policy=policy)
        report = simulate(ClusterSpec(shapes, shapes, router, block_size=16, max_tokens=256), mixed_classes(seed))
        found[policy] = report.attainment()
    least, goodput = found.values()
    assert goodput["chat"] > least["chat"]
    assert goodput["batch"] >= least["batch"]


def test_one_worker_with_a_large_cache_computes_what_the_oracle_does():
    """Requests far apart: each prompt is published before the next one comes."""
    requests = faster(conversations(3, 40), 1 / 40)
    large = PerfWorkerShape(LLAMA2_70B_A100, kv_tokens=512 * 4096, max_model_len=32768)
    assert simulate(ClusterSpec([], [large]), requests).computed_tokens == oracle_tokens(requests)


def test_without_prefix_caching_every_prompt_is_computed_whole():
    requests = conversations(4, 40)
    report = simulate(ClusterSpec([SHAPE], [SHAPE], prefix_caching=False), requests)
    assert report.computed_tokens == sum(request.prompt_tokens for request in requests)


def test_a_request_that_is_refused_ends_with_its_error():
    requests = [TraceRequest(0.0, 2000, 50, (number,) * 4) for number in range(20)]
    shape = PerfWorkerShape(LLAMA2_70B_A100, max_num_seqs=1, max_model_len=32768)
    report = simulate(ClusterSpec([], [shape], calm_router(max_queued_requests=4)), requests)
    assert report.refused == 15
    assert sorted({one.error for one in report.served}) == ["", "overloaded"]
    assert len(report.finished) == 5


def _alone_s(shape: PerfWorkerShape, request: TraceRequest) -> float:
    """Return the time that a request takes alone, with a step for each block and each token, and all its messages."""
    costs, blocks = shape.costs, len(request.blocks) + 1
    prompt_s = costs.prompt_s(request.prompt_tokens) + blocks * costs.prompt_base_s
    tokens_s = request.output_tokens * (costs.decode_base_s + costs.decode_s + costs.context_token_s * shape.max_model_len)
    return prompt_s + tokens_s + costs.transfer_s(request.prompt_tokens) + 12 * 0.0005


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_wait_is_bounded_by_the_work_of_all(data):
    """Whatever the lengths, priorities and speeds: as long as a request waits, a worker serves another one, or a refusal or a
    heartbeat is on its way. So no request takes longer than all take one after the other on the slowest worker, with each of
    them computed twice, and a heartbeat for each."""
    size = st.integers(1, 12000)
    request = st.builds(
        lambda at, prompt, output, group, priority: TraceRequest(
            at, prompt, output, tuple(range(100 * group, 100 * group - (-prompt // 512))), priority=priority
        ),
        st.floats(0, 5), size, st.integers(1, 60), st.integers(0, 5), st.integers(-5, 5),
    )  # fmt: skip
    requests = sorted(data.draw(st.lists(request, min_size=1, max_size=12)), key=lambda one: one.arrived_s)
    speeds = data.draw(st.lists(st.sampled_from([1.0, 2.0, 6.0]), min_size=2, max_size=4))
    prefill = data.draw(st.integers(0, len(speeds) - 1))
    slots = data.draw(st.integers(1, 4))
    shapes = [
        PerfWorkerShape(LLAMA2_70B_A100.scaled(speed), max_num_seqs=slots, kv_tokens=512 * 34, max_model_len=16384)
        for speed in speeds
    ]
    spec = ClusterSpec(shapes[:prefill], shapes[prefill:], max_tokens=64)
    report = simulate(spec, requests)
    assert len(report.finished) == len(requests)
    slowest = max(shapes, key=lambda shape: shape.costs.prompt_base_s)
    bound_s = sum(2 * _alone_s(slowest, one) + spec.router.heartbeat_interval_s for one in requests)
    assert max(one.report.total_s for one in report.served) <= bound_s


def test_an_unimportant_large_request_is_overtaken_for_a_bounded_time():
    """One slot is always wanted by important small requests. The large one waits for those that came up to `LEVEL_S` for each
    level after it, and for no others."""
    shape = PerfWorkerShape(LLAMA2_70B_A100, max_num_seqs=1, max_model_len=32768)
    levels = 2
    large = TraceRequest(1.0, 12000, 2, tuple(range(24)), priority=-levels)
    small = [TraceRequest(0.05 * number, 400, 2, (1000 + number,)) for number in range(600)]
    requests = sorted([large, *small], key=lambda one: one.arrived_s)
    report = simulate(ClusterSpec([], [shape]), requests)
    waited_s = next(one.wait_s for one in report.served if one.prompt_tokens == 12000)
    overtaking = sum(one.arrived_s < large.arrived_s + levels * LEVEL_S for one in small)
    each_s = _alone_s(shape, small[0])
    assert report.span_s > overtaking * 0.1, "the small requests alone overload the worker"
    assert waited_s <= overtaking * each_s
    assert waited_s < report.span_s / 2


def test_the_traces_are_read_as_published():
    mooncake, azure = TRACES / "mooncake/conversation_trace.jsonl", TRACES / "azure2023/AzureLLMInferenceTrace_conv.csv"
    if not mooncake.exists() or not azure.exists():
        pytest.skip("the public traces are not beside this checkout")
    requests = read_mooncake(mooncake)
    assert (len(requests), sum(one.prompt_tokens for one in requests)) == (12031, 144_793_823)
    assert all(len(one.blocks) == -(-one.prompt_tokens // 512) for one in requests)
    assert 1 - oracle_tokens(requests) / 144_793_823 == pytest.approx(0.374, abs=0.001)  # as published with the trace
    rows = read_azure(azure)
    assert len(rows) == 19366
    assert rows[1].arrived_s - rows[0].arrived_s == pytest.approx(4.314579, abs=1e-6)
    assert oracle_tokens(rows) == sum(one.prompt_tokens for one in rows)
