"""Two runs are told apart where they differ, and nowhere else; other workloads are not compared."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pdserve.cli import main
from pdserve.core.errors import ConfigError
from pdserve.rpc.v1 import common_pb2, inference_pb2
from pdserve_bench.layout import Slo
from pdserve_bench.report.compare import BETTER, NOT_COMPARED, UNKNOWN, WORSE, Interval, compare_runs, verdict
from pdserve_bench.report.files import Run, write_run
from pdserve_bench.report.meta import cluster_meta, collect_meta, commit, fingerprint, slos_of
from tests.bench.report.rows import plausible

NAN = float("nan")


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw less often than for users: the verdicts here are clear."""
    monkeypatch.setattr("pdserve_bench.report.compare.REPLICATES", 200)


def meta(workload: dict[str, Any], seed: int = 1) -> dict[str, Any]:
    when = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    slos = {"": Slo(), "chat": Slo(0.3, 0.05)}
    return collect_meta(workload=workload, configuration={"rate": 10}, seed=seed, slos=slos, started=when, ended=when)


def run(seed: int, slow: float = 1.0, workload: str = "w") -> Run:
    return Run(plausible(300, seed, slow), meta({"source": workload}, seed))


def slo_of(name: str) -> Slo:
    return Slo(0.3, 0.05)


def test_a_slower_run_is_worse_and_an_equal_one_is_not() -> None:
    of = {one.name: one for one in compare_runs(run(1), run(2, slow=1.5), slo_of).figures}
    assert of["TTFT p50"].verdict == of["TPOT mean"].verdict == of["ITL p99"].verdict == WORSE
    assert of["TTFT p50"].ratio is not None
    assert of["TTFT p50"].ratio.holds(1.5)
    back = {one.name: one for one in compare_runs(run(2, slow=1.5), run(1), slo_of).figures}
    assert back["TTFT p50"].verdict == BETTER
    equal = compare_runs(run(1), run(2), slo_of)
    assert equal.same_workload
    wrong = [one.name for one in equal.figures if one.verdict not in (UNKNOWN, NOT_COMPARED)]
    assert len(wrong) <= 2, wrong  # one in twenty by chance
    assert [name for name, _, _ in equal.differences] == ["seed"]


def test_a_run_equals_itself() -> None:
    assert {one.verdict for one in compare_runs(run(1), run(1), slo_of).figures} == {UNKNOWN}


@pytest.mark.parametrize("other", [run(1, workload="v"), Run(plausible(300, 1), {})])
def test_another_or_unknown_workload_gets_no_ratio(other: Run) -> None:
    compared = compare_runs(run(1), other, slo_of)
    assert not compared.same_workload
    assert {one.verdict for one in compared.figures} == {NOT_COMPARED}
    assert all(one.ratio is None for one in compared.figures)


@pytest.mark.parametrize(
    ("ratio", "difference", "more", "said"),
    [
        ((1.1, 1.2), (1, 2), True, BETTER),
        ((1.1, 1.2), (1, 2), False, WORSE),
        ((0.8, 0.9), (-2, -1), True, WORSE),
        ((0.9, 1.1), (-1, 1), True, UNKNOWN),
        ((1.0, 1.1), (0, 1), True, UNKNOWN),
        ((NAN, NAN), (1, 2), True, BETTER),
        ((NAN, NAN), (NAN, NAN), True, UNKNOWN),
    ],
)
def test_verdicts(ratio: tuple[float, float], difference: tuple[float, float], more: bool, said: str) -> None:
    assert verdict(Interval(1, *ratio), Interval(1, *difference), more) == said


def test_runs_without_any_answer_can_be_compared() -> None:
    empty = Run((), meta({"source": "w"}))
    assert compare_runs(empty, empty, slo_of).figures == ()
    assert {one.verdict for one in compare_runs(empty, run(1), slo_of).figures} == {NOT_COMPARED}


def test_the_command_prints_json_and_tables(tmp_path: Path) -> None:
    a, b, c = tmp_path / "a.json", tmp_path / "b.parquet", tmp_path / "c.json"
    for path, one in ((a, run(1)), (b, run(2, slow=1.5)), (c, run(1, workload="v"))):
        write_run(path, one)
    done = CliRunner().invoke(main, ["bench", "compare", str(a), str(b)])
    assert done.exit_code == 0, done.output
    assert "TTFT p99" in done.output
    assert "worse" in done.output
    done = CliRunner().invoke(main, ["bench", "compare", str(a), str(b), "--json"])
    figures = {one["name"]: one for one in json.loads(done.output)["figures"]}
    assert figures["TTFT p50"]["verdict"] == "worse"
    done = CliRunner().invoke(main, ["bench", "compare", str(a), str(c)])
    assert done.exit_code == 1
    assert "workload.source: A w, B v" in done.output
    assert "--workload" in done.output
    done = CliRunner().invoke(main, ["bench", "compare", str(a), str(tmp_path / "none.json")])
    assert done.exit_code == 2
    assert "none.json: cannot be read" in done.output


@pytest.mark.slow
def test_the_command_draws_for_light_and_dark_pages(tmp_path: Path) -> None:
    path, picture = tmp_path / "a.json", tmp_path / "p.png"
    write_run(path, run(1))
    done = CliRunner().invoke(main, ["bench", "compare", str(path), str(path), "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    assert picture.read_bytes() != (tmp_path / "p-dark.png").read_bytes()
    done = CliRunner().invoke(main, ["bench", "compare", str(path), str(path), "--plot", str(tmp_path / "p.xyz")])
    assert done.exit_code == 2
    assert "--plot cannot write" in done.output


def test_targets_come_back_from_the_meta() -> None:
    assert slos_of(meta({}))("chat") == Slo(0.3, 0.05)
    assert slos_of(meta({}))("other") == slos_of({})("chat") == Slo()
    with pytest.raises(ConfigError, match=r"meta\.slos"):
        slos_of({"slos": {"chat": 3}})


def test_a_fingerprint_depends_on_content_alone() -> None:
    assert fingerprint({"a": 1, "b": {"c": 2}}) == fingerprint({"b": {"c": 2}, "a": 1}) != fingerprint({"a": 1, "b": {"c": 3}})


def test_a_commit_is_told_of_a_checkout_alone(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    who = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
    (tmp_path / "package").mkdir()
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "-C", tmp_path, *who, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    first = commit(tmp_path)
    assert first is not None
    assert first["dirty"] is False
    assert len(first["id"]) == 40
    (tmp_path / "new").touch()
    assert commit(tmp_path) == {**first, "dirty": True}
    assert commit(tmp_path / "package") is None  # a package that lies in a checkout of something else


def test_a_cluster_is_described_by_its_layout_and_workers() -> None:
    state = inference_pb2.GetClusterStateResponse(block_size=16)
    for name, role in (("b", common_pb2.ROLE_DECODE), ("a", common_pb2.ROLE_PREFILL), ("c", common_pb2.ROLE_DECODE)):
        worker = state.workers.add()
        worker.hello.worker_id, worker.hello.role, worker.hello.max_num_batched_tokens = name, role, 512
    state.workers[0].load.max_num_batched_tokens = 128
    told = cluster_meta(state)
    assert told["layout"] == {"prefill": 1, "decode": 2}
    assert [(one["worker_id"], one["max_num_batched_tokens"]) for one in told["workers"]] == [
        ("a", 512),
        ("b", 128),
        ("c", 512),
    ]
    json.dumps(told)
