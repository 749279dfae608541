"""The policy "power_of_two": two workers are drawn by chance, and the one with less load gets the request.

Two draws already avoid nearly all long queues (Mitzenmacher, "The power of two choices in randomized load balancing", 2001),
and several routers that see the same loads do not all run to the same worker.
"""

from __future__ import annotations

from router.core.policy.candidate import Candidate, RequestView
from router.core.policy.shortlist import Shortlist, shortlisted


@shortlisted(Shortlist(drawn=2))
def score(candidate: Candidate, request: RequestView) -> float:
    """Return the negative load: less load is better."""
    return -candidate.load
