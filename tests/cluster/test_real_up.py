"""`pdserve up` with everything real: router, Ray, both workers, NIXL, the tiny model."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve.client import AdminClient, InferenceClient
from pdserve.cluster import processes
from pdserve.commands.requests import build
from pdserve.rpc.v1 import inference_pb2

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]
REAL = ("-m", "pdserve.cli")
UP = ("up", "--model", "tiny", "--prefill", "1", "--decode", "1", "--kv-cache-memory", "16MiB")
FREE = ("--port", "0", "--grpc-port", "0")
BOUND_S = 120.0
STREAMS, TOKENS = 8, 800


def test_up_serves_heals_and_stops(run_command: Any) -> None:
    """(1) It comes up, whatever RAY_ADDRESS says. (2) KV moves. (3) A killed decode worker is started again.
    (4) KV moves again. (5) Ctrl-C: exit 0, nothing left."""
    command = run_command(*UP, *FREE, program=REAL, PYTHONPATH=str(ROOT), RAY_ADDRESS="192.0.2.1:6379")
    command.wait_for("ready; Ctrl-C stops it")
    with InferenceClient(address(command.text, "gRPC")) as client, AdminClient(address(command.text, "admin")) as admin:
        first = generate(client)
        assert first.report.kv_bytes > 0
        before = worker(admin, "decode-0")
        assert os.getpriority(os.PRIO_PROCESS, before.hello.pid) == before.hello.niceness == os.getpriority(os.PRIO_PROCESS, 0)
        os.kill(before.hello.pid, signal.SIGKILL)
        after = wait_for(lambda: again(admin, before))
        assert after.hello.pid != before.hello.pid
        titles = {f"pdserve: {name}" for name in ("prefill-0", "decode-0")}
        assert {title(each.hello.pid) for each in admin.cluster_state().workers} == titles
        second = generate(client)
        assert second.report.kv_bytes == first.report.kv_bytes
    assert_log_lines(command)
    assert title(command.child.pid) == "pdserve: up"
    assert "pdserve: router" in {title(each.pid) for each in psutil.Process(command.child.pid).children()}
    command.signal(signal.SIGINT)
    assert command.end() == 0, command.text
    assert "Traceback" not in command.text
    command.assert_nothing_left()


@pytest.mark.slow
def test_a_worker_drains_under_load_and_no_stream_notices(run_command: Any) -> None:
    """(1) Streams run on both decode workers, niced since the operator wants it, which is told. (2) One worker drains: `up`
    says so, every stream ends whole, wherever it moved, none was tried again. (3) What comes later is served by the other."""
    slow = ("--dtype", "float32")  # streams that last for seconds: they should run when the drain begins
    command = run_command(*UP, *FREE, *slow, "--decode", "2", program=REAL, PYTHONPATH=str(ROOT), RAY_worker_niceness="1")
    command.wait_for("ready; Ctrl-C stops it")
    assert "prefill-0, decode-0, decode-1: niceness" in command.text
    with (
        InferenceClient(address(command.text, "gRPC")) as client,
        AdminClient(address(command.text, "admin")) as admin,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        niced = [each.hello.niceness for each in admin.cluster_state().workers]
        assert niced == [os.getpriority(os.PRIO_PROCESS, each.hello.pid) for each in admin.cluster_state().workers]
        assert min(niced) > os.getpriority(os.PRIO_PROCESS, 0)
        asked = [build(text="Hello", max_tokens=TOKENS, temperature=0.0, ignore_eos=True) for _ in range(STREAMS)]
        answers = [pool.submit(lambda request=request: list(client.generate(request))) for request in asked]
        wait_for(lambda: worker(admin, "decode-1").requests_placed > 0)
        progress = list(admin.drain("decode-1"))
        assert progress[-1].done
        ends = [answer.result(BOUND_S)[-1] for answer in answers]
        assert {end.usage.output_tokens for end in ends} == {TOKENS}
        assert {end.report.attempts for end in ends} == {1}
        assert {end.report.decode_worker for end in ends} == {"decode-0"}, "what decode-1 had went on elsewhere"
        command.wait_for("decode-1 drained and left")
        assert generate(client).report.decode_worker == "decode-0"
        assert [each.hello.worker_id for each in admin.cluster_state().workers] == ["prefill-0", "decode-0"]
    command.signal(signal.SIGINT)
    assert command.end() == 0, command.text
    assert "restarting" not in command.text
    command.assert_nothing_left()


def assert_log_lines(command: Any) -> None:
    """The workers' logs are where `up` said, in the one format of all processes."""
    logs = Path(re.search(r"^logs +(\S+)", command.text, re.MULTILINE)[1])  # type: ignore[index]
    router = (logs / "router.log").read_text().splitlines()[0]
    stamp = re.compile(r"\d{4}-\d\d-\d\d[ T][\d:.,]+ INFO ")
    assert stamp.match(router), router
    for name in ("prefill-0", "decode-0"):
        lines = (logs / f"{name}.log").read_text().splitlines()
        assert any(stamp.match(line) and f"{name} ready at" in line for line in lines), lines


@pytest.mark.slow
def test_a_busy_http_port_is_one_line_that_names_its_flag(run_command: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        command = run_command(*UP, "--http-port", str(port), "--grpc-port", "0", program=REAL, PYTHONPATH=str(ROOT))
        assert command.end() == 2, command.text
    (line,) = [line for line in command.text.splitlines() if line.startswith("error: ")]
    assert str(port) in line
    assert "--http-port" in line
    assert "Traceback" not in command.text
    assert not processes.wait_gone(command.seen, 30.0), command.text
    assert not list(command.temporary.iterdir()), "a wrong setting leaves nothing behind, logs neither"


def title(pid: int) -> str:
    return psutil.Process(pid).cmdline()[0]


def address(text: str, port: str) -> str:
    return re.search(rf"^{port} +(\S+)", text, re.MULTILINE)[1]  # type: ignore[index]


def generate(client: InferenceClient) -> inference_pb2.GenerateResponse:
    """The last message of one short disaggregated request."""
    *_, last = client.generate(build(text="hello there", max_tokens=8, ignore_eos=True, placement="disaggregated"))
    return last


def worker(admin: AdminClient, worker_id: str) -> inference_pb2.WorkerState:
    (found,) = [state for state in admin.cluster_state().workers if state.hello.worker_id == worker_id]
    return found


def again(admin: AdminClient, before: inference_pb2.WorkerState) -> inference_pb2.WorkerState | None:
    """The same worker id in a new process, once it takes requests."""
    for state in admin.cluster_state().workers:
        if (
            state.hello.worker_id == before.hello.worker_id
            and state.ready
            and state.hello.incarnation != before.hello.incarnation
        ):
            return state
    return None


def wait_for(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        if seen := look():
            return seen
        time.sleep(0.05)
    raise AssertionError("it did not come")
