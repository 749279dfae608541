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

import faultsim.router
from faultsim.run import run_seed
from pdserve.config import RouterConfig
from pdserve.core.errors import ConfigError
from router.core.events import LinkId
from router.core.policy import most_free_kv, shortest_queue
from router.core.policy.candidate import Candidate, RequestView
from router.core.policy.picker import pick
from router.core.policy.ranking import ranking_of
from router.service.policies import MAX_LOGGED, GuardedPolicy, rankings_of

BASE = Candidate(LinkId(1), 100, 0, 4, 0, 64, suspect=False, refused=False)
REQUEST = RequestView(10, 20)
FALLBACK = ranking_of(most_free_kv.score)

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


def test_the_built_in_policies_are_the_defaults_and_either_serves_both_pools() -> None:
    other = BASE._replace(link=LinkId(2), promised_tokens=50, queued_tokens=0)
    busy = BASE._replace(queued_tokens=9)
    counted: list[tuple[str, str]] = []
    default = rankings_of(RouterConfig(), lambda *fault: counted.append(fault))
    assert default.prefill([busy, other], REQUEST) == [shortest_queue.score(c, REQUEST) for c in (busy, other)]
    assert default.decode([busy, other], REQUEST) == [most_free_kv.score(c, REQUEST) for c in (busy, other)]
    swapped = rankings_of(RouterConfig(prefill_policy="most_free_kv", decode_policy="shortest_queue"), lambda *_: None)
    assert swapped.prefill([busy, other], REQUEST) == default.decode([busy, other], REQUEST)
    assert swapped.decode([busy, other], REQUEST) == default.prefill([busy, other], REQUEST)
    assert counted == []


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_an_unknown_policy_is_refused_with_the_known_ones(pool: str) -> None:
    config = RouterConfig(**{f"{pool}_policy": "round_robbin"})
    known = rf"router\.{pool}_policy must be one of shortest_queue, most_free_kv, or module:function .* got 'round_robbin'"
    with pytest.raises(ConfigError, match=known):
        rankings_of(config, lambda *_: None)


@given(pools, st.integers(0, 20))
def test_a_sound_policy_decides(pool: list[Candidate], turn: int) -> None:
    ranking, faults = guarded(last_wins)
    picked = pick(pool, ranking(pool, REQUEST), turn)
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
    monkeypatch.setattr(faultsim.router, "CONFIG", dataclasses.replace(faultsim.router.CONFIG, **own))
    report = run_seed(seed)
    assert {length % 3 for length in asked} == {0, 1, 2}, "it returned nonsense, failed and chose"
    assert not report.problems
