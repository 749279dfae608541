"""The policy "round_robin": the worker that was picked the longest ago."""

from __future__ import annotations

from router.core.policy.candidate import Candidate, RequestView
from router.core.policy.shortlist import Shortlist, shortlisted


@shortlisted(Shortlist(least_recent=1))
def score(candidate: Candidate, request: RequestView) -> float:
    """Return the same for all workers, since equals take turns."""
    return 0.0
