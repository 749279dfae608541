"""Placement policies as functions of a snapshot."""

from __future__ import annotations

import math
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pdserve.core.errors import Unavailable
from pdserve.core.sampling import Placement
from pdserve.core.worker import Role
from router.core.events import LinkId
from router.core.live_request import Reason
from router.core.placer import decide
from router.core.policy import (
    EVERYONE,
    Candidate,
    RequestView,
    Shortlist,
    Why,
    draw,
    goodput,
    least_loaded,
    pick,
    power_of_two,
    prefix_aware,
    random,
    ranking_of,
    round_robin,
    why,
)

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
    running=st.integers(0, 9),
    picked=st.integers(0, 9),
    draw=st.floats(0, 1, exclude_max=True),
    role=st.sampled_from(Role),
    load=st.floats(0, 100),
    claimed=st.just(False),
    prompt_tokens_per_s=st.sampled_from([0.0, 500.0, 2e4]),
    counted_tokens_per_s=st.sampled_from([0.0, 500.0, 2e4]),
    decode_step_s=st.just(0.0),
    cached_tokens=st.integers(0, 100),
    session=st.booleans(),
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


BUILT_IN_SCORES = [goodput, least_loaded, power_of_two, prefix_aware, random, round_robin]


@given(st.lists(candidates, max_size=4), st.integers(1, 10_000))
def test_the_best_is_picked_and_scores_are_finite(pool: list[Candidate], need: int) -> None:
    for policy in BUILT_IN_SCORES:
        request = RequestView(need, need)
        scores = ranking_of("x", policy).scores(pool, request)
        assert all(math.isfinite(score) for score in scores)
        picked = pick(pool, scores)
        assert (picked is None) == (not pool)
        assert picked is None or policy(picked, request) == max(scores)


@given(st.lists(candidates, unique_by=lambda c: c.link, max_size=4), st.integers(1, 10_000), st.randoms())
def test_the_order_of_the_candidates_changes_nothing(pool: list[Candidate], need: int, shuffled: Random) -> None:
    request = RequestView(need, need)
    other = list(pool)
    shuffled.shuffle(other)
    for policy in BUILT_IN_SCORES:
        ranking = ranking_of("x", policy)
        assert pick(pool, ranking.scores(pool, request)) == pick(other, ranking.scores(other, request))


@given(candidates, st.integers(1, 10_000), st.integers(0, 5000))
def test_more_work_is_never_better_and_a_longer_prefix_never_worse(one: Candidate, need: int, more: int) -> None:
    request = RequestView(need, need)
    held = min(more, need - 1)
    for role in Role:
        here = one._replace(role=role, cached_tokens=0)
        for busier in (
            here._replace(queued_tokens=here.queued_tokens + more),
            here._replace(promised_tokens=here.promised_tokens + more),
            here._replace(load=here.load + more),
        ):
            for policy in BUILT_IN_SCORES:
                assert policy(busier, request) <= policy(here, request)
        assert prefix_aware(here._replace(cached_tokens=held), request) >= prefix_aware(here, request)


def test_queued_work_outweighs_a_prefix_in_the_end() -> None:
    """The idle worker computes 600 tokens, all anew, which costs 600 * 3. The holder computes 100, a sixth of the prompt: that
    costs (queued + 100) * 4/3, which is less while fewer than 1,250 tokens wait there."""
    request = RequestView(600, 700)
    idle = BASE._replace(role=Role.PREFILL, link=LinkId(2))
    for queued, best in ((1249, 1), (1251, 2)):
        holder = BASE._replace(role=Role.PREFILL, cached_tokens=500, queued_tokens=queued)
        picked = pick([holder, idle], [prefix_aware(c, request) for c in (holder, idle)])
        assert picked is not None
        assert picked.link == best


def test_among_equals_the_one_picked_longest_ago_is_picked() -> None:
    pool = [BASE._replace(link=LinkId(link), picked=picked) for link, picked in ((1, 7), (2, 3), (3, 0), (4, 0))]
    picked = pick(pool, [0.5] * 4)
    assert picked is not None
    assert picked.link == 3


def test_a_pick_has_the_strongest_reason_that_the_policy_knows() -> None:
    held, last = BASE._replace(cached_tokens=4), BASE._replace(cached_tokens=4, session=True)
    assert why(last, Shortlist(session=True, holders=1)) is Why.SESSION
    assert why(last, Shortlist(holders=1)) is Why.CACHED_PREFIX
    assert why(BASE, Shortlist(holders=1, least_loaded=1)) is Why.LEAST_LOADED
    assert why(held, Shortlist(drawn=2)) is Why.DRAWN
    assert why(BASE, Shortlist(least_recent=1)) is Why.TURN
    assert why(held, EVERYONE) is Why.SCORE


@given(st.integers(0, 1 << 64), st.integers(0, 1 << 32))
def test_draws_are_even_and_depend_on_all_they_are_made_of(seed: int, pick_number: int) -> None:
    numbers = [draw(seed, pick_number, link) for link in range(200)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == 200
    assert 60 < sum(number < 0.5 for number in numbers) < 140
    assert numbers != [draw(seed, pick_number + 1, link) for link in range(200)]
    assert numbers != [draw(seed + 1, pick_number, link) for link in range(200)]
