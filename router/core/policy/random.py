"""The policy "random": any worker, each with the same chance. It is the floor that other policies are compared with."""

from __future__ import annotations

from router.core.policy.candidate import Candidate, RequestView
from router.core.policy.shortlist import Shortlist, shortlisted


@shortlisted(Shortlist(drawn=1))
def score(candidate: Candidate, request: RequestView) -> float:
    """Return the worker's random number, in [0, 1)."""
    return candidate.draw
