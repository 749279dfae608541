"""`generate`, `chat` and `status` against a served API."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from click.testing import CliRunner, Result

from pdserve.cli import main

ROOT = Path(__file__).resolve().parents[2]
ANSWER = "two pools share one cache"


def run(*arguments: str, stdin: str = "") -> Result:
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


def test_status_as_table_and_as_json(address: str) -> None:
    assert "router: 0 queued, 0 running" in run("status", "--address", address).stdout
    assert json.loads(run("status", "--address", address, "--json").stdout)["queued_requests"] == 0


def test_watching_and_generating_end_with_ctrl_c(address: str) -> None:
    """A real process each, since the signal is what is tested."""
    for arguments, status in ((("status", "--watch"), 0), (("generate", "--chat"), 130)):
        command = [sys.executable, "-m", "pdserve.cli", *arguments, "--address", address]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd=ROOT) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(b"hello")
            child.stdin.close()
            watchdog = threading.Timer(20.0, child.kill)
            watchdog.start()
            assert child.stdout.read(4)
            child.send_signal(signal.SIGINT)
            assert child.wait(20) == status
            watchdog.cancel()
