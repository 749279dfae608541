"""A keeper and the process of its worker, without Ray: it starts one, adopts the one that runs, and ends it."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve.cluster import plan
from pdserve.cluster.errors import WorkerDied
from pdserve.cluster.keeping import keeper as keeper_module
from pdserve.cluster.keeping.keeper import Keeper
from pdserve.cluster.keeping.order import StartOrder, running_workers
from pdserve.cluster.plan import WorkerPlan
from pdserve.cluster.record import ClusterRecord, ProcessId, carrying, marked
from pdserve.config import ClusterConfig
from pdserve.core.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
LONG_REFUSED_THREADS, LONG_CHARS = 1003, 64 << 20  # of the stand-in
HERE = Path(__file__).resolve().parent
NAME = f"keeper-{os.getpid()}"
BOUND_S = 60.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent))
    yield tmp_path
    for process in carrying("TMPDIR", str(tmp_path)):
        process.send(signal.SIGKILL)


def planned(folder: Path, *, lasting: str = NAME, address: str = "127.0.0.1:1") -> WorkerPlan:
    entries = {plan.PREFILL: "standin_worker:start_prefill", plan.DECODE: "standin_worker:start_decode"}
    return plan.Blueprint(ClusterConfig(), address, "", folder, entries, lasting).plan(plan.DECODE, "decode-0")


def keeper(made: WorkerPlan) -> Keeper:
    return Keeper(StartOrder(made, "127.0.0.1", time.time()))


def running() -> dict[str, ProcessId]:
    return {name: facts.process for name, facts in running_workers(ClusterRecord.find(NAME)).items()}


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def test_the_next_keeper_adopts_what_runs(folder: Path) -> None:
    """(1) A keeper starts the worker, and is gone. (2) The next one finds that process. (3) One with other settings is
    refused. (4) A stop ends the process: who watches hears that it was wanted, and the record forgets it."""
    first = keeper(planned(folder))
    report = first.load()
    assert not report.adopted
    assert running() == {"decode-0": ProcessId.of(report.pid)}
    del first
    second = keeper(planned(folder))
    assert second.load() == dataclasses.replace(report, adopted=True)
    other = planned(folder)
    config = dataclasses.replace(other.config, engine=dataclasses.replace(other.config.engine, max_num_seqs=3))
    with pytest.raises(ConfigError, match=f"decode-0 of the cluster {NAME} runs already, with other settings"):
        keeper(dataclasses.replace(other, config=config))
    heard: list[bool] = []
    watching = threading.Thread(target=lambda: heard.append(second.watch()))
    watching.start()
    keeper(planned(folder)).stop(10.0)
    watching.join(BOUND_S)
    assert heard == [False]
    wait_for(lambda: running() == {})
    wait_for(lambda: marked(NAME) == [])


def test_a_worker_of_a_router_that_will_never_be_there_again_is_ended_first(folder: Path) -> None:
    before = keeper(planned(folder)).load()
    after = keeper(planned(folder, address="127.0.0.1:2")).load()
    assert not after.adopted
    assert [each.pid for each in marked(NAME)] == [after.pid] != [before.pid]


def test_a_worker_that_dies_is_told_and_one_that_was_told_to_end_is_not_started(folder: Path) -> None:
    made = keeper(planned(folder))
    report = made.load()
    os.kill(report.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        made.watch()
    late = keeper(planned(folder))
    late.stop(1.0)
    with pytest.raises(WorkerDied, match="told to end before it was started"):
        late.load()
    assert marked(NAME) == []


def test_a_refused_setting_is_told_before_the_process_ends_and_again_later(folder: Path) -> None:
    """The process ended as soon as its refusal was asked for, at times before it was sent: the keeper then said that the
    worker had died. It said so too when it was asked again, as after a lost connection."""
    refused = planned(folder)
    engine = dataclasses.replace(refused.config.engine, threads=LONG_REFUSED_THREADS)
    made = keeper(dataclasses.replace(refused, config=dataclasses.replace(refused.config, engine=engine)))
    for _ in range(2):
        with pytest.raises(ConfigError, match="too many") as caught:
            made.load()
        assert len(caught.value.message) > LONG_CHARS - 9
        wait_for(lambda: marked(NAME) == [])


def test_a_worker_that_does_not_take_calls_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has forked, so it is not the child that was killed: it loaded on, on the GPU of the next one."""
    code = "import os, sys, time; os.fork() and os._exit(0); print('no address', flush=True); time.sleep(600)"
    monkeypatch.setattr(keeper_module, "COMMAND", (sys.executable, "-c", code))
    with pytest.raises(WorkerDied, match="did not take calls"):
        keeper(planned(folder)).load()
    wait_for(lambda: marked(NAME) == [])


def test_a_worker_that_takes_no_calls_any_more_is_told_as_dead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who watched it waited for ever."""
    made = keeper(planned(folder))
    report = made.load()
    for limit in ("POLL_S", "ANSWER_TIMEOUT_S"):
        monkeypatch.setattr(keeper_module, limit, 0.1)
    os.kill(report.pid, signal.SIGSTOP)
    with pytest.raises(WorkerDied, match="did not answer watch"):
        made.watch()
    made.end()


@pytest.mark.parametrize("lasting", [NAME, ""], ids=["lasting", "bound"])
def test_only_a_lasting_worker_outlives_its_keeper(folder: Path, lasting: str) -> None:
    """The keeper's process is killed. The next keeper adopts the one, and the other ends."""
    code = "import pickle, sys, time\nfrom pdserve.cluster.keeping.keeper import Keeper\n"
    code += "print(Keeper(pickle.load(sys.stdin.buffer)).load().pid, flush=True)\ntime.sleep(120)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        pickle.dump(StartOrder(planned(folder, lasting=lasting), "127.0.0.1", time.time()), child.stdin)
        child.stdin.close()
        worker = ProcessId.of(int(child.stdout.readline()))
        assert worker is not None
        child.kill()
    if lasting:
        assert keeper(planned(folder)).load().pid == worker.pid
    else:
        wait_for(lambda: not worker.alive)


def test_a_worker_never_starts_on_a_gpu_that_another_one_uses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(1) Ray is started again, and gives to the keepers of two workers the GPU of the other one; one of them runs. (2) The
    other one takes the GPU that was given for the first, once that one's keeper has come. (3) So does each that dies later."""

    def placed(worker_id: str, gpu: str) -> Keeper:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
        made = planned(folder)
        config = dataclasses.replace(made.config, worker_id=worker_id)
        return keeper(dataclasses.replace(made, config=config, num_gpus=1.0))

    def gpus() -> dict[str, str]:
        return {name: facts.gpu for name, facts in running_workers(ClusterRecord.find(NAME)).items()}

    placed("decode-0", "4").load()
    late = placed("decode-1", "4")
    loading = threading.Thread(target=late.load)
    loading.start()
    placed("decode-0", "5").load()
    loading.join(BOUND_S)
    assert gpus() == {"decode-0": "4", "decode-1": "5"}
    placed("decode-0", "5").end()
    placed("decode-0", "5").load()
    assert gpus() == {"decode-0": "4", "decode-1": "5"}
