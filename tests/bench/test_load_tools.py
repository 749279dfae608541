"""The agreement of load generators: what a tool reports beside what the server saw in the same turn, and how tools are run."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress

import msgspec
import psutil
import pytest

from bench.service.load_tools import Measured, Tool, Turn, TurnFailed, read_aiperf, read_vllm
from bench.service.server_side import (
    TOLERANCE,
    Counters,
    CpuTime,
    Observed,
    Seen,
    compared,
    compared_table,
    cores_table,
    cpu_time,
    seen,
    totals,
)
from pdserve.core.report import Report, RequestRecord
from pdserve.core.sampling import Placement
from pdserve.observe.metrics import Metrics
from pdserve.observe.snapshot import ClusterSnapshot

REPORT = Report(
    request_id="r", placement=Placement.DISAGGREGATED, placement_reason="default", prefill_worker="p",
    decode_worker="d", prompt_tokens=256, output_tokens=64, queue_s=0.0, ttft_s=0.5, tpot_s=0.01, total_s=1.13, kv_bytes=0,
    transfer_s=0.0, exposed_transfer_s=0.0, attempts=1, binds=1,
)  # fmt: skip
RECORD = RequestRecord(REPORT, "length")
SLOW = RequestRecord(msgspec.structs.replace(REPORT, ttft_s=1.5, tpot_s=0.03, total_s=3.39), "length")
IDLE = CpuTime(1.0, 0.25)


def page(*records: RequestRecord) -> str:
    """Return the router's own page of metrics after these requests."""
    metrics = Metrics(lambda: ClusterSnapshot(1, 0, 0, ()))
    for one in records:
        metrics.finished(one)
    return metrics.render().decode()


def counted(*records: RequestRecord, cpu: CpuTime = IDLE) -> Counters:
    return Counters(totals(page(*records)), {"decode-0": cpu})


def observed(tool: float, server: float, cpu: CpuTime = IDLE) -> Observed:
    """Return a turn in which all times are such multiples of 10 ms by the tool and by the server."""
    times = [0.01 * tool] * 2
    return Observed(
        Measured(times, times, times, 1.0, 1.0), Seen(dict.fromkeys(("TTFT", "TPOT", "E2E"), 0.01 * server), {"d": cpu})
    )


def test_the_server_s_means_are_those_of_the_turn_and_not_of_what_came_before():
    found = seen(counted(RECORD, RECORD), counted(RECORD, RECORD, SLOW, RECORD, cpu=CpuTime(4.0, 1.0)), requests=2)
    assert found.means_s == pytest.approx({"TTFT": 1.0, "TPOT": 0.02, "E2E": 2.26})
    assert found.cpu == {"decode-0": CpuTime(3.0, 0.75)}


@pytest.mark.parametrize("ended", [0, 1, 3])
def test_a_turn_fails_when_the_server_answered_other_requests_than_the_tool_s(ended):
    with pytest.raises(TurnFailed, match=f"counted TTFT of {ended} requests and not of 2"):
        seen(counted(SLOW), counted(SLOW, *[RECORD] * ended), requests=2)


def test_a_request_of_one_token_has_no_tpot_and_fails_the_turn():
    """The means would be of different requests otherwise."""
    cut = RequestRecord(msgspec.structs.replace(REPORT, output_tokens=1), "length")
    with pytest.raises(TurnFailed, match="counted TPOT of 1 requests and not of 2"):
        seen(counted(), counted(RECORD, cut), requests=2)


def test_a_page_without_a_histogram_is_refused():
    with pytest.raises(KeyError):
        totals("\n".join(line for line in page(RECORD).splitlines() if "time_per_output_token" not in line))


def test_two_tools_agree_with_a_server_that_is_slower_in_the_turns_of_one():
    fast = [observed(1.01 * at, at) for at in (1.0, 1.1, 0.9)]
    slow = [observed(1.01 * at, at) for at in (1.5, 1.4, 1.6)]
    for turns, server_s in ((fast, 0.01), (slow, 0.015)):
        for line in compared(turns):
            assert line.agrees
            assert line.server_s == pytest.approx(server_s)
            assert line.ratio.median == pytest.approx(1.01)


@pytest.mark.parametrize("wrong", [1 + 2 * TOLERANCE, 1 - 2 * TOLERANCE])
def test_a_tool_that_differs_from_its_server_in_one_round_of_three_does_not_agree(wrong):
    assert all(line.agrees for line in compared([observed(1.0, 1.0)] * 3))
    assert not any(line.agrees for line in compared([observed(1.0, 1.0), observed(wrong, 1.0), observed(1.0, 1.0)]))


