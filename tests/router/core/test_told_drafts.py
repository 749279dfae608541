"""The drafts of a request are those of all attempts that told them, once each."""

from __future__ import annotations

from pdserve.core.sampling import Placement
from pdserve.core.speculation import DraftCounts
from pdserve.core.worker import Role

from ..core_peers import Outcome, Stage

FIRST = DraftCounts(2, 6, 3, (2, 1))
SECOND = DraftCounts(1, 4, 4, (1, 1, 1, 1))


def drafts_of(outcome: Outcome) -> DraftCounts | None:
    assert outcome.ended == ["done"]
    assert outcome.report is not None
    return outcome.report.speculation


def test_a_request_that_nobody_drafted_for_has_no_drafts() -> None:
    stage = Stage()
    stage.join("decode-0", Role.DECODE)
    outcome = stage.submit("r")
    stage.run()
    assert drafts_of(outcome) is None
    stage.assert_empty()


def test_a_replay_adds_to_what_an_attempt_told_before_its_tokens_could_go_out() -> None:
    """(1) Decode has the KV and draws all tokens, while the first token of prefill is on its way. (2) Prefill is lost with that
    token, so nothing has gone out. (3) The next attempt drafts again: both have cost what they drafted."""
    stage = Stage()
    decode = stage.join("decode-0", Role.DECODE)
    lender = stage.join("prefill-0", Role.PREFILL)
    decode.drafts = FIRST
    outcome = stage.submit("r", placement=Placement.DISAGGREGATED)
    stage.deliver(decode)  # it has reserved
    stage.deliver(lender)  # the lease is granted, and decode reads it
    lender.progress()
    for _ in range(3):
        decode.progress()
        stage.deliver(decode, len(decode.upward))
    assert (outcome.emitted, decode.jobs) == ([], {})
    stage.leave(lender)
    assert not outcome.ended

    decode.drafts = SECOND
    stage.join("prefill-1", Role.PREFILL)
    stage.run()
    assert outcome.report is not None
    assert outcome.report.attempts == 2
    assert drafts_of(outcome) == FIRST.plus(SECOND)
    stage.assert_empty()


def test_an_attempt_that_was_cut_off_has_told_nothing() -> None:
    stage = Stage()
    first = stage.join("decode-0", Role.DECODE)
    first.drafts = FIRST
    outcome = stage.submit("r", max_tokens=5, placement=Placement.COLOCATED)
    stage.deliver(first)
    for _ in range(3):
        first.progress()
        stage.deliver(first)
    assert outcome.emitted == [0, 1, 2]
    stage.leave(first)
    stage.join("decode-1", Role.DECODE).drafts = SECOND
    stage.run()
    assert outcome.emitted == [0, 1, 2, 3, 4]
    assert drafts_of(outcome) == SECOND
    (ended,) = [entry for entry in stage.core.requests.stories.get("r").entries if entry.kind == "ended"]
    told = dict(ended.fields)
    assert (told["draft_tokens"], told["accepted_tokens"], told["acceptance_length"]) == (4, 4, 5.0)
    stage.assert_empty()
