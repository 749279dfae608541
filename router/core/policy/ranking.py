"""The policies of both pools, as the placer applies them.

A policy is a pure function of one candidate and the request, and gives a score: more is better, and equals take turns. The
placer asks it only about workers that may take the request, so a policy cannot break a rule of placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from router.core.policy import most_free_kv, shortest_queue
from router.core.policy.candidate import Candidate, RequestView

Policy = Callable[[Candidate, RequestView], float]
Ranking = Callable[[Sequence[Candidate], RequestView], Sequence[float]]
"""A function that returns the score of each candidate, in order. It never raises."""


@dataclass(frozen=True, slots=True)
class Rankings:
    """The ranking of each pool's workers."""

    prefill: Ranking
    decode: Ranking


def ranking_of(policy: Policy) -> Ranking:
    """Return the ranking of a policy that never raises."""
    return lambda candidates, request: [policy(candidate, request) for candidate in candidates]


BUILT_IN: Final = Rankings(prefill=ranking_of(shortest_queue.score), decode=ranking_of(most_free_kv.score))
