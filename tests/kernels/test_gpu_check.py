"""The check of a GPU machine, on one without: it ends, and says why nothing ran."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools import gpu_check
from tools.gpu.row import Row, Setup

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, limit_s: float) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.gpu_check", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_part_says_why_it_did_not_run():
    done = run(limit_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("skipped") == done.stdout.count("torch sees no CUDA device") == len(gpu_check.PARTS)


def test_a_part_that_fails_or_hangs_spoils_no_other(monkeypatch):
    parts = [
        gpu_check.Part("unheard-of", "machine", "run", (), 30),
        gpu_check.Part("machine", "machine", "run", ("surely_not_installed",), 30),
        gpu_check.Part("machine", "machine", "run", (), 60),
        gpu_check.Part("machine", "machine", "run", (), 0.01),
    ]
    shown: list[Row] = []
    assert not gpu_check.run_all(parts, Setup(rehearsed=True), shown.append)
    assert [row.ours for row in shown[:2]] == ["FAILED", "skipped"]
    assert shown[1].note == "not installed: surely_not_installed"
    assert [row.part for row in shown[2:4]] == ["machine", "machine"]
    assert shown[-1].ours == "FAILED"
    assert "not over" in shown[-1].note


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_part_runs_to_its_end_in_rehearsal():
    done = run("--rehearse", limit_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
