"""The reports of public clients are read as they are written, and the openai package's checks hold, and can fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.clients import checks, load
from bench.clients.__main__ import CLIENTS, packages, run, write
from bench.clients.client import Client, ClientFailed, Found, Server, output_of
from bench.clients.speaker import FINAL, TEXT, answer, speaking_server
from bench.engine.peers.install import RECIPES
from pdserve.checkpoint.resolve import resolve
from pdserve.commands.console import make_console
from pdserve.core.structured.constraint import Constraint, ConstraintKind
from testkit.processes import ProcessCluster
from tests.integration.real_service import tiny

PYTHON = Path(sys.executable)


def test_every_client_has_an_environment_with_pinned_packages() -> None:
    assert {one.environment for one in CLIENTS} <= {*RECIPES}
    assert all("==" in packages(one) for one in CLIENTS)


CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"$ref": "#/$defs/c"}}, "$defs": {"c": {"enum": ["Rome"]}}}
OFFERED: Any = [
    {"type": "function", "function": {"name": "f", "parameters": CITY}},
    {"type": "function", "function": {"name": FINAL}},
]


def prompt(*roles: str, tools: Any = None) -> str:
    return json.dumps({"messages": [{"role": role, "content": None} for role in roles], "tools": tools})


def test_the_model_that_speaks_calls_first_and_then_answers() -> None:
    called = '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>'
    schema = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(CITY))
    beside = Constraint(ConstraintKind.LARK, f"start: calls | answer\nanswer: %json {json.dumps(CITY)}\n")
    required = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "array"}')
    assert answer("The sky is", None) == answer(prompt("user"), None) == TEXT
    assert answer(prompt("user", tools=OFFERED), None) == answer(prompt("user", tools=OFFERED), beside) == called
    assert answer(prompt("user", "assistant", "tool", tools=OFFERED), None) == TEXT
    assert json.loads(answer(prompt("user", "assistant", "tool", tools=OFFERED), beside)) == {"city": "Rome"}
    assert json.loads(answer(prompt("user"), schema)) == {"city": "Rome"}
    assert json.loads(answer(prompt("user", tools=OFFERED), required)) == [{"name": "f", "parameters": {"city": "Rome"}}]
    assert json.loads(answer(prompt("tool", tools=OFFERED), required)) == [{"name": FINAL, "parameters": {}}]


def test_a_later_run_of_a_client_replaces_its_row(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    row = {"client": "a", "packages": "a==1", "date": "2026-01-01", "clean": True, "checked": "x"}
    write([row, {**row, "client": "b"}], tmp_path)
    write([{**row, "clean": False}], tmp_path)
    assert [one["clean"] for one in json.loads((tmp_path / "results" / "clients.json").read_text())] == [False, True]
    assert "| a | a==1 | 2026-01-01 | no | x |" in (tmp_path / "clients.md").read_text()


@pytest.mark.slow
def test_agents_of_openais_client_run_against_the_model_that_speaks(tmp_path: Path) -> None:
    with speaking_server() as server:
        assert "streamed tool" in checks.agents("openai", PYTHON, server, tmp_path).checked


def test_objects_that_follow_each_other_are_read() -> None:
    assert checks._objects('{\n "ids": [1]\n}\n{"ids": [2, 3]}\n') == [{"ids": [1]}, {"ids": [2, 3]}]
    assert checks._objects(" \n") == []


@pytest.mark.parametrize("errors", [0, 2])
def test_the_report_of_aiperf_is_read(tmp_path: Path, errors: int) -> None:
    told: dict[str, Any] = {"request_count": {"avg": 22.0}}
    told |= {"error_request_count": {"avg": float(errors)}} if errors else {}
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(told))
    assert load.read_aiperf(tmp_path) == (22 + errors, errors)


def test_the_report_of_guidellm_is_read() -> None:
    totals = {"successful": 20, "errored": 1, "incomplete": 3, "total": 24}
    told = {"benchmarks": [{"metrics": {"request_totals": totals}}]}
    assert load.read_guidellm(told) == Found(21, 1, "4 streams")


def test_a_client_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ClientFailed, match="status 3: no such server"):
        output_of([sys.executable, "-c", "import sys; print('no such server', file=sys.stderr); sys.exit(3)"], tmp_path)


def test_a_server_that_is_not_there_fails_the_checks(tmp_path: Path) -> None:
    server = Server("http://127.0.0.1:9", "127.0.0.1:9", "model", tmp_path)
    with pytest.raises(ClientFailed, match="models: APIConnectionError"):
        checks.openai(PYTHON, server, tmp_path)


def test_a_client_without_a_report_is_a_failure() -> None:
    def nothing(python: Path, server: Server, folder: Path) -> Found:
        return load.read_guidellm({})

    found, why = run(_Installed("a", "openai", nothing), Server("", "", "", Path()), make_console())
    assert found is None
    assert "benchmarks" in why


class _Installed(Client):
    """A client that needs no environment of its own."""

    def python(self, say: Any) -> Path:
        return PYTHON


@pytest.mark.cluster
@pytest.mark.slow
def test_the_openai_package_runs_clean_against_a_cluster(tmp_path: Path) -> None:
    with ProcessCluster(tiny(served_model_name="model")) as cluster:
        server = Server(f"http://{cluster.http}", cluster.grpc, "model", resolve("tiny"))
        found = checks.openai(PYTHON, server, tmp_path)
        cluster.assert_empty()
    assert found.requests == 17
    assert found.failed == 0
