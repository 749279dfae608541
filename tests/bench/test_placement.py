"""The arguments of `bench.placement`: a wrong one is refused at once, in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import placement


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the last line that the benchmark writes when it refuses its arguments."""
    monkeypatch.setattr(sys, "argv", ["placement.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        placement.main()
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_trace_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no/such.jsonl" in refused(monkeypatch, capsys, "--trace", "no/such.jsonl")


def test_an_unknown_policy_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("")
    assert "'nonsense'" in refused(monkeypatch, capsys, "--trace", str(trace), "--policies", "random,nonsense")
