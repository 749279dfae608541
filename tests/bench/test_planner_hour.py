"""The comparison of a real day under the planner with the simulated one: its requests, its fit of costs, and its verdict."""

from __future__ import annotations

from collections import Counter
from io import StringIO
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench import planner_hour as hour
from bench.deaths.cluster import MARK
from bench.slow_cluster import Look, Watched
from bench.slow_worker import Step, read_steps
from pdserve.planner.observations import Observations, PoolObserved
from pdserve.rpc.v1 import common_pb2, inference_pb2, scaling_pb2
from sim.perf.costs import StepWork

LENGTH_S = 120.0


def look(at_s: float, prefill: int, decode: int) -> Look:
    return Look(Observations(at_s, 1.0, prefill=PoolObserved(prefill), decode=PoolObserved(decode)), prefill + decode)


def side(sizes: list[tuple[int, int]], attained: int = 97, of: int = 100) -> hour.Side:
    """Return a day with these sizes in equal parts, looked at every second."""
    answered = [hour.Answered(float(i), 0.1 if i < attained else 9.0, 0.01, True) for i in range(of)]
    looks = [look(float(at_s), *sizes[at_s * len(sizes) // int(LENGTH_S)]) for at_s in range(int(LENGTH_S))]
    return hour.Side(answered, looks, 0.0, [], 0)


def test_the_requests_of_a_day_are_the_same_for_the_same_seed_and_fit_the_model() -> None:
    day = hour.day_of(2.0)
    requests = hour.requests_of(day, 7.0, seed=3)
    assert requests == hour.requests_of(day, 7.0, seed=3) != hour.requests_of(day, 7.0, seed=4)
    assert all(early.arrived_s <= late.arrived_s < day.length_s for early, late in pairwise(requests))
    for one in requests:
        assert one.prompt_tokens == len(one.prompt_ids)
        assert one.prompt_tokens + one.output_tokens <= 2048
        assert {*one.prompt_ids} <= {*range(hour.FIRST_ID, hour.LAST_ID + 1)}


def test_about_half_of_the_prompts_begin_with_whole_blocks_of_others() -> None:
    requests = hour.requests_of(hour.day_of(5.0), 7.0, seed=0)
    keys = [one.prefix_keys(hour.BLOCK_SIZE, b"model") for one in requests]
    last = hour.PREFIX_BLOCKS - 1
    shared = [count for count in Counter(one[last] for one in keys if len(one) > last).values() if count > 1]
    assert len(shared) == hour.PREFIXES
    assert 0.4 < sum(shared) / len(requests) < 0.6


@given(
    base_s=st.floats(0.001, 0.1),
    each_s=st.floats(1e-5, 0.01),
    sizes=st.lists(st.integers(1, 256), min_size=2, max_size=40).filter(lambda sizes: len({*sizes}) > 1),
)
def test_the_fit_finds_the_costs_that_made_the_steps(base_s: float, each_s: float, sizes: list[int]) -> None:
    prompts: list[Step] = [(StepWork(prompt_tokens=size), base_s + each_s * size) for size in sizes]
    decodes: list[Step] = [(StepWork(decodes=size), 2 * base_s + 3 * each_s * size) for size in sizes]
    mixed: list[Step] = [(StepWork(prompt_tokens=9, decodes=3), 77.0)]
    costs = hour.fit([*prompts, *mixed, *decodes], hour.COSTS)
    assert costs.prompt_base_s == pytest.approx(base_s, rel=1e-4, abs=1e-6)
    assert costs.prompt_token_s == pytest.approx(each_s, rel=1e-4, abs=1e-8)
    assert costs.decode_base_s == pytest.approx(2 * base_s, rel=1e-4, abs=1e-6)
    assert costs.decode_s == pytest.approx(3 * each_s, rel=1e-4, abs=1e-8)
    assert hour.off([*prompts, *mixed, *decodes], costs, 0.1) == pytest.approx(1 / (2 * len(sizes) + 1))


def test_steps_of_one_size_alone_say_nothing_about_costs() -> None:
    assert hour.fit([(StepWork(decodes=4), 0.5)] * 9, hour.COSTS) == hour.COSTS


def test_a_step_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "steps-1").write_text("16 136 0 0 0.5\n0 0 2 40 0.25\n3 6 0")
    assert read_steps(tmp_path) == [(StepWork(16, 136), 0.5), (StepWork(0, 0, 2, 40), 0.25)]


def test_sizes_are_means_and_maxima_of_each_part() -> None:
    found = hour.parts_of([look(0.0, 1, 2), look(9.0, 3, 2), look(10.0, 4, 4), look(30.0, 9, 9)], 30.0, parts=3)
    assert found == [hour.Part((2.0, 2.0), (3, 2)), hour.Part((4.0, 4.0), (4, 4)), None]


def test_a_day_is_near_itself_and_each_thing_that_is_not_near_is_named() -> None:
    even = side([(1, 1), (3, 2)])
    assert hour.failures_of(even, even, LENGTH_S) == []
    assert hour.failures_of(even, side([(2, 1), (3, 3)], attained=92), LENGTH_S) == []
    (low,) = hour.failures_of(side([(1, 1), (3, 2)], attained=91), even, LENGTH_S)
    assert "-6.0 percentage points" in low
    said = hour.failures_of(side([(1, 1), (3, 4)]), even, LENGTH_S)
    assert len(said) == hour.PARTS // 2
    assert all("4.0 decode workers, simulated 2.0" in one for one in said)
    *_, last = hour.verdict(side([(1, 1), (3, 4)]), even, LENGTH_S)
    assert last.startswith("NOT within")


def test_a_request_that_failed_or_was_late_did_not_attain() -> None:
    assert hour.Answered(0.0, hour.TTFT_S, hour.TPOT_S, True).attained
    assert not hour.Answered(0.0, 0.1, 0.01, True, "overloaded").attained
    assert not hour.Answered(0.0, hour.TTFT_S + 0.1, 0.01, True).attained
    assert not hour.Answered(0.0, 0.1, hour.TPOT_S + 0.01, True).attained


def state(linked: dict[str, tuple[int, bool]], others: dict[str, str]) -> inference_pb2.GetClusterStateResponse:
    """Return a state with linked workers, as flips and readiness, and the phases of other members."""
    roles = {"p": common_pb2.ROLE_PREFILL, "d": common_pb2.ROLE_DECODE}
    workers = [
        inference_pb2.WorkerState(hello=common_pb2.WorkerHello(worker_id=name, role=roles[name[0]], flips=flips), ready=ready)
        for name, (flips, ready) in linked.items()
    ]
    members = [scaling_pb2.ScalingMember(worker_id=name, phase=phase) for name, phase in others.items()]
    scaling = scaling_pb2.ScalingState(report=scaling_pb2.ScalingReport(members=members))
    return inference_pb2.GetClusterStateResponse(workers=workers, scaling=scaling)


def test_starts_are_timed_changes_of_a_role_counted_and_all_processes_are_paid_for() -> None:
    watched = Watched()
    watched.note(state({"p-0": (0, True), "d-0": (0, True)}, {}), 0.0)
    watched.note(state({"p-0": (0, True), "d-0": (0, True)}, {"d-1": "starting"}), 10.0)
    watched.note(state({"p-0": (0, True), "d-0": (0, True), "d-1": (0, False)}, {"d-1": "joining"}), 14.0)
    watched.note(state({"p-0": (0, True), "d-0": (0, True), "d-1": (0, True)}, {}), 15.0)
    watched.note(state({"p-0": (0, True), "d-0": (0, True)}, {"d-1": "changing its role"}), 16.0)
    watched.note(state({"p-0": (0, True), "d-0": (0, True), "d-1": (1, True)}, {}), 18.0)
    watched.note(state({"p-0": (0, True), "d-0": (0, True)}, {"d-1": "draining"}), 19.0)
    assert watched.starts_s == [6.0]  # the order came a second before the report of it
    assert watched.flips == 1
    assert [one.members for one in watched.looks] == [2, 3, 3, 3, 3, 3, 3]
    assert [(one.prefill, one.decode) for one in watched.looks] == [(1, 1), (1, 1), (1, 1), (1, 2), (1, 1), (1, 2), (1, 1)]
    assert watched.worker_s == 2 * 10.0 + 3 * 9.0


@pytest.mark.slow
@pytest.mark.ray
def test_a_day_of_half_a_minute_runs_on_both_sides_and_leaves_nothing(tmp_path: Path) -> None:
    """It asserts none of the figures: half a minute is too short for them."""
    drawn, found = tmp_path / "hour.png", tmp_path / "hour.json"
    args = hour.parser_of().parse_args(["--minutes", "0.5", "--interval", "1", "--json", str(found), "--plot", str(drawn)])
    console = Console(width=140, file=StringIO())
    with console.capture() as printed:
        hour.run(args, console)
    assert "simulated" in printed.get()
    assert drawn.exists()
    assert found.exists()
    assert [one.pid for one in psutil.process_iter() if MARK in _environment(one)] == []


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
