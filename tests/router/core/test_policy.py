"""Placement policies as functions of a snapshot."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pdserve.core.errors import Unavailable
from pdserve.core.sampling import Placement
from router.core.events import LinkId
from router.core.ledger import OutputMean
from router.core.policy import filters, most_free_kv, shortest_queue
from router.core.policy.candidate import Candidate, RequestView
from router.core.policy.decider import Reason, decide
from router.core.policy.picker import pick
from router.core.policy.ranking import ranking_of

BASE = Candidate(LinkId(1), 100, 0, 4, 0, 64, suspect=False, refused=False)

candidates = st.builds(
    Candidate,
    link=st.integers(1, 9).map(LinkId),
    kv_tokens=st.integers(1, 10_000),
    promised_tokens=st.integers(0, 20_000),
    free_slots=st.integers(-1, 4),
    queued_tokens=st.integers(0, 1 << 40),
    max_model_len=st.integers(1, 4096),
    suspect=st.booleans(),
    refused=st.booleans(),
)


@pytest.mark.parametrize(
    ("asked", "configured", "tokens", "has_prefill", "expected"),
    [
        (None, Placement.AUTO, 50, True, (Placement.DISAGGREGATED, Reason.DEFAULT)),
        (None, Placement.AUTO, 5, True, (Placement.COLOCATED, Reason.SHORT_PROMPT)),
        (None, Placement.AUTO, 50, False, (Placement.COLOCATED, Reason.PREFILL_POOL_EMPTY)),
        (None, Placement.COLOCATED, 50, True, (Placement.COLOCATED, Reason.CONFIGURED)),
        (None, Placement.DISAGGREGATED, 5, True, (Placement.DISAGGREGATED, Reason.CONFIGURED)),
        (Placement.DISAGGREGATED, Placement.COLOCATED, 5, True, (Placement.DISAGGREGATED, Reason.REQUESTED)),
        (Placement.COLOCATED, Placement.DISAGGREGATED, 50, True, (Placement.COLOCATED, Reason.REQUESTED)),
        (Placement.AUTO, Placement.COLOCATED, 50, True, (Placement.DISAGGREGATED, Reason.DEFAULT)),
    ],
)
def test_decide(asked: Placement | None, configured: Placement, tokens: int, has_prefill: bool, expected: object) -> None:
    given_ = {"prompt_tokens": tokens, "colocate_below_tokens": 10, "has_prefill": has_prefill}
    assert decide(asked, configured, **given_) == expected


def test_forced_disaggregation_without_a_prefill_pool_is_unavailable() -> None:
    for asked, configured in ((Placement.DISAGGREGATED, Placement.AUTO), (None, Placement.DISAGGREGATED)):
        with pytest.raises(Unavailable):
            decide(asked, configured, prompt_tokens=1, colocate_below_tokens=0, has_prefill=False)


def test_filters_keep_those_that_may_serve() -> None:
    change = Candidate._replace
    assert filters.alive([BASE, change(BASE, suspect=True)]) == [BASE]
    assert filters.long_enough([BASE, change(BASE, max_model_len=10)], 20) == [BASE]
    full = [change(BASE, refused=True), change(BASE, free_slots=0), change(BASE, promised_tokens=90)]
    assert filters.with_room([BASE, *full], 20) == [BASE]
    assert filters.with_room([BASE], 500) == [BASE]  # empty: it is the worker that knows


@given(st.lists(candidates), st.integers(0, 10_000), st.integers(0, 100))
def test_scores_are_within_0_and_1_and_the_best_is_picked(pool: list[Candidate], need: int, turn: int) -> None:
    for policy in (most_free_kv.score, shortest_queue.score):
        request = RequestView(need, need)
        scores = ranking_of(policy)(pool, request)
        assert all(0 <= score <= 1 for score in scores)
        picked = pick(pool, scores, turn)
        assert (picked is None) == (not pool)
        assert picked is None or policy(picked, request) == max(scores)


def test_equals_take_turns() -> None:
    pool = [BASE._replace(link=LinkId(n)) for n in range(3)]
    links = [picked.link for turn in range(6) if (picked := pick(pool, [0.5] * 3, turn))]
    assert links == [0, 1, 2, 0, 1, 2]


def test_the_output_mean_follows_what_it_sees_and_never_exceeds_max_tokens() -> None:
    mean = OutputMean()
    assert mean.expect(10) == 10
    for _ in range(400):
        mean.saw(40)
    assert mean.expect(1000) == 40
    assert mean.expect(1) == 1
