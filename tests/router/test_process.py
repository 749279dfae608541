"""`python -m router` as others start it: one ready line, four ports, a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from pdserve.rpc.v1 import admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from testkit.fake_worker import DECODE, PREFILL, FakeWorker

from .local_cluster import TOKEN, generate_request, read_answer, right_ids, tiny_model

ROOT = Path(__file__).parents[2]
PORTS = ("--set", "router.http_port=0", "--set", "router.grpc_port=0")
WAIT_S = 60.0
LOST_S = 4.0  # longer than a busy machine makes this process stand still, whose workers would be silent


@contextlib.contextmanager
def router_process(tmp_path: Path, *args: str, descriptors: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """`descriptors`: RLIMIT_NOFILE, soft and hard."""
    config = tmp_path / "router.yaml"
    config.write_text(f"cluster_token: {TOKEN}\nengine: {{model: tiny, max_model_len: 256}}\n")
    command = [sys.executable, "-m", "router", "--config", str(config), *args]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if descriptors is not None:
        pipes["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    process = subprocess.Popen(command, cwd=ROOT, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def ready_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return json.loads(line)


def test_it_serves_both_protocols_and_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    with router_process(tmp_path, *PORTS) as process:
        ready = ready_line(process)
        assert (ready["event"], ready["pid"]) == ("ready", process.pid)
        assert psutil.Process(process.pid).cmdline()[0] == "pdserve: router"
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://{ready['http']}/health", timeout=WAIT_S)
        assert caught.value.code == 503
        caught.value.close()
        asyncio.run(_serve_some(ready))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, err
        assert out == ""
        assert "outcome=length" in err
        assert "Traceback" not in err


async def _serve_some(ready: dict[str, Any]) -> None:
    settings = {"cluster_token": TOKEN, "model_fingerprint": tiny_model().card.fingerprint, "vocab_size": 512}
    async with (
        asyncio.timeout(WAIT_S),
        FakeWorker(PREFILL, ready["link"], **settings),
        FakeWorker(DECODE, ready["link"], **settings),
        grpc.aio.insecure_channel(ready["grpc"]) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        answer = await read_answer(stub.Generate(generate_request((1, 2, 3), 5)))
        assert answer.ids == right_ids((1, 2, 3), 5)
        async with grpc.aio.insecure_channel(ready["admin"]) as admin_channel:
            admin = admin_pb2_grpc.AdminStub(admin_channel)
            assert len((await admin.GetClusterState(inference_pb2.GetClusterStateRequest())).workers) == 2
        body = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 5, "stream": True}).encode()
        url = f"http://{ready['http']}/v1/completions"
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=WAIT_S).read().decode())
        assert text.rstrip().endswith("data: [DONE]")
        assert '"finish_reason":"length"' in text.replace(" ", "")


def test_it_ends_in_time_with_requests_running(tmp_path: Path) -> None:
    with router_process(tmp_path, *PORTS, "--set", "router.drain_s=1") as process:
        asyncio.run(_stop_while_running(ready_line(process), process))
        assert process.returncode == 0


async def _stop_while_running(ready: dict[str, Any], process: subprocess.Popen[str]) -> None:
    settings = {"cluster_token": TOKEN, "model_fingerprint": tiny_model().card.fingerprint, "vocab_size": 512}
    async with (
        asyncio.timeout(WAIT_S),
        FakeWorker(DECODE, ready["link"], token_interval_s=0.5, **settings),
        grpc.aio.insecure_channel(ready["grpc"]) as channel,
    ):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(generate_request((1, 2, 3), 200))
        await anext(aiter(call))
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in call:
                pass


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    with router_process(tmp_path, *PORTS, "--exit-with-parent") as process:
        ready_line(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=WAIT_S) == 0


@pytest.mark.quick("http", "link")
@pytest.mark.parametrize("name", ["http", "grpc", "link", "admin"])
def test_a_busy_port_is_named_by_its_flag(tmp_path: Path, name: str) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        taken = f"router.{name}_port={busy.getsockname()[1]}"
        with router_process(tmp_path, *PORTS, "--set", taken) as process:
            out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (2, "")
    assert f"--{name}-port" in err
    assert "Traceback" not in err


def test_a_host_that_is_not_ours_is_named_by_its_flag_and_not_by_a_port(tmp_path: Path) -> None:
    with router_process(tmp_path, *PORTS, "--set", "router.host=192.0.2.77") as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (2, "")
    assert "--host" in err
    assert "-port" not in err


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    with router_process(tmp_path, "--set", "router.port=1") as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (2, "")
    assert "router.port" in err


def test_workers_that_beat_through_a_pause_of_the_router_are_not_found_silent(tmp_path: Path) -> None:
    settings = ("--set", f"router.heartbeat_lost_s={LOST_S}", "--set", "router.heartbeat_interval_s=0.2")
    with router_process(tmp_path, *PORTS, *settings) as process:
        asyncio.run(_pause_while_running(ready_line(process), process))
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=WAIT_S)
        assert "was silent" not in err


async def _pause_while_running(ready: dict[str, Any], process: subprocess.Popen[str]) -> None:
    settings = {"cluster_token": TOKEN, "model_fingerprint": tiny_model().card.fingerprint, "vocab_size": 512}
    async with (
        asyncio.timeout(WAIT_S),
        FakeWorker(DECODE, ready["link"], heartbeat_interval_s=0.2, **settings) as worker,
        grpc.aio.insecure_channel(ready["grpc"]) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        worker.gate.clear()
        call = stub.Generate(generate_request((1, 2, 3), 100))
        await worker.wait_for(lambda: bool(worker.live_handles))
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.5 * LOST_S)  # what is tested: longer than heartbeat_lost_s
        process.send_signal(signal.SIGCONT)
        worker.gate.set()
        ids = [token async for part in call for token in part.ids]
        assert ids == right_ids((1, 2, 3), 100)


FORKS = """
import asyncio, sys
import router.main
import grpc, uvloop

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        for _ in range(10):
            child = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
            assert await child.wait() == 0
    await server.stop(None)

uvloop.run(main())
"""


def test_grpc_does_nothing_at_a_fork_of_the_router() -> None:
    """It says that it would, if it is not told otherwise in time."""
    env = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    ran = subprocess.run(
        [sys.executable, "-c", FORKS], cwd=ROOT, env=env, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert "fork" not in ran.stderr
