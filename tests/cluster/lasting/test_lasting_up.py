"""`pdserve up` over stand-ins is killed, signalled and started again: what lasts goes on, and what does not is gone."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve.cluster import processes, record
from pdserve.cluster.keeping.order import running_workers
from pdserve.cluster.record import ClusterRecord, ProcessId

pytestmark = [pytest.mark.ray, pytest.mark.slow]
UP = ("up", "--port", "0", "--grpc-port", "0", "--decode", "1", "--name")
READY = "ready; Ctrl-C"
BOUND_S = 90.0
numbers = itertools.count()


def wait_for(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + BOUND_S
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)
    return found


@pytest.fixture
def name() -> str:
    """A name of a cluster that nobody else has."""
    return f"test-{os.getpid()}-{next(numbers)}"


def router_of(command: Any, name: str) -> ProcessId:
    """The router, as the record has it."""
    kept = ClusterRecord.find(name, command.temporary / f"pdserve-{os.getuid()}")
    assert kept is not None
    facts = wait_for(lambda: kept.router)
    assert facts.http
    process: ProcessId = facts.process
    return process


def workers_of(command: Any, name: str) -> dict[str, ProcessId]:
    """The processes of the workers that run, as the record has them."""
    kept = ClusterRecord.find(name, command.temporary / f"pdserve-{os.getuid()}")
    return {worker_id: facts.process for worker_id, facts in running_workers(kept).items()}


def said(text: str, what: str) -> list[str]:
    return re.findall(rf"^{what} +(\S+)", text, re.MULTILINE)


def test_a_killed_up_leaves_the_router_and_nothing_of_ray_and_the_next_adopts_it(run_command: Any, name: str) -> None:
    """(1) SIGKILL of `up`. (2) Ray's processes are gone within seconds, agents too; the router is the same. (3) The next `up`
    adopts it at the same addresses. (4) Ctrl-C of that one ends everything."""
    first = run_command(*UP, name)
    first.wait_for(READY)
    router = router_of(first, name)
    ray = [each for each in first.seen if "ray" in processes.command(each) and "-m router" not in processes.command(each)]
    assert len(ray) > 3
    first.child.send_signal(signal.SIGKILL)
    first.end()
    helpers = [each for each in ray if re.search("gcs_server|raylet|[Aa]gent|dashboard|monitor", processes.command(each))]
    assert not processes.wait_gone(helpers, 15.0)
    assert router.alive
    second = run_command(*UP, name, TMPDIR=str(first.temporary))
    second.wait_for(READY)
    assert f"the router of before goes on (pid {router.pid})" in second.text
    assert [said(second.text, what) for what in ("HTTP", "gRPC", "admin")] == [
        said(first.text, what) for what in ("HTTP", "gRPC", "admin")
    ]
    assert router.alive
    second.signal(signal.SIGINT)
    assert second.end() == 0, second.text
    assert not router.alive
    wait_for(lambda: first.lasting() == [])
    assert not (first.temporary / f"pdserve-{os.getuid()}").exists()


def test_a_router_with_other_settings_is_replaced_at_the_same_link(run_command: Any, name: str) -> None:
    """(1) `up` is killed. (2) The next has another setting: it says so, another router serves at the same address."""
    first = run_command(*UP, name)
    first.wait_for(READY)
    before = router_of(first, name)
    first.child.send_signal(signal.SIGKILL)
    first.end()
    second = run_command(*UP, name, "--decode-policy", "round_robin", TMPDIR=str(first.temporary))
    second.wait_for(READY)
    assert f"the router of before (pid {before.pid}) has other settings" in second.text
    assert not before.alive
    assert said(second.text, "admin") == said(first.text, "admin")
    second.signal(signal.SIGINT)
    assert second.end() == 0, second.text


def test_a_second_up_of_one_name_is_refused_and_harms_nothing(run_command: Any, name: str) -> None:
    first = run_command(*UP, name)
    first.wait_for(READY)
    router = router_of(first, name)
    second = run_command(*UP, name, TMPDIR=str(first.temporary))
    assert second.end() == 1
    assert f"the cluster {name} has its `pdserve up` already (pid {first.child.pid})" in second.text
    assert router.alive
    first.signal(signal.SIGINT)
    assert first.end() == 0
    first.assert_nothing_left()


def test_a_router_that_hangs_is_started_again_at_the_same_addresses(run_command: Any, name: str) -> None:
    """With default settings: (1) SIGSTOP. (2) `up` kills it and starts another. (3) It answers where the first one did."""
    command = run_command(*UP, name)
    command.wait_for(READY)
    hung = router_of(command, name)
    os.kill(hung.pid, signal.SIGSTOP)
    command.wait_for("it did not answer, and was killed")
    command.wait_for("the router is back")
    assert not hung.alive
    host, _, port = said(command.text, "admin")[0].rpartition(":")
    socket.create_connection((host, int(port)), BOUND_S).close()
    command.signal(signal.SIGINT)
    assert command.end() == 0, command.text
    command.assert_nothing_left()


def test_a_start_outlives_a_worker_and_the_router(run_command: Any, name: str, short_tmp: Path) -> None:
    """(1) While all workers load, one of them and the router are killed. (2) The start goes on, and both come again."""
    gate = short_tmp / "gate"
    command = run_command(*UP, name, "--decode", "2", STANDIN_LOADS_UNTIL=str(gate))
    command.wait_for("router ready")
    before = wait_for(lambda: len(found := workers_of(command, name)) == 3 and found)
    router = router_of(command, name)
    for process in (before["decode-1"], router):
        process.send(signal.SIGKILL)
    command.wait_for("decode-1 restarting; in 1 s")
    command.wait_for("the router is back")
    gate.touch()
    command.wait_for(READY)
    after = wait_for(lambda: len(found := workers_of(command, name)) == 3 and found)
    assert {worker_id for worker_id, process in after.items() if before[worker_id] != process} == {"decode-1"}
    command.signal(signal.SIGINT)
    assert command.end() == 0, command.text
    command.assert_nothing_left()


def test_a_start_outlives_ray(run_command: Any, name: str, short_tmp: Path) -> None:
    """(1) While workers load, Ray's processes are killed. (2) Ray is back, and the start goes on with the same workers."""
    gate = short_tmp / "gate"
    command = run_command(*UP, name, STANDIN_LOADS_UNTIL=str(gate))
    before = wait_for(lambda: len(found := workers_of(command, name)) == 2 and found)
    found = processes.descendants(command.child.pid)
    processes.kill(each for each in found if re.search("gcs_server|raylet", processes.command(each)))
    command.wait_for("Ray is gone")
    command.wait_for("Ray is back; the workers that run were adopted")
    gate.touch()
    command.wait_for(READY)
    assert workers_of(command, name) == before
    command.signal(signal.SIGINT)
    assert command.end() == 0, command.text
    command.assert_nothing_left()


