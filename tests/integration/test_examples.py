"""The examples, as a reader would run them, against a real cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_service import BOUND_S, tiny

from pdserve.config import ClusterConfig, RouterConfig, load
from testkit.processes import ProcessCluster

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    rules_only = RouterConfig(colocate_by_cost=False)  # measured costs differ from run to run
    with ProcessCluster(tiny(), router=rules_only) as running:
        yield running


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        check=False,
    )


@pytest.mark.cluster
def test_the_grpc_client_streams_and_says_who_served_it(cluster):
    result = run("grpc_client.py", "--address", cluster.grpc, "--max-tokens", "12", "hello there")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].endswith("tokens by prefill-0 -> decode-0, 16384 KV bytes moved]")


@pytest.mark.cluster
def test_the_openai_client_streams_a_chat(cluster):
    result = run("openai_client.py", "--base-url", f"http://{cluster.http}/v1", "--max-tokens", "12", "hello there")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("[tiny: ")
    assert result.stdout.splitlines()[-1].endswith(" tokens, disaggregated]")


@pytest.mark.cluster
def test_the_async_client_streams_several_prompts_at_once(cluster):
    result = run("async_client.py", "--address", cluster.grpc, "--max-tokens", "6", "hello", "there")
    assert result.returncode == 0, result.stderr
    assert len([line for line in result.stdout.splitlines() if line.endswith("prefill-0 -> decode-0]")]) == 2


@pytest.mark.cluster
def test_the_page_of_python_clients_shows_what_works(cluster):
    """Its first block runs against this cluster. The second one, a batch, is run by tests of the clients."""
    page = (ROOT / "docs" / "python-client.md").read_text(encoding="utf-8")
    first, second = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "LLM" in second
    code = first.replace("127.0.0.1:50051", cluster.grpc)
    assert code != first
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert result.returncode == 0, result.stderr
    assert " length " in result.stdout


def test_the_clients_say_in_one_line_that_nobody_listens():
    for script, flag, address in (
        ("grpc_client.py", "--address", "127.0.0.1:9"),
        ("async_client.py", "--address", "127.0.0.1:9"),
        ("openai_client.py", "--base-url", "http://127.0.0.1:9/v1"),
    ):
        result = run(script, flag, address)
        assert result.returncode == 1
        assert result.stderr.startswith("failed: ")
        assert "Traceback" not in result.stderr


def test_the_configuration_loads_and_is_what_the_defaults_are():
    """It names defaults, so that a reader may delete any line of it; only the decode pool is larger."""
    config = load(ClusterConfig, EXAMPLES / "cluster.yaml")
    assert config.engine == ClusterConfig().engine
    assert config.router == ClusterConfig().router
    assert (config.address, config.prefill.replicas, config.decode.replicas) == ("local", 1, 2)
