"""The policies of both pools, as the placer applies them.

A policy is a pure function of one candidate and the request, and gives a score: more is better, and equals take turns. It may
say which candidates it needs scored (`shortlist`). The placer asks it only about workers that may take the request, so a policy
cannot break a rule of placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from router.core.policy import prefix_aware
from router.core.policy.candidate import Candidate, RequestView
from router.core.policy.shortlist import Shortlist, shortlist_of

Policy = Callable[[Candidate, RequestView], float]
Scorer = Callable[[Sequence[Candidate], RequestView], Sequence[float]]
"""A function that returns the score of each candidate, in order. It never raises."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """A policy by its name in the settings, with the candidates that it needs."""

    name: str
    shortlist: Shortlist
    scores: Scorer


@dataclass(frozen=True, slots=True)
class Rankings:
    """The ranking of each pool's workers."""

    prefill: Ranking
    decode: Ranking


def ranking_of(name: str, policy: Policy) -> Ranking:
    """Return the ranking of a policy that never raises."""
    return Ranking(
        name, shortlist_of(policy), lambda candidates, request: [policy(candidate, request) for candidate in candidates]
    )


_PREFIX_AWARE: Final = ranking_of("prefix_aware", prefix_aware.score)
BUILT_IN: Final = Rankings(prefill=_PREFIX_AWARE, decode=_PREFIX_AWARE)
