"""`generate`, `chat` and `status` as processes against a real cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_service import BOUND_S, tiny

from pdserve.config import RouterConfig
from testkit.processes import ProcessCluster

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
PROMPT = ("--max-tokens", "12", "--temperature", "0", "--ignore-eos")


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    rules_only = RouterConfig(colocate_by_cost=False)  # measured costs differ from run to run
    with ProcessCluster(tiny(), router=rules_only) as running:
        yield running


def run(command: str, address: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdserve.cli", command, "--address", address, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        check=False,
    )


def test_generate_in_both_placements_writes_one_text(cluster):
    """And says aside how it was served."""
    apart = run("generate", cluster.grpc, *PROMPT, "--stats", "--placement", "disaggregated", "hello there")
    together = run("generate", cluster.grpc, *PROMPT, "--stats", "--placement", "colocated", stdin="hello there")
    assert (apart.returncode, together.returncode) == (0, 0), apart.stderr + together.stderr
    assert apart.stdout == together.stdout
    assert apart.stdout.strip()
    assert "12 tokens on prefill-0 -> decode-0 (requested)" in apart.stderr
    assert "KV moved 16.0 KiB" in apart.stderr
    assert "12 tokens on decode-0 (requested)" in together.stderr
    assert "KV moved 0 B" in together.stderr


def test_generate_json_is_the_stream_itself(cluster):
    result = run("generate", cluster.grpc, *PROMPT, "--json", "--stats", "hello there")
    assert result.returncode == 0, result.stderr
    messages = [json.loads(line) for line in result.stdout.splitlines()]
    assert sum(len(message.get("ids", [])) for message in messages) == 12
    assert messages[-1]["finish_reason"] == "FINISH_REASON_LENGTH"
    assert messages[-1]["usage"]["output_tokens"] == 12
    assert int(messages[-1]["report"]["kv_bytes"]) > 0
    assert "TTFT" in result.stderr


def test_chat_answers_piped_lines_in_turn(cluster):
    """The second answer is to the whole conversation, so the same line gets another answer."""
    result = run("chat", cluster.grpc, *PROMPT, stdin="hello\nhello\n")
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith("tiny at ")
    alone = run("chat", cluster.grpc, *PROMPT, stdin="hello\n")
    first = alone.stdout.removesuffix("\n\n")
    assert first
    assert result.stdout.startswith(f"{first}\n")
    assert result.stdout.removeprefix(f"{first}\n").strip() not in ("", first.strip())


def test_status_shows_both_pools(cluster):
    table = run("status", cluster.admin)
    assert table.returncode == 0, table.stderr
    assert "prefill-0" in table.stdout
    assert "decode-0" in table.stdout
    state = json.loads(run("status", cluster.admin, "--json").stdout)
    assert [worker["hello"]["role"] for worker in state["workers"]] == ["ROLE_PREFILL", "ROLE_DECODE"]
    assert all(worker["ready"] and worker["load"]["blocks"]["unaccounted"] == 0 for worker in state["workers"])


def test_a_refused_request_is_one_line_and_1(cluster):
    result = run("generate", cluster.grpc, "--max-tokens", "5000", "hello")
    assert result.returncode == 1
    assert result.stderr.startswith("error: max_tokens: This model's maximum context length is ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.quick("generate")
@pytest.mark.parametrize("command", ["generate", "chat", "status"])
def test_nobody_listens_is_one_line_and_1(command):
    result = run(command, "127.0.0.1:9", stdin="hello\n")
    assert result.returncode == 1
    assert result.stderr.startswith("error: nothing answers at 127.0.0.1:9")
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr
