"""Placement policies are chosen by name, and a policy of the operator's own cannot harm a request."""

from __future__ import annotations

import dataclasses
import logging
import sys
import types
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import sim.faults.router
from pdserve.config import RouterConfig
from pdserve.core.errors import ConfigError
from router.core.events import LinkId
from router.core.policy import (
    EVERYONE,
    Candidate,
    RequestView,
    Shortlist,
    least_loaded,
    pick,
    prefix_aware,
    ranking_of,
    shortlisted,
)
from router.service.policies import BUILTINS, MAX_LOGGED, GuardedPolicy, rankings_of
from sim.faults.run import run_seed

BASE = Candidate(LinkId(1), 100, 0, 4, 0, 64, suspect=False, refused=False)
REQUEST = RequestView(10, 20)
FALLBACK = ranking_of("least_loaded", least_loaded).scores

pools = st.lists(
    st.builds(
        lambda link, promised, queued: BASE._replace(link=LinkId(link), promised_tokens=promised, queued_tokens=queued),
        st.integers(1, 9),
        st.integers(0, 100),
        st.integers(0, 100),
    ),
    max_size=6,
)
nonsense = st.one_of(
    st.just(float("nan")), st.just(float("inf")), st.none(), st.booleans(), st.text(), st.complex_numbers(), st.just(10**400)
)


def guarded(policy: Callable[..., Any]) -> tuple[GuardedPolicy, Counter[str]]:
    faults: Counter[str] = Counter()
    return GuardedPolicy("router.decode_policy", policy, FALLBACK, lambda reason: faults.update([reason])), faults


def last_wins(candidate: Candidate, request: RequestView) -> float:
    return float(candidate.link)


def raises(candidate: Candidate, request: RequestView) -> float:
    raise ZeroDivisionError


def test_a_built_in_policy_is_chosen_by_its_name_with_its_shortlist() -> None:
    counted: list[tuple[str, str]] = []
    default = rankings_of(RouterConfig(), lambda *fault: counted.append(fault))
    assert {default.prefill.name, default.decode.name} == {"prefix_aware"}
    assert default.prefill.scores([BASE], REQUEST) == [prefix_aware(BASE, REQUEST)]
    for name in BUILTINS:
        named = rankings_of(RouterConfig(prefill_policy=name, decode_policy=name), lambda *fault: counted.append(fault))
        assert (named.prefill.name, named.decode.name) == (name, name)
        assert named.prefill.shortlist != EVERYONE
        assert named.prefill.scores([BASE], REQUEST) == named.decode.scores([BASE], REQUEST)
    assert counted == []


def test_a_policy_of_ones_own_scores_everyone_unless_it_says_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    few = shortlisted(Shortlist(least_loaded=2))(lambda candidate, request: 0.0)
    monkeypatch.setitem(sys.modules, "own_policies", types.SimpleNamespace(few=few, all=last_wins))
    rankings = rankings_of(RouterConfig(prefill_policy="own_policies:few", decode_policy="own_policies:all"), lambda *_: None)
    assert rankings.prefill.shortlist == Shortlist(least_loaded=2)
    assert rankings.decode.shortlist == EVERYONE


@pytest.mark.parametrize(
    ("shortlist", "said"),
    [
        (Shortlist(least_loaded="2"), "least_loaded of the policy's shortlist must be a whole number of at least 0, got '2'"),  # type: ignore[arg-type]
        (Shortlist(holders=-1), "holders of the policy's shortlist must be .*, got -1"),
        (Shortlist(drawn=1.5), "drawn of the policy's shortlist must be .*, got 1.5"),  # type: ignore[arg-type]
        (Shortlist(session=2), "session of the policy's shortlist must be True or False, got 2"),  # type: ignore[arg-type]
        ({"least_loaded": 2}, "the policy's shortlist must be a Shortlist, got {'least_loaded': 2}"),
    ],
)
def test_a_shortlist_that_no_pool_could_put_together_is_refused_at_the_start(
    shortlist: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = shortlisted(shortlist)(lambda candidate, request: 0.0)
    monkeypatch.setitem(sys.modules, "mine", types.SimpleNamespace(score=policy))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"^router.decode_policy: {said}"):
        rankings_of(RouterConfig(decode_policy="mine:score"), lambda role, reason: None)


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_an_unknown_policy_is_refused_with_the_known_ones(pool: str) -> None:
    config = RouterConfig(**{f"{pool}_policy": "round_robbin"})
    names = ", ".join(BUILTINS)
    known = rf"router\.{pool}_policy must be one of {names}, or module:function .* got 'round_robbin'"
    with pytest.raises(ConfigError, match=known):
        rankings_of(config, lambda *_: None)


@given(pools)
def test_a_sound_policy_decides(pool: list[Candidate]) -> None:
    ranking, faults = guarded(last_wins)
    picked = pick(pool, ranking(pool, REQUEST))
    assert picked is None or picked.link == max(c.link for c in pool)
    assert not faults


@given(pools, nonsense, st.integers(0, 5))
def test_nonsense_about_one_candidate_gives_the_whole_choice_to_the_built_in(
    pool: list[Candidate], value: object, at: int
) -> None:
    """Scores of two policies do not compare, so none of the operator's is used for this choice."""
    asked = iter(range(len(pool)))
    ranking, faults = guarded(lambda candidate, request: value if next(asked) == at else 1e9)
    scores = ranking(pool, REQUEST)
    if at < len(pool):
        assert scores == FALLBACK(pool, REQUEST)
        assert faults.total() == 1
    else:
        assert scores == [1e9] * len(pool)


@pytest.mark.parametrize("value", [3, 0.5, np.float32(0.5), np.int64(7), Fraction(1, 3)])
def test_every_finite_real_number_is_a_score(value: Any) -> None:
    ranking, faults = guarded(lambda candidate, request: value)
    assert ranking([BASE], REQUEST) == [float(value)]
    assert not faults


@pytest.mark.parametrize(
    "error", [ValueError("x"), RecursionError(), MemoryError(), SystemExit(3), KeyboardInterrupt(), CancelledError()]
)
def test_a_policy_that_raises_is_counted_and_the_built_in_chooses(error: BaseException) -> None:
    def policy(candidate: Candidate, request: RequestView) -> float:
        raise error

    ranking, faults = guarded(policy)
    assert ranking([BASE, BASE], REQUEST) == FALLBACK([BASE, BASE], REQUEST)
    assert faults == {"raised": 1}


def test_a_fault_is_logged_once_for_each_reason_and_for_a_bounded_number_of_them(caplog: pytest.LogCaptureFixture) -> None:
    ranking, faults = guarded(raises)
    for _ in range(5):
        ranking([BASE], REQUEST)
    assert faults == {"raised": 5}
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert record.getMessage() == (
        "router.decode_policy: the policy raised ZeroDivisionError; the built-in policy chooses instead"
    )
    caplog.clear()
    count = iter(range(1000))
    ranking, faults = guarded(lambda candidate, request: type(f"Type{next(count)}", (), {})())
    for _ in range(50):
        ranking([BASE], REQUEST)
    assert faults == {"not_a_number": 50}
    assert len(caplog.records) == MAX_LOGGED


def test_a_policy_cannot_change_what_it_is_shown() -> None:
    def policy(candidate: Any, request: Any) -> float:
        candidate.promised_tokens = 0
        return 1.0

    ranking, faults = guarded(policy)
    ranking([BASE], REQUEST)
    assert faults == {"raised": 1}


def spiteful(candidate: Candidate, request: RequestView) -> Any:
    """Prefer the fullest worker, return nonsense for every third length of a prompt, and raise for another third."""
    if request.prompt_tokens % 3 == 0:
        return None
    if request.prompt_tokens % 3 == 1:
        raise ArithmeticError("a bug of the operator's")
    return candidate.promised_tokens + candidate.queued_tokens


@pytest.mark.parametrize("seed", [1, 2, 4, 5])
def test_no_policy_breaks_a_promise_under_faults(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole cluster is simulated with random faults, and both pools have a policy that chooses badly and fails."""
    asked: set[int] = set()

    def score(candidate: Candidate, request: RequestView) -> Any:
        asked.add(request.prompt_tokens)
        return spiteful(candidate, request)

    monkeypatch.setitem(sys.modules, "spiteful_policies", types.SimpleNamespace(score=score))
    own = {"prefill_policy": "spiteful_policies:score", "decode_policy": "spiteful_policies:score"}
    monkeypatch.setattr(sim.faults.router, "CONFIG", dataclasses.replace(sim.faults.router.CONFIG, **own))
    report = run_seed(seed)
    assert {length % 3 for length in asked} == {0, 1, 2}, "it returned nonsense, failed and chose"
    assert not report.problems
