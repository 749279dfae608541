"""The processes of a gang: what they hold while they live, and what the leader says of those that end."""

from __future__ import annotations

import gc
import os
import queue
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from pdserve.checkpoint.card import ModelCard
from pdserve.config import MIB, EngineConfig, RankCollective
from pdserve.core.errors import ConfigError, ReplicaLost
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.step_plan import GREEDY, SequenceSlice, StepPlan
from pdserve.engine.gang.leader import Gang
from pdserve.engine.runner import ModelRunner
from pdserve.worker.rank_service import MEMORY, RANK_SERVICE
from testkit.toy_models import write_shared
from tests.engine.engine_ways import COMPILED

pytestmark = COMPILED

PLAN = StepPlan((SequenceSlice(SeqId(0), 0, tuple(range(20)), ((BlockId(0), BlockId(1)),), ()),))
CONFIG = EngineConfig(
    model="shared", dtype="bfloat16", kv_cache_memory=4 * MIB, threads=1, tensor_parallel_size=2, pipeline_parallel_size=2,
    step_timeout_s=30.0,
)  # fmt: skip
ENDS_S = 10.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shared")
    write_shared(directory)
    return directory


@pytest.fixture
def lost() -> queue.Queue[BaseException]:
    return queue.Queue()


@pytest.fixture
def runner(model: Path, lost: queue.Queue[BaseException]) -> Iterator[ModelRunner]:
    runner = ModelRunner.load(model, ModelCard.load(model), CONFIG, on_lost=lost.put)
    yield runner
    runner.close()


def test_processes_of_a_gang_take_rejected_drafts_back(model: Path) -> None:
    """All drafts are wrong. The bytes of the pool are those of one process, and those of a step without drafts."""
    quantised = replace(CONFIG, kv_cache_dtype="int8")
    pools = []
    tables = ((BlockId(0), BlockId(1)),)
    for tensor, pipeline, drafts in ((2, 2, 6), (1, 1, 6), (1, 1, 0)):
        config = replace(quantised, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
        runner = ModelRunner.load(model, ModelCard.load(model), config)
        with closing(runner):
            runner.execute(PLAN)
            samples = (GREEDY,) * (1 + drafts)
            piece = SequenceSlice(SeqId(0), 20, (9,) * len(samples), tables, samples)
            (first, *_), *_ = runner.execute(StepPlan((piece,), not drafts))
            assert first != 9
            part = runner.kv.caches[0].parts[0]
            pools.append((part.data[:2].movedim(3, 1).flatten(0, 1)[:21].clone(), part.scales[:2].clone()))
    for numbers, scales in pools[:2]:
        assert torch.equal(numbers, pools[2][0])
        assert torch.equal(scales, pools[2][1])


def ranks() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "rank" in " ".join(child.cmdline())]


def test_a_gang_ends_with_its_runner_and_leaves_nothing(model: Path) -> None:
    gc.collect()  # descriptors of other tests' garbage would be closed between the two counts
    before = len(os.listdir("/proc/self/fd"))
    runner = ModelRunner.load(model, ModelCard.load(model), CONFIG)
    with closing(runner):
        alone = ModelRunner.load(
            model, ModelCard.load(model), replace(CONFIG, tensor_parallel_size=1, pipeline_parallel_size=1)
        )
        processes = ranks()
        assert len(processes) == 3
        assert torch.equal(runner.logits(PLAN), alone.logits(PLAN))
    runner.close()
    assert not any(process.is_running() for process in processes)
    del runner
    assert len(os.listdir("/proc/self/fd")) == before
    assert not any(thread.name == "gang" for thread in threading.enumerate())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=str)
def test_a_rank_that_ends_ends_the_gang(runner: ModelRunner, lost: queue.Queue[BaseException], number: signal.Signals) -> None:
    processes = ranks()
    processes[1].send_signal(number)
    failure = lost.get(timeout=ENDS_S)
    assert isinstance(failure, ReplicaLost)
    assert f"rank 2 of this worker (process {processes[1].pid}) ended with status -{int(number)}" in str(failure)
    with pytest.raises(ReplicaLost):
        runner.logits(PLAN)
    psutil.wait_procs(processes, ENDS_S)
    assert not any(process.is_running() for process in processes)
    assert lost.empty()


def test_signals_of_a_terminal_do_not_end_ranks(runner: ModelRunner, lost: queue.Queue[BaseException]) -> None:
    """The worker drains, and computes its last requests with them."""
    for process in ranks():
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
    assert torch.isfinite(runner.logits(PLAN)).all()
    assert lost.empty()


@pytest.mark.slow
def test_a_rank_that_is_stopped_costs_a_step_and_the_gang(model: Path, lost: queue.Queue[BaseException]) -> None:
    hasty = replace(CONFIG, step_timeout_s=0.2)
    runner = ModelRunner.load(model, ModelCard.load(model), hasty, on_lost=lost.put)
    runner.logits(PLAN)
    processes = ranks()
    processes[0].suspend()
    with pytest.raises(ReplicaLost):
        runner.logits(PLAN)
    assert isinstance(lost.get(timeout=ENDS_S), ReplicaLost)  # another rank ended, since the gang is lost
    runner.close()
    psutil.wait_procs(processes, ENDS_S)
    assert not any(process.is_running() for process in processes)


def test_a_rank_that_cannot_load_is_an_error_that_names_it(model: Path, tmp_path: Path) -> None:
    card = ModelCard.load(model)
    gang = Gang(lambda _: None)
    gang.allocate(1 << 16, torch.device("cpu"))
    gang.start(tmp_path / "nothing", card, replace(CONFIG, pipeline_parallel_size=1), 64, 1 << 16, compiled=True)
    try:
        with pytest.raises(ConfigError, match=r"rank 1: .*nothing"):
            gang.wait_ready(60.0)
    finally:
        gang.close()
    assert not ranks()


