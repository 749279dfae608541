"""A soak that cannot fail shows nothing: each thing it looks for is found when it is there."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from bench.soak.leaks import COMPLAINTS, Growth, _Seen, block_leaks, complaints
from bench.soak.load import HANGS_AFTER_S, Case, Clients, Tally, random_cases
from bench.soak.report import Report, ended
from pdserve.rpc.v1 import common_pb2, inference_pb2
from testkit.client import Answer, request
from testkit.faults import Restart
from testkit.footprint import Footprint
from testkit.load import Outcome
from testkit.processes import FRESH_S, ProcessCluster

RIGHT = (5, 6, 7)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
LATE = grpc.StatusCode.DEADLINE_EXCEEDED


def judge(outcome: Outcome, *, took_s: float = 1.0, number: int = 0, **fields: Any) -> tuple[bool, Tally]:
    """Whether the client tries again, and what was counted."""
    message = request([1], max_tokens=3)
    message.MergeFrom(inference_pb2.GenerateRequest(**fields))
    clients = Clients("nowhere:0", [], count=0, seed=0)
    return clients._judge(Case(message, RIGHT), outcome, number, took_s), clients.tally


def success(ids: tuple[int, ...], **report: int) -> Outcome:
    return Outcome(Answer(ids=list(ids), report=inference_pb2.RequestReport(**report)), done=True)


def failure(status: grpc.StatusCode, reason: str, ids: tuple[int, ...] = ()) -> Outcome:
    return Outcome(Answer(ids=list(ids)), done=True, status=status, reason=reason)


@pytest.mark.parametrize(
    ("outcome", "fields"),
    [
        (success((5, 6, 8)), {}),  # a wrong token
        (success((5, 6)), {}),  # a lost one at the end
        (success((5, 6, 7, 7)), {}),  # one too many
        (failure(UNAVAILABLE, "replica_lost", (5, 7)), {}),  # wrong before its failure
        (Outcome(Answer(ids=[6])), {}),  # wrong before its client left
        (failure(grpc.StatusCode.INTERNAL, "internal_bug"), {}),
        (failure(grpc.StatusCode.UNKNOWN, ""), {}),  # no reason that a client can act on
        (failure(LATE, "deadline_exceeded"), {}),  # nobody had asked for a deadline
    ],
)
def test_what_must_not_be_is_a_violation_and_not_tried_again(outcome: Outcome, fields: dict[str, Any]) -> None:
    again, tally = judge(outcome, **fields)
    assert (again, tally.num_violations, tally.ok) == (False, 1, 0)


def test_a_hang_is_a_violation_even_if_it_ends_with_a_retryable_error() -> None:
    again, tally = judge(failure(UNAVAILABLE, "replica_lost"), took_s=HANGS_AFTER_S + 1)
    assert (again, tally.num_violations) == (False, 1)


@pytest.mark.parametrize("reason", ["replica_lost", "unavailable", "overloaded", ""])
def test_a_retryable_error_is_tried_again_and_counted(reason: str) -> None:
    again, tally = judge(failure(UNAVAILABLE, reason, RIGHT[:1]))
    assert again
    assert (tally.num_violations, tally.failures) == (0, Counter({reason or "connection": 1}))


def test_a_deadline_that_was_asked_for_may_pass() -> None:
    again, tally = judge(failure(LATE, "deadline_exceeded", RIGHT[:2]), deadline_s=0.1)
    assert (again, tally.late, tally.num_violations) == (False, 1, 0)


@pytest.mark.parametrize(
    ("outcome", "number", "recovered", "tried_again"),
    [
        (success(RIGHT, attempts=1, binds=1), 0, 0, 0),
        (success(RIGHT, attempts=2, binds=2), 0, 1, 0),
        (success(RIGHT, attempts=1, binds=2), 1, 1, 1),
    ],
)
def test_successes_are_counted_by_what_they_took(outcome: Outcome, number: int, recovered: int, tried_again: int) -> None:
    _, tally = judge(outcome, number=number)
    assert (tally.ok, tally.recovered, tally.tried_again, tally.num_violations) == (1, recovered, tried_again, 0)


def spoil_tally(report: Report) -> None:
    report.tally.violated("a wrong token")


def spoil_leaks(report: Report) -> None:
    report.leaks.append("decode-0 holds a block")


def spoil_soak(report: Report) -> None:
    report.broken.append("not healed")


def serve_nothing(report: Report) -> None:
    report.tally.ok = 0


@pytest.mark.parametrize("spoil", [spoil_tally, spoil_leaks, spoil_soak, serve_nothing])
def test_one_thing_wrong_fails_the_whole_soak(spoil: Callable[[Report], None]) -> None:
    report = Report(0.5, 1, Tally(ok=3), Counter(), [])
    assert report.passed
    spoil(report)
    assert not report.passed


def test_a_member_that_died_of_itself_is_told_from_one_that_was_killed() -> None:
    assert ended(Restart("prefill-0", -6)) == "died of itself (signal 6)"
    assert ended(Restart("prefill-0", -9)) == "killed (signal 9)"
    assert ended(Restart("prefill-0", 0)) == "exit 0"


def test_the_same_seed_asks_the_same() -> None:
    first, again, other = (random_cases(random.Random(seed), 5) for seed in (1, 1, 2))
    assert first == again != other
    assert all(message.placement == common_pb2.PLACEMENT_COLOCATED for message in first)


class StandIn(ProcessCluster):
    """A cluster without processes that says of itself what a test wants."""

    def __init__(self, said: inference_pb2.GetClusterStateResponse) -> None:
        self.processes = {}
        self.said = said

    def state(self, timeout_s: float = 0.0) -> inference_pb2.GetClusterStateResponse:
        return self.said


@pytest.mark.parametrize(
    "worker",
    [
        {"blocks": {"total": 4, "free": 3, "held": 1}},
        {"blocks": {"total": 4, "free": 3, "quarantined": 1}},
        {"blocks": {"total": 4, "free": 3, "unaccounted": 1}},
        {"blocks": {"total": 4, "free": 4}, "leases_held": 1},
        {"blocks": {"total": 4, "free": 4}, "running_sequences": 1},
    ],
)
def test_whatever_a_worker_holds_at_the_end_is_a_leak(worker: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.soak.leaks.EMPTY_TIMEOUT_S", 0.0)
    held = inference_pb2.WorkerState(hello={"worker_id": "decode-0"}, load=worker)
    (leak,) = block_leaks(StandIn(inference_pb2.GetClusterStateResponse(workers=[held])))
    assert "decode-0" in leak


def test_growth_of_memory_descriptors_or_threads_is_found_also_in_a_process_that_has_ended() -> None:
    settled = Footprint(100 << 20, 30, 14)
    growth = Growth(StandIn(inference_pb2.GetClusterStateResponse()))
    for grown, found in (
        (settled, 0),
        (Footprint(200 << 20, 30, 14), 1),
        (Footprint(100 << 20, 60, 14), 1),
        (Footprint(100 << 20, 30, 40), 1),
    ):
        growth._seen[("decode-0", 7)] = _Seen("decode-0", 0.0, settled, grown, 60.0)
        assert len(growth.found()) == found
        assert growth.rows() == [("decode-0, 60 s old", settled, grown)]


@pytest.mark.parametrize("words", COMPLAINTS)
def test_a_lost_task_and_a_bug_of_ours_are_found_in_the_logs(words: str, tmp_path: Path) -> None:
    (tmp_path / "router.log").write_text("INFO all is well\n")
    assert not complaints(tmp_path)
    (tmp_path / "decode-0.log").write_text(f"INFO all is well\nERROR asyncio: {words}\nERROR asyncio: {words}\n")
    (found,) = complaints(tmp_path)
    assert found.startswith("decode-0 said 2 times")


def test_a_worker_that_is_silent_or_of_another_process_does_not_make_a_cluster_whole() -> None:
    class Whole(StandIn):
        prefill, decode = 0, 1

    class Popen:
        pid = 7

    class Process:
        popen = Popen

    cluster = Whole(inference_pb2.GetClusterStateResponse())
    cluster.processes = {"decode-0": Process}  # type: ignore[dict-item]
    for (pid, fields), whole in (
        ((7, {"ready": True}), True),
        ((8, {"ready": True}), False),
        ((7, {"ready": False}), False),
        ((7, {"ready": True, "heartbeat_age_s": FRESH_S + 1}), False),
    ):
        worker = inference_pb2.WorkerState(hello={"worker_id": "decode-0", "pid": pid}, **fields)
        assert cluster.is_whole(inference_pb2.GetClusterStateResponse(workers=[worker])) is whole
    assert not cluster.is_whole(inference_pb2.GetClusterStateResponse())
