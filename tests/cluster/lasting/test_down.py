"""The end of a cluster whose `pdserve up` has died: all that carries its mark, in order, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from pdserve.cli import main
from pdserve.cluster.keeping import ending
from pdserve.cluster.keeping.ending import end_cluster
from pdserve.cluster.record import ClusterFacts, ClusterRecord, ProcessId, RouterFacts, mark_of

NAME = f"down-{os.getpid()}"
PROGRAM = """
import signal, sys, time
def end(*_):
    time.sleep(0.2 if sys.argv[1] == "router" else 0.0)
    print(f"{sys.argv[1]} is told", file=open(sys.argv[2], "a"), flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "stubborn" else end)
print(flush=True)
time.sleep(120)
"""
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of its own, in which clusters are recorded."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    children: list[subprocess.Popen[bytes]] = []

    def started(what: str, name: str = NAME) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", PROGRAM, what, str(folder / "told")]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **mark_of(name)}))
        assert children[-1].stdout is not None
        assert children[-1].stdout.readline()
        return children[-1]

    yield started
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def process_of(child: subprocess.Popen[bytes]) -> ProcessId:
    found = ProcessId.of(child.pid)
    assert found is not None
    return found


def recorded(folder: Path, router: subprocess.Popen[bytes]) -> ClusterRecord:
    """A cluster with a router that has not become ready, and with logs that were made for it."""
    (folder / "logs").mkdir()
    kept = ClusterRecord.open(NAME)
    kept.write_facts(ClusterFacts("secret", str(folder / "logs"), logs_are_ours=True))
    kept.write_router(RouterFacts(process_of(router), "", "", "127.0.0.1:1", "127.0.0.1:1", "", "digest"))
    return kept


def test_all_of_one_cluster_ends_the_router_first(folder: Path, start: Start) -> None:
    """(1) A router, a worker, and a process of another cluster. (2) The router is told first. (3) Record and logs are gone.
    (4) The other cluster goes on."""
    worker, other = start("worker"), start("other", f"{NAME}-2")
    router = start("router")
    recorded(folder, router)
    said: list[str] = []
    ended = end_cluster(NAME, said.append)
    assert ended.clean
    assert (folder / "told").read_text().splitlines() == ["router is told", "worker is told"]
    assert [child.wait(60) for child in (router, worker)] == [0, 0]
    assert other.poll() is None
    assert sorted(folder.iterdir()) == [folder / "told"]
    assert f"stopping the router (pid {router.pid})" in said


def test_workers_of_other_machines_that_nobody_can_ask_are_said_and_the_record_stays(folder: Path, start: Start) -> None:
    """With a dead router they counted as none, and their secret was removed: nothing could end them any more."""
    worker, router = start("worker"), start("router")
    kept = recorded(folder, router)
    kept.write_facts(ClusterFacts("secret", str(folder / "logs"), logs_are_ours=True, joined=True))
    router.kill()
    router.wait()
    result = CliRunner().invoke(main, ["down", "--name", NAME])
    assert result.exit_code == 1
    assert "still runs: workers of other machines" in result.output
    assert "nothing of it is left" not in result.output
    assert worker.wait(60) == 0
    assert kept.facts is not None


def test_an_up_that_hangs_is_killed(folder: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lived on, started the router again, and the record could not be removed since it had its `pdserve up` already."""
    monkeypatch.setattr(ending, "UP_MARGIN_S", 0.1)
    monkeypatch.setattr(ending, "TERM_TIMEOUT_S", 0.1)
    router = start("router")
    kept = recorded(folder, router)
    kept.write_facts(ClusterFacts("secret", str(folder / "logs"), logs_are_ours=True, drain_s=0.0))
    up = start("stubborn", f"{NAME}-not-marked")
    kept.own()
    (kept.folder / "lock").write_text(json.dumps(dataclasses.asdict(process_of(up))))
    kept.release()
    result = CliRunner().invoke(main, ["down", "--name", NAME])
    assert result.exit_code == 0, result.output
    assert f"killing `pdserve up` (pid {up.pid})" in result.output
    assert up.wait(60) == -9
    assert ClusterRecord.find(NAME) is None


def test_a_down_waits_as_long_as_the_streams_may_take(folder: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited 90 s, however long `router.drain_s` was, and then cut them."""
    waits: list[float] = []
    kept = recorded(folder, start("router"))
    kept.write_facts(ClusterFacts("secret", str(folder / "logs"), logs_are_ours=True, drain_s=3600.0))
    up = start("worker", f"{NAME}-not-marked")
    (kept.folder / "lock").write_text(json.dumps(dataclasses.asdict(process_of(up))))
    wait_gone = ending._wait_gone
    monkeypatch.setattr(ending, "_wait_gone", lambda each, limit_s: (waits.append(limit_s), wait_gone(each, limit_s)))
    assert end_cluster(NAME, lambda _: None).clean
    assert waits[0] == 3600.0 + ending.UP_MARGIN_S


def test_what_has_no_record_any_more_is_found_by_its_mark(folder: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """And killed, if it takes no other signal."""
    monkeypatch.setattr(ending, "TERM_TIMEOUT_S", 0.1)
    child = start("stubborn")
    result = CliRunner().invoke(main, ["down", "--name", NAME])
    assert result.exit_code == 0, result.output
    assert child.wait(60) == -9
    assert "nothing of it is left" in result.output


def test_a_cluster_that_is_not_there_is_said_with_those_that_are(folder: Path) -> None:
    """Without a name it is that of the admin port. Asked again, it says the same."""
    ClusterRecord.open("mine")
    for _ in range(2):
        result = CliRunner().invoke(main, ["down", "--admin-port", "1"])
        assert (result.exit_code, result.output) == (0, "nothing of the cluster pdserve-1 runs here; there is: mine\n")


def test_what_cannot_be_ended_is_named_and_kept_in_the_record(
    folder: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that outlives SIGKILL, as one that waits for a device does. The record stays for the next try."""
    for limit in ("TERM_TIMEOUT_S", "KILL_TIMEOUT_S"):
        monkeypatch.setattr(ending, limit, 0.1)
    router = start("stubborn")
    recorded(folder, router)
    monkeypatch.setattr(ending, "_send", lambda *_: None)
    result = CliRunner().invoke(main, ["down", "--name", NAME])
    assert result.exit_code == 1
    assert f"still runs: process {router.pid}" in result.output
    assert ClusterRecord.find(NAME) is not None
