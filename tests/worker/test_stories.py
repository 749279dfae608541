"""A worker tells its part of a request by ages, and keeps the latest requests within bounds."""

from __future__ import annotations

from pdserve.rpc.v1 import story_pb2
from pdserve.worker.host import MAX_STORIES, WorkKind, WorkStories


def ask(kept: WorkStories, request_id: str) -> story_pb2.WorkExplained:
    return kept.answer(story_pb2.ExplainWork(question=7, request_id=request_id)).work_explained


def test_an_answer_repeats_the_question_and_tells_ages() -> None:
    now_s = [100.0]
    kept = WorkStories(lambda: now_s[0])
    kept.note("a", WorkKind.RECEIVED, tokens=3)
    now_s[0] = 101.5
    kept.note("a", WorkKind.FAILED, error="lease_gone", message="m" * 1000)
    kept.note("b", WorkKind.RECEIVED)
    now_s[0] = 102.0
    told = ask(kept, "a")
    assert (told.question, told.left_out) == (7, 0)
    assert [(entry.at_s, entry.kind) for entry in told.entries] == [(-2.0, "received"), (-0.5, "failed")]
    assert [(field.name, field.value) for field in told.entries[0].fields] == [("tokens", "3")]
    assert len(told.entries[1].fields[1].value) < 250


def test_an_unknown_request_has_no_entries() -> None:
    told = ask(WorkStories(lambda: 0.0), "nobody")
    assert (told.question, len(told.entries)) == (7, 0)


def test_old_requests_leave_and_a_long_one_keeps_its_ends() -> None:
    kept = WorkStories(lambda: 1.0)
    for number in range(MAX_STORIES + 1):
        kept.note(f"r{number}", WorkKind.RECEIVED)
    assert not ask(kept, "r0").entries
    assert ask(kept, "r1").entries
    for tokens in range(1000):
        kept.note("long", WorkKind.COMPUTED, tokens=tokens)
    told = ask(kept, "long")
    assert len(told.entries) + told.left_out == 1000
    assert [told.entries[i].fields[0].value for i in (0, -1)] == ["0", "999"]
    kept._ring.check_invariants()
