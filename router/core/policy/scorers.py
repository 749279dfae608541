"""Scorers say how good a worker is for a request: a number in [0, 1], where more is better."""

from __future__ import annotations

from typing import Final

from router.core.policy.candidate import Candidate

QUEUE_HALF_TOKENS: Final = 2048
"""A prefill queue of this many tokens scores 0.5. Any constant gives the same order."""


def decode_score(candidate: Candidate, need_tokens: int) -> float:
    """Return the share of the pool that stays free after this request."""
    free = candidate.kv_tokens - candidate.promised_tokens - need_tokens
    return max(0.0, free / candidate.kv_tokens)


def prefill_score(candidate: Candidate) -> float:
    """Return a higher score for fewer prompt tokens that wait, since this request starts sooner there."""
    return QUEUE_HALF_TOKENS / (QUEUE_HALF_TOKENS + candidate.queued_tokens)
