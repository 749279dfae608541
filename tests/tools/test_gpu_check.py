"""The check of a GPU machine, on one without: it ends in time, says why what did not run, and is rehearsed whole."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tools import gpu_check
from tools.gpu import kernels, ucx_log
from tools.gpu.row import Row, Setup, rotations

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, limit_s: float) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.gpu_check", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_part_says_why_it_did_not_run():
    done = run(limit_s=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("skipped") == done.stdout.count("torch sees no CUDA device") == len(gpu_check.PARTS)


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_spoils_no_other():
    parts = [
        gpu_check.Part("unheard-of", "machine", "run", (), 120),
        gpu_check.Part("machine", "machine", "run", ("surely_not_installed",), 120),
        gpu_check.Part("machine", "machine", "run", (), 120),
        gpu_check.Part("machine", "machine", "run", (), 0.01),
    ]
    shown: list[Row] = []
    assert not gpu_check.run_all(parts, Setup(rehearsed=True), shown.append)
    assert [row.ours for row in shown[:2]] == ["FAILED", "skipped"]
    assert shown[1].note == "not installed: surely_not_installed"
    assert [row.part for row in shown[2:4]] == ["machine", "machine"]
    assert shown[-1].ours == "FAILED"
    assert "not over" in shown[-1].note


def test_what_a_part_has_started_ends_with_it():
    """A lender that outlived its part would hold the GPU's memory while the next one is measured."""
    status, printed, _ = gpu_check.run_bounded(["sh", "-c", "sleep 300 & echo $!; wait"], dict(os.environ), 3.0)
    assert status is None
    assert is_over(int(printed)), "the grandchild lives"


def is_over(pid: int) -> bool:
    """Within a minute; nobody may be there to collect its exit status."""
    ends_s = time.monotonic() + 60
    while time.monotonic() < ends_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_all_parts_together_end_within_eight_minutes_and_the_last_alone_may_find_no_time_left():
    to_print_s = 15
    assert gpu_check.BUDGET_S + to_print_s <= 8 * 60
    assert sum(part.limit_s for part in gpu_check.PARTS[:-1]) <= gpu_check.BUDGET_S
    assert [part.name for part in gpu_check.PARTS[:2]] == ["machine", "nixl"]


def test_nixl_may_be_there_under_any_of_its_names():
    part = gpu_check.Part("nixl", "ipc", "run", ("surely_not_installed|json",), 1)
    assert gpu_check.reason_against(part, Setup(rehearsed=True)) == ""
    part = part._replace(needs=("surely_not|installed_anywhere",))
    assert gpu_check.reason_against(part, Setup(rehearsed=True)) == "not installed: surely_not or installed_anywhere"


def test_modules_brought_along_are_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/brought/along")
    environment = gpu_check.environment_of(Setup(rehearsed=False))
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/brought/along"]


def test_no_test_of_the_kernels_takes_the_memory_of_a_whole_gpu():
    """They run several at a time: an engine without `kv_cache_memory` measures the GPU and takes nine tenths of it."""
    found = 0
    for path in [*(ROOT / "tests/kernels").glob("*.py"), *(ROOT / "tools/gpu").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "EngineConfig":
                assert "kv_cache_memory" in [keyword.arg for keyword in node.keywords], f"{path.name}:{node.lineno}"
                found += 1
    assert found >= 4


def test_buffers_take_turns_until_no_cache_holds_them():
    assert rotations(1 << 20) == 256
    assert rotations(1 << 30) == 1


UCX = """
[1.0] [vm:1:0]  ucp_worker.c:1997 UCX  INFO    reader@1 intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)
[1.0] [vm:1:0]   | reader@1 intra-node cfg#1                                                                |
[1.0] [vm:1:0]   | remote memory read by ucp_get*(multi) into host memory from host                         |
[1.0] [vm:1:0]   | 0..inf | zero-copy | cma/memory |
[1.0] [vm:1:0]   | reader@1 intra-node cfg#1 | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/dev[0] |
[1.0] [vm:1:0]   |        0 | copy-out | tcp/lo |
[1.0] [vm:1:0]   |   1..inf | {how} | {by} |
[1.0] [vm:1:0]   | reader@1 intra-node cfg#1 | active message by ucp_am_send* from cuda/GPU0 |
[1.0] [vm:1:0]   |   0..inf | multi-frag copy-in | tcp/lo |
"""


@pytest.mark.parametrize(("by", "how"), [("cuda_ipc/cuda", "zero-copy"), ("tcp/lo", "software emulation")])
def test_the_transport_is_the_one_that_ucx_chose_for_long_reads_into_gpu_memory(by, how):
    assert ucx_log.way_in(UCX.format(by=by, how=how)) == f"{by}, {how}"


def test_a_transport_that_ucx_did_not_name_is_not_made_up(tmp_path):
    assert ucx_log.way_in("") == ""
    assert ucx_log.read_way(tmp_path) == ""


def test_failed_kernel_tests_are_named_one_by_one():
    counts, failures = kernels.verdicts([
        "tests/kernels/test_a.py::test_x[1] PASSED                       [ 10%]",
        "[gw3] [ 20%] PASSED tests/kernels/test_a.py::test_x[2] ",
        "[gw1] [ 30%] FAILED tests/kernels/test_a.py::test_y ",
        "FAILED tests/kernels/test_a.py::test_y - AssertionError: assert 1 < 0",
    ])  # fmt: skip
    assert counts == {"PASSED": 2, "FAILED": 1}
    assert failures == [("tests/kernels/test_a.py::test_y", "AssertionError: assert 1 < 0")]


@pytest.mark.slow
def test_kernel_tests_that_hang_have_said_how_far_they_came():
    command = ["sh", "-c", "echo tests/a.py::b PASSED; exec sleep 300"]
    lines, over = kernels.tested(command, 3.0, "1")
    assert not over
    assert kernels.verdicts(lines)[0] == {"PASSED": 1}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_handoff_that_moves_other_blocks_is_noticed(monkeypatch, capsys):
    """The tokens are compared with those of one process: here nothing is read, and the pool holds random numbers."""
    from tools.gpu import handoff, reader

    monkeypatch.setattr(handoff, "KV_DTYPES", ("auto",))
    monkeypatch.setattr(reader, "read_all", lambda *args: [0.0])
    with pytest.raises(SystemExit, match="other tokens after a handoff"):
        handoff.run(Setup(rehearsed=True))
    assert "8 of 8" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_part_runs_to_its_end_in_rehearsal():
    done = run("--rehearse", limit_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    assert "UCX did not say" not in done.stdout