def test_an_up_that_leaves_its_cluster_running_ends_alone(run_command: Any, name: str) -> None:
    """(1) Ctrl-C, twice: `up` and Ray end, router and workers go on. (2) `pdserve down` leaves nothing. A worker that is not
    recorded here, as those of other machines are, is drained, though it is the last one of its role."""
    command = run_command(*UP, name, "--leave-running")
    command.wait_for(READY)
    router, workers = router_of(command, name), workers_of(command, name)
    for _ in range(2):
        command.signal(signal.SIGINT)
    assert command.end() in (0, 130), command.text
    assert len(workers) == 2
    wait_for(lambda: {each.pid for each in command.lasting()} == {each.pid for each in (router, *workers.values())})
    ClusterRecord(command.temporary / f"pdserve-{os.getuid()}" / name).forget_worker("decode-0")
    down = run_command("down", "--name", name, TMPDIR=str(command.temporary))
    assert down.end() == 0, down.text
    assert "draining decode-0 at 127.0.0.1:" in down.text
    assert f"the cluster {name} has ended; nothing of it is left" in down.text
    command.assert_nothing_left()


def test_a_taken_port_is_tried_until_it_is_free(run_command: Any, name: str) -> None:
    """(1) The router is killed, and another process takes a port of it. (2) `up` says so, and goes on. (3) The port is free."""
    command = run_command(*UP, name)
    command.wait_for(READY)
    router = router_of(command, name)
    host, _, port = said(command.text, "HTTP")[0].removeprefix("http://").removesuffix("/v1").rpartition(":")
    os.kill(router.pid, signal.SIGKILL)
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def taken() -> bool:
            try:
                squatter.bind((host, int(port)))
                squatter.listen()
            except OSError:
                return False
            return True

        wait_for(taken)
        command.wait_for("--http-port .* is in use")
        assert command.child.poll() is None
    command.wait_for("the router is back")
    command.signal(signal.SIGINT)
    assert command.end() == 0, command.text
    command.assert_nothing_left()


@pytest.mark.parametrize("moment", ["Ray starting", READY])
@pytest.mark.parametrize("kinds", [(signal.SIGINT,), (signal.SIGINT, signal.SIGTERM)], ids=["one kind", "two kinds"])
def test_ten_signals_in_a_burst_end_everything(run_command: Any, name: str, moment: str, kinds: tuple[int, ...]) -> None:
    """The kernel may make one of equal signals, which is a clean end. Processes are looked for by their environment."""
    command = run_command(*UP, name)
    command.wait_for(moment)
    for index in range(10):
        os.kill(command.child.pid, kinds[index % len(kinds)])
    assert command.end() in ((130,) if len(kinds) > 1 else (0, 130)), command.text
    wait_for(lambda: command.lasting() == [])
    wait_for(lambda: list(Path(command.temporary).iterdir()) == [])


def test_a_killed_bound_cluster_leaves_no_process(run_command: Any) -> None:
    """Found by the folder that all of them carry in their environment, whoever their parents are."""
    command = run_command("up", "--port", "0", "--grpc-port", "0", "--decode", "1", "--bound")
    command.wait_for(READY)
    folder = next(str(each) for each in command.temporary.iterdir() if each.name.startswith("pd-"))
    router = next(each for each in psutil.Process(command.child.pid).children() if "standin_router" in processes.command(each))
    assert len(record.carrying(record.TIED, folder)) > 4
    command.child.send_signal(signal.SIGKILL)
    command.end()
    wait_for(lambda: record.carrying(record.TIED, folder) == [])
    assert not processes.alive(router)
