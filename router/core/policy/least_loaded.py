"""The policy "least_loaded": the prefill worker whose queue is the shortest, or the decode worker that is the emptiest."""

from __future__ import annotations

from router.core.policy.candidate import Candidate, RequestView
from router.core.policy.shortlist import Shortlist, shortlisted


@shortlisted(Shortlist(least_loaded=1))
def score(candidate: Candidate, request: RequestView) -> float:
    """Return the negative load: less load is better."""
    return -candidate.load
