"""Gangs as workers, through real processes and NIXL: handoffs between different degrees, and ranks that die."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from real_service import APART, AUTO, GREEDY, QUICK_BEATS, TOGETHER, OpenStream, tiny

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.client import AdminClient
from pdserve.config import MIB, EngineConfig, RouterConfig
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import SampleSpec, SequenceSlice, StepPlan
from pdserve.core.worker import VersionRange
from pdserve.engine.runner import ModelRunner
from testkit.client import generate_all, request
from testkit.load import Load
from testkit.processes import Place, ProcessCluster
from testkit.told_worker import of_versions
from testkit.toy_models import write_shared
from tests.engine.engine_ways import COMPILED

pytestmark = [pytest.mark.cluster, COMPILED]

BLOCK, CHUNK, OUTPUT = 16, 64, 12
LENGTHS = (1, 15, 17, 64, 65, 100, 200)
ENDS_S = 10.0


def shared_engine(directory: Path, **changes: Any) -> EngineConfig:
    fields = {"model": str(directory), "dtype": "bfloat16", "block_size": BLOCK, "max_num_batched_tokens": CHUNK}
    fields["oversubscribe"] = True  # there are more ranks than cores
    return tiny(**(fields | changes))


def cluster_of(engine: EngineConfig, prefill: list[dict[str, Any]], decode: list[dict[str, Any]]) -> ProcessCluster:
    """Return a cluster whose workers differ by these settings of the engine."""
    workers = {**{f"prefill-{i}": one for i, one in enumerate(prefill)}, **{f"decode-{i}": one for i, one in enumerate(decode)}}
    places = {name: Place(worker={"engine": replace(engine, **changes)}) for name, changes in workers.items()}
    return ProcessCluster(engine, prefill=len(prefill), decode=len(decode), places=places, worker=QUICK_BEATS)


class Expected:
    """One process with the whole model, which computes each request alone."""

    def __init__(self, engine: EngineConfig) -> None:
        torch.set_num_threads(1)
        self._runner = ModelRunner.load(Path(engine.model), ModelCard.load(Path(engine.model)), engine)

    def __call__(self, prompt: list[int], way: dict[str, Any], output: int) -> list[int]:
        params, tokens = SamplingParams(max_tokens=output, ignore_eos=True, **way), list(prompt)
        table = (tuple(map(BlockId, range(-(-(len(prompt) + output) // BLOCK)))),)
        start = 0
        while len(tokens) < len(prompt) + output:
            end = min(start + CHUNK, len(tokens))
            samples = (SampleSpec(params, len(tokens) - len(prompt)),) if end == len(tokens) else ()
            plan = StepPlan((SequenceSlice(SeqId(1), start, tuple(tokens[start:end]), table, samples),))
            tokens += [token_id for token_id, _ in self._runner.execute(plan)]
            start = end
        return tokens[len(prompt) :]


def batch() -> tuple[list[list[int]], list[dict[str, Any]]]:
    rng = random.Random(5)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in LENGTHS for _ in range(2)]
    return prompts, [{"temperature": 0.0} if i % 3 == 0 else {"temperature": 1.0, "seed": i} for i in range(len(prompts))]


def check_tokens(cluster: ProcessCluster, expected: Expected, *placements: Any) -> None:
    prompts, ways = batch()
    alone = [expected(prompt, way, OUTPUT) for prompt, way in zip(prompts, ways, strict=True)]
    for placement in placements:
        messages = [
            request(prompt, placement, max_tokens=OUTPUT, ignore_eos=True, **way)
            for prompt, way in zip(prompts, ways, strict=True)
        ]
        answers = generate_all(cluster.grpc, messages, concurrency=8)
        assert [answer.ids for answer in answers] == alone
        assert all(answer.report.exact for answer in answers)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    directory = tmp_path_factory.mktemp("dense")
    write_shared(directory)
    return shared_engine(directory)


@pytest.fixture(scope="module")
def expected(dense: EngineConfig) -> Expected:
    return Expected(dense)


@pytest.fixture(scope="module")
def mixed(dense: EngineConfig) -> Iterator[ProcessCluster]:
    """Two ranks lend to one process and to two stages, and take from one process."""
    two, stages = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
    with cluster_of(dense, [two, {}], [{}, stages, two]) as cluster:
        yield cluster


def ranks_of(cluster: ProcessCluster, name: str) -> list[psutil.Process]:
    """Return the processes that a worker has started."""
    worker = psutil.Process(cluster.processes[name].popen.pid)
    return [child for child in worker.children() if "rank" in " ".join(child.cmdline())]


def test_tokens_are_those_of_one_process_in_pools_of_mixed_degrees(mixed: ProcessCluster, expected: Expected) -> None:
    check_tokens(mixed, expected, APART, TOGETHER, AUTO)


def test_workers_tell_their_degrees_and_cores(mixed: ProcessCluster) -> None:
    hellos = {worker.hello.worker_id: worker.hello for worker in mixed.state().workers}
    told = {name: (one.tensor_parallel_size, one.pipeline_parallel_size, one.cores) for name, one in hellos.items()}
    assert told == {
        "prefill-0": (2, 1, 2), "prefill-1": (1, 1, 1), "decode-0": (1, 1, 1), "decode-1": (1, 2, 2), "decode-2": (2, 1, 2),
    }  # fmt: skip


def kill_a_rank(cluster: ProcessCluster, expected: Expected, name: str, number: signal.Signals) -> None:
    """Requests go on elsewhere with the same tokens, and the gang comes back as one."""
    prompt = list(range(40))
    streams = [OpenStream(cluster, request(prompt, APART, max_tokens=400, **GREEDY)) for _ in range(4)]
    received = [stream.read(8) for stream in streams]
    *_, rank = ranks_of(cluster, name)
    rank.send_signal(number)
    assert cluster.processes[name].popen.wait(ENDS_S) == 1
    assert f"of this worker (process {rank.pid})" in cluster.processes[name].log()
    cluster.heal()
    alone = expected(prompt, {"temperature": 0.0}, 400)
    for stream, ids in zip(streams, received, strict=True):
        with stream:
            assert ids + stream.read(400 - len(ids)) == alone
    cluster.assert_empty()


@pytest.mark.parametrize(("name", "number"), [("prefill-0", signal.SIGKILL), ("decode-2", signal.SIGKILL)])
def test_a_rank_that_dies_ends_its_worker_and_no_request(
    mixed: ProcessCluster, expected: Expected, name: str, number: signal.Signals
) -> None:
    kill_a_rank(mixed, expected, name, number)
    check_tokens(mixed, expected, APART)


@pytest.mark.slow
def test_a_worker_that_is_killed_takes_its_ranks_along(mixed: ProcessCluster) -> None:
    """So does one whose rank is stopped, which cannot notice that standard input closes."""
    for stopped in (False, True):
        (rank,) = ranks_of(mixed, "decode-2")
        if stopped:
            rank.suspend()
        mixed.processes["decode-2"].kill()
        rank.wait(ENDS_S)
        mixed.heal()
    mixed.assert_empty()


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up(dense: EngineConfig, expected: Expected) -> None:
    """The step that waits for it fails after `step_timeout_s`, and the worker with it."""
    hasty = {"tensor_parallel_size": 2, "step_timeout_s": 1.0}
    with cluster_of(dense, [{}], [hasty, {}]) as cluster:
        (rank,) = ranks_of(cluster, "decode-0")
        rank.suspend()
        check_tokens(cluster, expected, APART)
        end_s = time.monotonic() + ENDS_S * 3
        while cluster.processes["decode-0"].alive and time.monotonic() < end_s:
            time.sleep(0.05)
        assert not cluster.processes["decode-0"].alive
        rank.wait(ENDS_S)
        cluster.heal()


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_experts_of_ranks_and_kv_of_other_dtypes(tmp_path: Path, quantization: Any) -> None:
    """KV is converted between pools of different degrees as it is between pools of one."""
    write_shared(tmp_path, experts=8)
    engine = shared_engine(tmp_path, quantization=quantization)
    whole = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with cluster_of(engine, [whole], [{"tensor_parallel_size": 4}, {**whole, "pipeline_parallel_size": 2}]) as cluster:
        check_tokens(cluster, Expected(engine), APART, TOGETHER)
    with cluster_of(engine, [{**whole, "kv_cache_dtype": "fp32"}], [{}]) as cluster:
        check_tokens(cluster, Expected(engine), APART)


@pytest.mark.slow
def test_ranks_by_torch_hand_over_in_float32_and_end_as_one(dense: EngineConfig) -> None:
    """Two ranks lend to one process and take from it, with its tokens, and a rank that dies costs no request."""
    engine, two = replace(dense, dtype="float32", batch_invariant=True), {"tensor_parallel_size": 2}
    expected = Expected(engine)
    with cluster_of(engine, [two, {}], [{}, two]) as cluster:
        check_tokens(cluster, expected, APART, TOGETHER)
        kill_a_rank(cluster, expected, "decode-1", signal.SIGKILL)
        check_tokens(cluster, expected, APART)


@pytest.mark.slow
def test_ranks_over_gloo_hand_over_in_float32_and_end_as_one(dense: EngineConfig) -> None:
    engine = replace(dense, dtype="float32", batch_invariant=True)
    two = {"tensor_parallel_size": 2, "rank_collective": "gloo"}
    expected = Expected(engine)
    with cluster_of(engine, [two, {}], [{}, two]) as cluster:
        check_tokens(cluster, expected, APART, TOGETHER)
        kill_a_rank(cluster, expected, "decode-1", signal.SIGKILL)


@pytest.mark.slow
def test_three_ranks_of_the_default_model_share_no_sums() -> None:
    """SmolLM2 has nine query heads and three KV heads."""
    engine = shared_engine(resolve("default"), max_model_len=512, kv_cache_memory=64 * MIB)
    three = {"tensor_parallel_size": 3}
    with cluster_of(engine, [three, {}], [{}, three]) as cluster:
        check_tokens(cluster, Expected(engine), APART, TOGETHER)


@pytest.mark.slow
def test_a_rolling_upgrade_replaces_gangs_by_workers_of_other_degrees(dense: EngineConfig) -> None:
    """(1) A gang lends to one process, both of a release before versions. (2) Workers of this release start beside them, with
    the degrees the other way round. (3) The old ones are drained under load, and end with all their ranks. (4) All requests end
    as undisturbed, in their first attempt."""
    two, old = {"tensor_parallel_size": 2}, of_versions(VersionRange(0, 0), VersionRange(0, 0))
    degrees = {"prefill-0": two, "decode-0": {}, "prefill-1": {}, "decode-1": two}
    places = {name: Place(worker={"engine": replace(dense, **changes)}) for name, changes in degrees.items()}
    for name in ("prefill-0", "decode-0"):
        places[name] = replace(old, worker=places[name].worker)
    asked = [request(prompt, APART, max_tokens=40, **GREEDY) for prompt in batch()[0]]
    router = RouterConfig(max_attempts=1, retry_burst=0, retry_share=0.0)
    with ProcessCluster(dense, router=router, worker=QUICK_BEATS, places=places) as cluster:
        expected = [answer.ids for answer in generate_all(cluster.grpc, asked)]
        cluster.prefill = cluster.decode = 2
        for name in ("prefill-1", "decode-1"):
            cluster.start_worker(name, wait=False)
        cluster.wait_whole()
        (rank,) = ranks_of(cluster, "prefill-0")
        with Load(cluster.grpc, asked, concurrency=6) as load, AdminClient(cluster.admin) as admin:
            load.until(lambda outcomes: sum(bool(o.answer.ids) for o in outcomes) >= 2)
            for name in ("prefill-0", "decode-0"):
                for _ in admin.drain(name):
                    pass
                assert cluster.processes[name].popen.wait(ENDS_S) == 0, cluster.processes[name].log()
            outcomes = load.finish()
        rank.wait(ENDS_S)
        later = generate_all(cluster.grpc, asked[:2])
    assert [(o.details, o.answer.ids) for o in outcomes] == [("", ids) for ids in expected]
    assert {o.answer.report.attempts for o in outcomes} == {1}
    assert [(a.report.prefill_worker, a.report.decode_worker) for a in later] == [("prefill-1", "decode-1")] * 2
    assert [answer.ids for answer in later] == expected[:2]


def test_degrees_that_do_not_fit_are_refused_with_those_that_do(dense: EngineConfig) -> None:
    with (
        pytest.raises(RuntimeError, match=r"tensor_parallel_size 8 does not divide this model.*use 1 or 2 or 4"),
        cluster_of(dense, [{"tensor_parallel_size": 8}], [{}]),
    ):
        pass
