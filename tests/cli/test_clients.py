"""`generate`, `chat` and `status` against a served API."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result

from pdserve.cli import main
from pdserve.client import CallFailed, InferenceClient
from pdserve.cluster.router_process import RouterProcess
from pdserve.commands.requests import build
from pdserve.config import RouterConfig, RouterProcessConfig

ROOT = Path(__file__).resolve().parents[2]
STANDIN = ROOT / "tests" / "cluster" / "standin_router.py"
ANSWER = "two pools share one cache"


def run(*arguments: str, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(main, arguments, input=stdin, catch_exceptions=False)


def test_generate_writes_the_text_and_a_summary_aside(address: str) -> None:
    result = run("generate", "--address", address, "--stats", "hello")
    assert result.exit_code == 0
    assert result.stdout == f"{ANSWER}\n"
    assert result.stderr.startswith("7 + 5 tokens on prefill-0 -> decode-0 (scripted); TTFT 10.0 ms")


def test_generate_takes_its_prompt_from_standard_input(address: str) -> None:
    assert run("generate", "--address", address, "--chat", "--system", "be brief", stdin="hello").stdout == f"{ANSWER}\n"


def test_generate_json_is_one_object_a_line(address: str) -> None:
    lines = run("generate", "--address", address, "--json", "hello").stdout.splitlines()
    messages = [json.loads(line) for line in lines]
    assert "".join(message["text"] for message in messages) == ANSWER
    assert messages[-1]["finish_reason"] == "FINISH_REASON_STOP"
    assert messages[-1]["report"]["kv_bytes"] == str(360 << 10)


def test_a_refused_request_is_one_line(address: str) -> None:
    result = run("generate", "--address", address, "--temperature", "9", "hello")
    assert result.exit_code == 1
    assert result.stderr == "error: temperature: must be a number in [0, 2] (INVALID_ARGUMENT)\n"


def test_chat_answers_each_line_and_leaves_at_the_end(address: str) -> None:
    result = run("chat", "--address", address, stdin="one\n\ntwo\n")
    assert result.exit_code == 0
    assert result.stdout.count(ANSWER) == 2
    assert "scripted at" in result.stderr


def test_chat_survives_a_refused_turn(address: str) -> None:
    result = run("chat", "--address", address, "--temperature", "9", stdin="one\ntwo\n")
    assert result.exit_code == 0
    assert result.stderr.count("error: temperature") == 2


@pytest.mark.parametrize(
    "arguments", [("generate",), ("generate", "--chat"), ("generate", "hi", "--stop", os.fsdecode(b"\xff"))]
)
def test_text_that_is_not_utf8_is_refused_in_one_line(address: str, arguments: tuple[str, ...]) -> None:
    """It was a traceback, of another error for each locale."""
    result = run(*arguments, "--address", address, stdin=b"hi \xff")
    assert result.exit_code == 1
    assert result.stderr.startswith(("error: prompt: is not UTF-8 from character 3 on: ", "error: stop: is not UTF-8 from"))
    assert result.stderr.count("\n") == 1


def test_chat_survives_a_line_that_is_not_utf8(address: str) -> None:
    result = run("chat", "--address", address, stdin=b"\xff\ntwo\n")
    assert result.exit_code == 0
    assert "error: prompt: is not UTF-8 from character 0 on: " in result.stderr
    assert result.stdout.count(ANSWER) == 1


def test_status_as_table_and_as_json(address: str) -> None:
    assert "router: 0 queued, 0 running" in run("status", "--address", address).stdout
    assert json.loads(run("status", "--address", address, "--json").stdout)["queued_requests"] == 0


def test_status_asked_of_another_port_says_which_one_it_needs() -> None:
    """It said "Method not found!", which names neither the port nor what to do."""
    server = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        result = run("status", "--address", address)
    finally:
        server.stop(None)
    assert result.exit_code == 1
    assert f"{address} is another port or another server" in result.stderr
    assert "its admin port? (--address HOST:PORT)" in result.stderr


def test_watching_and_generating_end_with_ctrl_c(address: str) -> None:
    """A real process each, since the signal is what is tested."""
    for arguments, status in ((("status", "--watch"), 0), (("generate", "--chat"), 130)):
        command = [sys.executable, "-m", "pdserve.cli", *arguments, "--address", address]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        pipe = subprocess.PIPE
        heeding = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}  # a job in the background ignores it
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd=ROOT, **heeding) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(b"hello, slowly")
            child.stdin.close()
            watchdog = threading.Timer(60.0, child.kill)
            watchdog.start()
            assert child.stdout.read(4)
            child.send_signal(signal.SIGINT)
            assert child.wait(60) == status
            watchdog.cancel()


@pytest.mark.slow
def test_a_router_that_hangs_does_not_hang_its_clients_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, it keeps its connections: nothing but an unanswered ping tells."""
    monkeypatch.setenv("STANDIN_PAUSE_S", "60")
    settings = RouterProcessConfig(RouterConfig(http_port=0, grpc_port=0))
    router = RouterProcess(settings, folder=tmp_path, log=tmp_path / "log", command=(sys.executable, str(STANDIN)))
    router.start()
    try:
        endpoints = router.wait_ready(threading.Event())
        with InferenceClient(endpoints.grpc) as client:
            client.model_info()
            os.kill(endpoints.pid, signal.SIGSTOP)
            answer = client.generate(build(text="hello"))
            watchdog = threading.Timer(90.0, answer.cancel)
            watchdog.start()
            with pytest.raises(CallFailed) as failed:
                list(answer)
            watchdog.cancel()
        assert failed.value.status is grpc.StatusCode.UNAVAILABLE
        os.kill(endpoints.pid, signal.SIGCONT)
    finally:
        router.stop()
