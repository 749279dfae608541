"""The policy "shortest_queue": the worker with the fewest prompt tokens to compute, since a request starts sooner there."""

from __future__ import annotations

from typing import Final

from router.core.policy.candidate import Candidate, RequestView

HALF_TOKENS: Final = 2048
"""A queue of this many tokens scores 0.5. Any constant gives the same order."""


def score(candidate: Candidate, request: RequestView) -> float:
    """Return a number in (0, 1], which is higher for fewer prompt tokens that wait."""
    return HALF_TOKENS / (HALF_TOKENS + candidate.queued_tokens)
