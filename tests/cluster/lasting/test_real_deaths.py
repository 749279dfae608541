"""`pdserve up` with everything real and default settings: each part is killed in turn, and what has to go on goes on.

One cluster of the tiny model serves all tests, in their order. Each leaves it serving.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_real_up import BOUND_S, FREE, REAL, ROOT, again, generate, wait_for, worker

from pdserve.client import AdminClient, InferenceClient
from pdserve.cluster import processes
from pdserve.cluster.record import ClusterRecord, ProcessId, RouterFacts
from pdserve.commands.requests import build
from pdserve.rpc.v1 import inference_pb2, scaling_pb2

pytestmark = [pytest.mark.ray, pytest.mark.slow]
NAME = f"real-{os.getpid()}"
UP = ("up", "--model", "tiny", "--decode", "2", "--name", NAME, *FREE)
READY = "ready; Ctrl-C stops it"
RAY = re.compile("gcs_server|raylet|ray::|dashboard")
STREAMS, TOKENS = 16, 1500


class Life:
    """One cluster over all its `pdserve up`s, which share a temporary folder."""

    def __init__(self, folder: Path, command: Any) -> None:
        self.folder = folder
        self._command = command
        self.commands: list[Any] = []

    def run(self, *arguments: str) -> Any:
        made = self._command(self.folder, *arguments, program=REAL, PYTHONPATH=str(ROOT))
        made.output.rename(made.output.with_suffix(f".{len(self.commands)}"))  # it stays open
        made.output = made.output.with_suffix(f".{len(self.commands)}")
        self.commands.append(made)
        return made

    def up(self) -> Any:
        command = self.run(*UP)
        command.wait_for(READY)
        return command

    @property
    def now(self) -> Any:
        """The `pdserve up` that runs or ran last."""
        return self.commands[-1]

    def kill_up(self) -> None:
        self.now.child.send_signal(signal.SIGKILL)
        self.now.end()

    @property
    def record(self) -> ClusterRecord:
        found = ClusterRecord.find(NAME, self.folder / f"pdserve-{os.getuid()}")
        assert found is not None
        return found

    @property
    def facts(self) -> RouterFacts:
        """What is recorded of the router, once it is ready."""
        found: RouterFacts = wait_for(lambda: (facts := self.record.router) is not None and facts.http and facts)
        return found

    @property
    def router(self) -> ProcessId:
        return self.facts.process

    @contextmanager
    def clients(self) -> Iterator[tuple[InferenceClient, AdminClient]]:
        with InferenceClient(self.facts.grpc) as client, AdminClient(self.facts.admin) as admin:
            yield client, admin

    def pids(self) -> dict[str, int]:
        """The workers that take requests, as the router knows them, once it answers."""
        with self.clients() as (_, admin):
            wait_for(lambda: answers(admin))
            return {each.hello.worker_id: each.hello.pid for each in admin.cluster_state().workers if each.ready}

    def close(self) -> None:
        for command in self.commands:
            command.close()


def answers(admin: AdminClient) -> bool:
    try:
        return bool(admin.cluster_state())
    except Exception:  # noqa: BLE001  it is away
        return False


@contextmanager
def streams(client: InferenceClient) -> Iterator[list[inference_pb2.GenerateResponse]]:
    """Streams that all run inside `with`. Afterwards it holds their last messages."""
    started: set[int] = set()
    last: list[inference_pb2.GenerateResponse] = []

    def stream(index: int) -> inference_pb2.GenerateResponse:
        request = build(text=f"Hello {index}", max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        for message in client.generate(request):
            started.add(index)
            end = message
        return end

    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(stream, index) for index in range(STREAMS)]
        wait_for(lambda: len(started) == STREAMS)
        yield last
        assert not all(each.done() for each in running), "they were to run while it happened"
        last.extend(each.result(BOUND_S) for each in running)


def assert_none_noticed(last: Sequence[inference_pb2.GenerateResponse]) -> None:
    assert [each.usage.output_tokens for each in last] == [TOKENS] * STREAMS
    assert [each.report.attempts for each in last] == [1] * STREAMS


@pytest.fixture(scope="module")
def life(command_type: Any) -> Iterator[Life]:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        temporary = Path(folder) / "0"
        temporary.mkdir()
        made = Life(temporary, command_type)
        try:
            made.up()
            yield made
        finally:
            made.close()


def test_a_killed_up_costs_no_stream_and_the_next_adopts_everything(life: Life) -> None:
    """(1) SIGKILL of `up` under streams: none is lost or tried again, and Ray ends. (2) The next `up` adopts: the same
    processes, which answer."""
    router, workers = life.router, life.pids()
    assert sorted(workers) == ["decode-0", "decode-1", "prefill-0"]
    with life.clients() as (client, _):
        with streams(client) as last:
            life.kill_up()
        assert_none_noticed(last)
        wait_for(lambda: not [each for each in life.now.lasting() if RAY.search(command_of(each))])
        assert (life.router, life.pids()) == (router, workers)
        command = life.up()
        assert command.text.count("it ran already") == len(workers)
        assert (life.router, life.pids()) == (router, workers)
        assert generate(client).report.kv_bytes > 0


def test_an_adopted_worker_that_dies_is_started_again(life: Life) -> None:
    with life.clients() as (client, admin):
        before, others = worker(admin, "decode-0"), life.pids()
        os.kill(before.hello.pid, signal.SIGKILL)
        wait_for(lambda: again(admin, before))
        assert {name for name, pid in life.pids().items() if others[name] != pid} == {"decode-0"}
        assert generate(client).report.kv_bytes > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_router_that_dies_or_hangs_is_replaced_and_costs_no_worker(life: Life, number: int) -> None:
    """The next router serves at the same addresses, and the same workers dial it."""
    before, workers = life.facts, life.pids()
    os.kill(before.process.pid, number)
    wait_for(lambda: life.router != before.process)
    wait_for(lambda: life.pids() == workers)
    after = life.facts
    assert (after.http, after.grpc, after.link, after.admin) == (before.http, before.grpc, before.link, before.admin)
    assert not before.process.alive
    with life.clients() as (client, _):
        assert generate(client).report.kv_bytes > 0


def test_a_lost_ray_costs_no_stream_and_comes_back(life: Life) -> None:
    """(1) All processes of Ray are killed under streams: none notices. (2) Ray is started again, and its keepers adopt the
    workers. (3) One that dies then is started again."""
    workers = life.pids()
    with life.clients() as (client, admin):
        with streams(client) as last:
            ray = [each for each in processes.descendants(life.now.child.pid) if RAY.search(processes.command(each))]
            assert {"gcs_server", "raylet"} <= {each.name() for each in ray}
            processes.kill(ray)
        assert_none_noticed(last)
        life.now.wait_for("Ray is gone .*; workers go on, and pools keep their sizes until Ray is back")
        life.now.wait_for("Ray is back; the workers that run were adopted")
        assert life.pids() == workers
        before = worker(admin, "prefill-0")
        os.kill(before.hello.pid, signal.SIGKILL)
        wait_for(lambda: again(admin, before))


def test_an_up_with_another_secret_or_other_settings_is_refused_and_harms_nothing(life: Life) -> None:
    """(1) The cluster has no `up`. (2) One with another secret and one with other settings end with one line. (3) The next
    that is right finds everything as it was."""
    life.kill_up()
    router, workers = life.router, life.pids()
    stranger = life.run(*UP, "--cluster-token", "another")
    assert stranger.end() == 2
    assert f"the cluster {NAME} runs with another secret" in stranger.text
    other = life.run(*UP, "--max-num-seqs", "3")
    assert other.end() == 2
    assert f"decode-0 of the cluster {NAME} runs already, with other settings" in other.text
    assert "Ray starting" not in stranger.text + other.text
    life.up()
    assert (life.router, life.pids()) == (router, workers)


def test_ordered_sizes_outlive_up(life: Life) -> None:
    """(1) An operator orders one decode worker. (2) `up` is killed. (3) The next starts no second one again."""
    with life.clients() as (_, admin):
        wait_for(lambda: 0 < admin.cluster_state().scaling.age_s < 3.0)  # the new `up` polls
        admin.scale(scaling_pb2.ScaleRequest(decode=1))
        wait_for(lambda: len(admin.cluster_state().workers) == 2)
    left = life.pids()
    life.kill_up()
    command = life.up()
    assert "the pools keep the sizes that were ordered before: prefill 1, decode 1" in command.text
    assert life.pids() == left


def test_down_leaves_nothing_of_a_cluster_whose_up_was_killed(life: Life) -> None:
    """Processes are looked for by their environment; then ports, folders, shared memory."""
    facts = life.facts
    mapped = [name for pid in life.pids().values() for name in shared_memory(pid)]
    life.kill_up()
    down = life.run("down", "--name", NAME)
    assert down.end() == 0, down.text
    assert f"the cluster {NAME} has ended; nothing of it is left" in down.text
    down.assert_nothing_left()
    for at in (facts.http, facts.grpc, facts.link, facts.admin, facts.metrics):
        host, _, port = at.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), BOUND_S)
    assert [name for name in mapped if Path(name).exists()] == []


def command_of(process: ProcessId) -> str:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_text()
    except OSError:
        return ""


def shared_memory(pid: int) -> set[str]:
    maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    return set(re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE))