@pytest.mark.slow
@pytest.mark.parametrize(("batch_invariant", "collective"), [(False, "auto"), (True, "auto"), (True, "gloo")])
def test_ranks_that_compute_by_torch(
    model: Path,
    lost: queue.Queue[BaseException],
    batch_invariant: bool,
    collective: RankCollective,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They meet in the memory of processes or over gloo, end with the runner, and end the worker when one of them dies."""
    one = replace(CONFIG, dtype="float32", batch_invariant=batch_invariant, tensor_parallel_size=1, pipeline_parallel_size=1)
    alone = ModelRunner.load(model, ModelCard.load(model), one).logits(PLAN)
    config = replace(one, tensor_parallel_size=2, pipeline_parallel_size=2, rank_collective=collective)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runner = ModelRunner.load(model, ModelCard.load(model), config)
    processes = ranks()
    assert len(processes) == 3
    assert "torch float32" in runner.describe()
    assert not any(tmp_path.iterdir())  # the folder by which ranks over gloo find each other: a killed worker leaves nothing
    assert torch.equal(runner.logits(PLAN), alone)
    runner.close()
    assert not any(process.is_running() for process in processes)
    runner = ModelRunner.load(model, ModelCard.load(model), replace(config, tensor_parallel_size=3), on_lost=lost.put)
    assert torch.equal(runner.logits(PLAN), alone)
    processes = ranks()
    processes[3].suspend()  # so that the others wait for it when it dies
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(runner.logits, PLAN)
        with pytest.raises(TimeoutError):
            step.result(0.3)
        processes[3].send_signal(signal.SIGKILL)
        failure = lost.get(timeout=ENDS_S)
        assert f"rank 4 of this worker (process {processes[3].pid}) ended with status -9" in str(failure)
        with pytest.raises(ReplicaLost):
            step.result(ENDS_S)
    psutil.wait_procs(processes, ENDS_S)
    assert not any(process.is_running() for process in processes)
    runner.close()
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["auto", "gloo"])
def test_a_rank_by_torch_that_is_stopped_costs_a_step_and_the_gang(
    model: Path, lost: queue.Queue[BaseException], collective: RankCollective
) -> None:
    hasty = replace(CONFIG, dtype="float32", step_timeout_s=0.5, pipeline_parallel_size=1, rank_collective=collective)
    runner = ModelRunner.load(model, ModelCard.load(model), hasty, on_lost=lost.put)
    runner.logits(PLAN)
    (process,) = ranks()
    process.suspend()
    with pytest.raises(ReplicaLost):
        runner.logits(PLAN)
    runner.close()
    process.wait(ENDS_S)


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_ended_before_others_use_its_memory(
    model: Path, lost: queue.Queue[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may only be late, and it would write later. Nobody computes a step here, which would notice it as well."""
    monkeypatch.setattr("pdserve.engine.gang.line.ANSWER_S", 0.3)
    config = replace(CONFIG, dtype="float32", pipeline_parallel_size=1, rank_collective="gloo")
    runner = ModelRunner.load(model, ModelCard.load(model), config, on_lost=lost.put, service=RANK_SERVICE)
    (process,) = ranks()
    process.suspend()
    with pytest.raises(ReplicaLost, match="no answer within"):
        runner.lines(MEMORY)[1].call("parts")
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert "ended with status -9" in str(lost.get(timeout=ENDS_S))
    runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["auto", "gloo"])
def test_a_rank_that_waits_for_a_stopped_one_leaves_a_gang_that_is_closed(model: Path, collective: RankCollective) -> None:
    """It does not wait for `step_timeout_s`, which is 30 s here."""
    config = replace(CONFIG, dtype="float32", pipeline_parallel_size=1, rank_collective=collective)
    runner = ModelRunner.load(model, ModelCard.load(model), config)
    runner.logits(PLAN)
    (process,) = ranks()
    process.suspend()
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(runner.logits, PLAN)
        with pytest.raises(TimeoutError):
            step.result(0.2)
        runner.close()
        with pytest.raises(ReplicaLost):
            step.result(ENDS_S)
    process.wait(ENDS_S)


def test_more_rows_than_a_gang_has_room_for_cost_a_step_alone(runner: ModelRunner) -> None:
    """No plan of the scheduler has so many."""
    count = 640
    table = (tuple(map(BlockId, range(-(-count // 16)))),)
    with pytest.raises(MemoryError):
        runner._model.forward(StepPlan((SequenceSlice(SeqId(0), 0, (1,) * count, table, ()),)), [])
    assert torch.isfinite(runner.logits(PLAN)).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"dtype": "float32", "threads": 2, "oversubscribe": True},
            "by torch with threads 2: .*, or threads 1",
        ),
        ({"tensor_parallel_size": 8}, "tensor_parallel_size 8 does not divide"),
        ({"pipeline_parallel_size": 5}, "pipeline_parallel_size 5 is not possible with 4 layers"),
        ({"enable_expert_parallel": True}, "this model has none"),
        ({"rank_collective": "gloo"}, "rank_collective gloo: ranks of compiled steps add up in shared memory"),
        (
            {"rank_collective": "nccl", "dtype": "float32"},
            "rank_collective nccl: NCCL and CUDA are needed, and the device is cpu",
        ),
    ],
)
def test_what_no_gang_computes_is_refused_before_a_process_starts(model: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelRunner.load(model, ModelCard.load(model), replace(CONFIG, **changes))  # type: ignore[arg-type]
    assert not ranks()