def test_the_tables_have_a_line_for_each_tool_and_compare_with_the_first():
    ours = [observed(1.0, 1.0, CpuTime(2.0, 0.0))] * 3
    theirs = [observed(1.2, 1.0, CpuTime(2.0, 1.0))] * 3
    made = compared_table(("ours", "theirs"), (ours, theirs))
    assert list(made.columns[-1].cells) == ["yes", "NO"] * 3
    assert list(made.columns[4].cells)[:2] == ["1.000 (1.000 to 1.000)", "1.200 (1.200 to 1.200)"]
    made = cores_table(("ours", "theirs"), (ours, theirs))
    assert [list(column.cells) for column in made.columns] == [
        ["d", ""], ["ours", "theirs"], ["2.00", "2.00"], ["0.00", "1.00"], ["", "1.50 (1.50 to 1.50)"]
    ]  # fmt: skip


def test_the_cpu_time_of_a_process_is_what_its_threads_ran():
    before = cpu_time(os.getpid())
    began_s = time.process_time()
    while time.process_time() < began_s + 0.05:
        pass
    after = cpu_time(os.getpid())
    assert after.run_s > before.run_s > 0
    assert after.wait_s >= before.wait_s


def test_vllm_s_gaps_add_up_to_its_times(tmp_path):
    told = {
        "ttfts": [0.5, 0.25], "itls": [[0.02, 0.01], [0.04]], "output_lens": [3, 2], "failed": 0, "request_throughput": 2,
        "output_throughput": 5,
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(told))
    assert read_vllm(tmp_path).means_s == pytest.approx({"TTFT": 0.375, "TPOT": 0.0275, "E2E": 0.41})


def test_aiperf_s_times_are_read_in_the_unit_that_each_has(tmp_path):
    times = {"time_to_first_token": (500, "ms"), "inter_token_latency": (20_000, "us"), "request_latency": (1.76, "s")}
    record = {"metrics": {name: {"value": value, "unit": unit} for name, (value, unit) in times.items()}}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "profile_export.jsonl").write_text(f"{json.dumps(record)}\n" * 2)
    rates = {"request_throughput": {"avg": 2.0}, "output_token_throughput": {"avg": 128.0}}
    (tmp_path / "out" / "profile_export_aiperf.json").write_text(json.dumps(rates))
    assert read_aiperf(tmp_path).means_s == pytest.approx({"TTFT": 0.5, "TPOT": 0.02, "E2E": 1.76})


@pytest.mark.parametrize("own", [True, False])
def test_a_tool_runs_in_the_session_that_it_is_given_and_nothing_of_it_outlives_its_turn(tmp_path, own):
    """A process that a tool leaves behind would take cores from the server in the next tool's turn."""
    code = (
        "import os, subprocess\n"
        "null = subprocess.DEVNULL\nchild = subprocess.Popen(['sleep', '600'], stdout=null, stderr=null)\n"
        "print(os.getpid(), os.getsid(0), os.getsid(child.pid), child.pid, file=open('said', 'w'))"
    )
    said = []

    def read(folder):
        said.extend(map(int, (folder / "said").read_text().split()))
        return Measured([0.1], [0.1], [0.1], 1.0, 1.0)

    turn = Turn("http://nowhere", "model", tmp_path, 1, 2, 1, 1, 0)
    Tool("a tool", lambda turn, folder: [sys.executable, "-c", code], read, own_session=own).measure(turn, tmp_path)
    pid, *sessions, child = said
    assert sessions == [pid if own else os.getsid(0)] * 2
    wait_gone(child)


def test_a_tool_that_fails_ends_the_turn_with_its_last_words(tmp_path):
    tool = Tool("a tool", lambda turn, folder: [sys.executable, "-c", "raise SystemExit('no such model')"], read_vllm)
    with pytest.raises(TurnFailed, match="a tool ended with status 1: no such model"):
        tool.measure(Turn("http://nowhere", "model", tmp_path, 1, 2, 1, 1, 0), tmp_path)


def wait_gone(pid: int, limit_s: float = 30.0) -> None:
    """Wait until a process has ended. Raises TimeoutError."""
    with suppress(psutil.NoSuchProcess):
        end_s, process = time.monotonic() + limit_s, psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > end_s:
                raise TimeoutError(f"process {pid} still runs")
            time.sleep(0.01)
